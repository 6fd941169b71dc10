"""What int8 costs on the shipped model, and that its text stays independent of depth and batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from driver import Driver

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.quality import compare, read_texts
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.request import Request, SamplingParams

MODEL = "smollm2-135m-instruct"
TEXTS = [
    "The tide tables for the harbour were printed every spring, and the fishermen kept them behind the kitchen door.",
    "To sum the squares of the first n numbers, write a loop that adds i * i to a total, then return the total.",
]


def test_texts_are_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [{"text": str(index)} if index % 2 else {"turns": [str(index), "again"]} for index in range(10)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_texts(path, 3) == ["0\nagain", "3", "6\nagain"]


def test_int8_stays_close_to_fp32() -> None:
    quality = compare(MODEL, TEXTS, num_tokens=64)
    assert quality.divergence < 0.05
    assert quality.greedy_agreement > 0.85
    assert quality.perplexity_int8 < 1.1 * quality.perplexity_fp32


@pytest.mark.covers(157)
def test_neighbours_and_chunks_change_no_token_of_the_shipped_model() -> None:
    checkpoint = open_checkpoint(MODEL)
    tokenizer = checkpoint.tokenizer()
    engine = TargetEngine(EngineConfig(num_pages=32, max_model_len=256), checkpoint.config, checkpoint.target_tensors())
    requests = [
        Request(
            request_id=f"r{index}",
            prompt_ids=tuple(tokenizer.encode(text * (1 + index)).ids),
            params=SamplingParams(temperature=0.0, max_tokens=8),
        )
        for index, text in enumerate([*TEXTS, TEXTS[0]])
    ]
    alone = [Driver(engine).run(each)[0].output for each in requests]
    together = Driver(engine, chunk=17).run(*requests)
    assert [stream.output for stream in together] == alone
