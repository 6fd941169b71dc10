"""`v3-tiny`, the model that ships whole, and prompts of its domain that its training never read."""

from __future__ import annotations

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.locate import CODE_MODEL
from seqmtp_serve.request import Request, SamplingParams
from services.bench.prompts import PYTHON_PROMPTS, read_prompts

MODEL = CODE_MODEL


def prompts(count: int, num_chars: int = 300) -> list[str]:
    """The ends of held-out prompts, each cut to whole lines of at most `num_chars`."""
    found = []
    for prompt in read_prompts(PYTHON_PROMPTS, count):
        end = prompt[-num_chars:]
        found.append(end[end.index("\n") + 1 :])
    return found


def greedy(
    checkpoint: Checkpoint, prompt: str, max_tokens: int, *, depth: int = 0, ignore_eos: bool = False
) -> Request:
    """A request for the continuation of a plain text, which begins with <bos>."""
    assert checkpoint.bos_token_id is not None
    return Request(
        request_id=f"{depth}/{max_tokens}/{prompt[-20:]}",
        prompt_ids=(checkpoint.bos_token_id, *checkpoint.tokenizer().encode(prompt).ids),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, max_depth=depth, ignore_eos=ignore_eos),
        eos_token_ids=checkpoint.eos_token_ids,
    )
