"""Examples under the help of commands that have none of their own: the core's may not import the terminal's modules."""

from __future__ import annotations

EXAMPLES = {
    "bench": """
examples:
  seqmtp bench speculation                          depths 0 to 3 compared in one run, as a table
  seqmtp bench speculation --url http://127.0.0.1:8000 --json > figures.json
  seqmtp bench all --quick --output figures.json    every kind, as short as it can be
  seqmtp bench KIND --help                          flags of a kind""",
    "inspect": """
examples:
  seqmtp inspect v3-tiny
  seqmtp inspect ./DeepSeek-model --headers-only    what the files declare; no tensor is read
  seqmtp inspect ./model --mtp ./mtp --json         for a script

exit code:
  0 both gates passed, or there is no MTP part; 2 no such model; 3 the MTP gate failed (the target still serves, at
  depth 0); 4 the target gate failed.""",
    "export": """
examples:
  seqmtp export ./model ./plain --target-only              without its MTP layers
  seqmtp export ./fp8-model ./bf16 --dequantise bfloat16   for a runtime that has no block-scaled fp8""",
    "seal": """
examples:
  seqmtp seal ./model      `seqmtp inspect` and the MTP gate then notice a tensor that changed""",
    "fit": """
examples:
  seqmtp fit rollout --kind grid --out shards --seed 1 --tokens 200000     the target's own replies
  seqmtp fit train --shards shards --out run --steps 2000                  continues what is in run/
  seqmtp fit COMMAND --help                                                flags of a step

docs/training.md has the whole way.""",
    "train": """
examples:
  seqmtp train corpus --out corpus                                  the standard library as token ids
  seqmtp train run --corpus corpus --out run --until 50             continues what is in run/
  seqmtp train export --help                                        a run as a checkpoint that can be served

docs/training.md has the whole way.""",
    "backends": """
examples:
  seqmtp backends --json""",
    "config": """
examples:
  SEQMTP_ENGINE__MAX_MODEL_LEN=1024 seqmtp config show     what flags, environment and file add up to; secrets starred
  seqmtp config schema > settings.schema.json              every setting, with what it means""",
}
