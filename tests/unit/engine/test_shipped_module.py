"""The shipped module drafts what the shipped target says: every convention between training and serving at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from driver import Driver
from torch import Tensor

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.request import Request, SamplingParams

CONFIG = EngineConfig(num_pages=64, max_model_len=512)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = [
    "Write a short letter to a neighbour about a lost cat.",
    "Explain in simple words why the sky is blue.",
    "List five things to take along on a hike in the mountains.",
    "A shop sells pens at 3 dollars each. How much do 14 pens cost? Show the steps.",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


def chat(checkpoint: Checkpoint, question: str, index: int) -> Request:
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return Request(
        request_id=f"q{index}",
        prompt_ids=tuple(checkpoint.tokenizer().encode(text).ids),
        params=SamplingParams(temperature=0.0, max_tokens=64),
        eos_token_ids=tuple(checkpoint.eos_token_ids),
    )


def acceptance(checkpoint: Checkpoint, mtp: MtpConfig, tensors: Mapping[str, Tensor]) -> list[float]:
    """Share of full rounds whose proposals 1..k were all accepted, for k = 1, 2, 3."""
    link = DirectProposer(ProposerEngine(CONFIG, checkpoint.config, mtp, tensors))
    engine = TargetEngine(CONFIG, checkpoint.config, checkpoint.target_tensors(), link)
    streams = Driver(engine).run(*(chat(checkpoint, each, index) for index, each in enumerate(QUESTIONS)))
    full = [row.accepted for stream in streams for row in stream.rows if row.drafted == 3]
    assert len(full) > 50
    return [sum(accepted >= depth for accepted in full) / len(full) for depth in (1, 2, 3)]


@pytest.mark.covers(54, 95, 112)
def test_served_drafts_are_accepted_and_the_wrong_fusion_order_shows(checkpoint: Checkpoint) -> None:
    mtp = checkpoint.mtp_config
    assert mtp is not None
    by_position = acceptance(checkpoint, mtp, checkpoint.mtp_tensors())
    assert by_position[0] > 0.3
    assert by_position[1] > 0.1
    swapped = replace(mtp, fusion_order="he" if mtp.fusion_order == "eh" else "eh")
    assert acceptance(checkpoint, swapped, checkpoint.mtp_tensors())[0] < 0.5 * by_position[0]
