"""Greedy continuations by vLLM on the CPU, as a line of JSON; run in its environment by `tests/compat/vllm_loads.py`.

Arguments: the checkpoint's folder, the draft depth (0: no speculation), and the prompts' token ids as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

NUM_TOKENS = 64


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams  # after the variables it reads when it is imported

    folder, depth, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    # vLLM 0.32's own CPU kernels are left out where they do not do what they say: its rotary kernel turns two rows of a
    # strided query and no more, and its AMX attention takes no float32.
    options = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["none"]}, "enforce_eager": True}
    if depth:
        options["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": depth,
            "attention_backend": "CPU_MLA",
        }
    model = LLM(model=folder, dtype="float32", max_model_len=512, max_num_seqs=8, disable_log_stats=False, **options)
    asked = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    begun = time.monotonic()
    answers = model.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    seconds = time.monotonic() - begun
    found = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "values", None) for metric in model.get_metrics()
    }
    told = {
        "ids": [list(answer.outputs[0].token_ids) for answer in answers],
        "seconds": seconds,
        "drafts": found.get("vllm:spec_decode_num_drafts") or 0,
        "accepted_by_position": found.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [],
    }
    print(json.dumps(told))


main()
