"""`seqmtp serve v3-tiny`, with no other word: two expert-parallel ranks and a proposer, over HTTP, with drafts.

Each text is compared with plain decoding of the same weights in this process, which the oracle decodes again in part.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from seqmtp_serve import oracle
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.local import LocalService
from services.detokenizer import Detokenizer
from tests.services.launched import complete, fetch, serving, stream, workers
from tests.unit.v3_tiny import MODEL, greedy, prompts

pytestmark = pytest.mark.slow
RANK = "services.target.rank"
LONG, CHECKED, SHORT = 160, 12, 48  # tokens of a stream that is disturbed; of it, decoded by the oracle; of the others
ENGINE = EngineConfig(weights="fp32", max_model_len=1024, num_pages=24, max_batch=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The service, its launcher and its data folder."""

    url: str
    launcher: psutil.Process
    data: Path


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("service") / "data"
    with serving(MODEL, data, "--no-ray") as (url, launcher):
        yield Running(url=url, launcher=launcher, data=data)


@pytest.fixture(scope="module")
async def expected(checkpoint: Checkpoint) -> dict[str, str]:
    """The plain text of each prompt, which one process that holds all experts gives with drafts as well."""
    long, short = prompts(2)
    requests = {
        long: greedy(checkpoint, long, LONG, ignore_eos=True),
        short: greedy(checkpoint, short, SHORT),
    }
    tensors, texts = checkpoint.target_tensors(), dict[str, str]()
    async with LocalService.open(MODEL, decoder=Detokenizer, engine=ENGINE) as one_process:
        for prompt, request in requests.items():
            tokens = [token for row in await one_process.generate(request) for token in row.tokens]
            start = replace(request, params=replace(request.params, max_tokens=CHECKED))
            assert tokens[:CHECKED] == oracle.generate(tensors, checkpoint.config, start)
            drafting = replace(request.params, max_depth=3)
            rows = await one_process.generate(replace(request, request_id=f"d{request.request_id}", params=drafting))
            assert [token for row in rows for token in row.tokens] == tokens
            assert sum(row.accepted for row in rows) > 0
            texts[prompt] = checkpoint.tokenizer().decode(tokens)
    return texts


def body(prompt: str, max_tokens: int, **more: object) -> Mapping[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


@pytest.mark.covers(99, 100, 101, 157)
def test_two_ranks_with_drafts_give_the_plain_text(service: Running, expected: dict[str, str]) -> None:
    assert len(workers(service.launcher, RANK)) == 1, "the leader is the other rank"
    _, (prompt, text) = expected.items()
    answer = complete(service.url, body(prompt, SHORT))
    assert answer["choices"][0]["text"] == text
    (choice,) = fetch(service.url, f"/v1/requests/{answer['id']}/ledger")["choices"]
    modules = [each for each in choice["rounds"] if each["drafts_from"] == "mtp"]  # the others copied
    assert max(each["drafted"] for each in modules) == 3, "one module, run again: recurrent rollout"
    assert sum(each["accepted"] for each in modules) > 0
    held = re.search(r"it holds ([\d.]+) MiB of weights", (service.data / "logs" / "proposer.log").read_text())
    assert held is not None
    assert 8 < float(held[1]) < 12, "the MTP module, embedding, final norm and head, in float32"


@pytest.mark.covers(88)
def test_a_killed_rank_costs_no_token(service: Running, expected: dict[str, str]) -> None:
    (prompt, text), _ = expected.items()
    (lost,) = workers(service.launcher, RANK)
    told = body(prompt, LONG, ignore_eos=True)
    assert stream(service.url, told, lambda: os.kill(lost, signal.SIGKILL)) == text
    (now,) = workers(service.launcher, RANK)
    assert now != lost


def test_a_conversation_is_continued_as_text(service: Running, expected: dict[str, str]) -> None:
    _, (prompt, text) = expected.items()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": SHORT, "temperature": 0}
    answer = complete(service.url, chat, "/v1/chat/completions")
    assert answer["choices"][0]["message"]["content"] == text
    card = fetch(service.url, "/v1/models")["data"][0]
    assert (card["root"], card["max_model_len"]) == (MODEL, 1024)
    assert "it continues Python code, it does not chat" in card["description"]


def test_the_end_of_a_text_ends_it(service: Running, checkpoint: Checkpoint, expected: dict[str, str]) -> None:
    _, (prompt, _) = expected.items()
    (end,) = checkpoint.eos_token_ids
    answer = complete(service.url, body(prompt, SHORT, logit_bias={str(end): 100}))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
