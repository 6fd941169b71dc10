"""Engines over small made-up models; see seqmtp_serve/model/synthetic.py."""

from __future__ import annotations

import torch

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from seqmtp_serve.request import Request, SamplingParams

TARGET = target_tensors(TINY)
MTP = mtp_tensors(TARGET, TINY, draft_vocab_size=80)


def config(**fields: object) -> EngineConfig:
    settings = {"weights": "fp32", "page_size": 8, "num_pages": 160, "max_model_len": 160} | fields
    return EngineConfig(**settings)  # type: ignore[arg-type]


def proposer(**fields: object) -> DirectProposer:
    return DirectProposer(ProposerEngine(config(**fields), TINY, MtpConfig(), MTP))


def target(link: DirectProposer | None, **fields: object) -> TargetEngine:
    return TargetEngine(config(**fields), TINY, TARGET, link, name="tiny", fingerprint="f")


def request(index: int = 0, *, prompt_len: int = 12, max_tokens: int = 24, **params: object) -> Request:
    generator = torch.Generator().manual_seed(100 + index)
    prompt = torch.randint(TINY.vocab_size, (prompt_len + 3 * index,), generator=generator).tolist()
    sampling = {"temperature": 0.0, "max_tokens": max_tokens} | params
    return Request(
        request_id=f"r{index}",
        prompt_ids=tuple(prompt),
        params=SamplingParams(**sampling),  # type: ignore[arg-type]
        eos_token_ids=(TINY.vocab_size - 1,),
    )


def seeded(index: int = 0, **params: object) -> Request:
    return request(index, **({"temperature": 0.8, "seeded": True, "seed": 7 + index, "top_p": 0.95} | params))
