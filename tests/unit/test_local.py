"""Driver, scheduler, engines and store together in one process, on a small made-up model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.local import DeferredProposer, LocalService
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.oracle import generate as plain_text
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import CommittedRow, Ref, Request
from tests.unit.engine.engines import MTP, TARGET, config, request, seeded

SCHEDULER = SchedulerConfig(max_batch=8, step_tokens=48, prefill_chunk=16)


def engine(**fields: object) -> TargetEngine:
    proposer = DeferredProposer(ProposerEngine(config(**fields), TINY, MtpConfig(), MTP))
    return TargetEngine(config(**fields), TINY, TARGET, proposer, name="tiny", fingerprint="f")


def letter(token: int) -> str:
    return chr(0x100 + token)


async def generate_all(
    built: TargetEngine, requests: list[Request], scheduler: SchedulerConfig = SCHEDULER
) -> tuple[list[list[CommittedRow]], dict[str, float]]:
    async with asyncio.timeout(120), LocalService.running(built, lambda _: letter, scheduler=scheduler) as service:
        results = await asyncio.gather(*map(service.generate, requests))
        while built._sequences:  # releases ride on a last plan
            await asyncio.sleep(0.001)
        return results, dict(service.driver.status().counters)


def tokens_of(rows: list[CommittedRow]) -> list[int]:
    return [token for row in rows for token in row.tokens]


@pytest.mark.covers(72, 73, 79, 110)
@pytest.mark.parametrize("cohorts", [1, 2])
async def test_text_is_the_oracles_at_every_depth_in_one_batch(cohorts: int) -> None:
    requests = [
        replace(make(index, max_depth=index % 4), request_id=f"{make.__name__}-{index}")
        for index in range(4)
        for make in (request, seeded)
    ]
    results, counters = await generate_all(engine(), requests, replace(SCHEDULER, cohorts=cohorts))
    for one, rows in zip(requests, results, strict=True):
        assert tokens_of(rows) == list(plain_text(TARGET, TINY, one))
    assert counters["accepted"] > 0
    assert counters["rounds.rejected"] > 0
    assert counters["outputs"] == counters["bootstraps"] + counters["progress.delivered"]
    assert "refused.stale_version" not in counters


@pytest.mark.covers(85, 90)
async def test_preemption_leaves_no_trace_in_the_text() -> None:
    requests = [seeded(index, max_tokens=40) for index in range(4)]
    results, counters = await generate_all(engine(num_pages=18), requests)
    for one, rows in zip(requests, results, strict=True):
        assert tokens_of(rows) == list(plain_text(TARGET, TINY, one))
    assert counters["preemptions"] > 0
    assert "refused.overloaded" not in counters  # what the scheduler reserves is what the engine takes


@pytest.mark.covers(81)
async def test_a_stop_string_ends_the_text_inside_a_round() -> None:
    whole = plain_text(TARGET, TINY, request(1))
    stop = "".join(map(letter, whole[7:9]))
    one = request(1, stop=(stop,))
    (rows,), _ = await generate_all(engine(), [one])
    assert tokens_of(rows) == list(whole[:9])
    assert rows[-1].stop_reason == stop


class Recorder:
    """An engine that writes down what it is asked to compute."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], tuple[str, ...]]] = []

    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> list[Draft]:
        self.calls.append(([f"{feed.ref.request_id}:{feed.first_base}" for feed in feeds], tuple(closed)))
        return []


def test_rounds_without_drafts_leave_one_pass_for_the_first_with_drafts() -> None:
    def rows(request_id: str, base: int) -> FeedRows:
        ref = Ref(request_id=request_id, epoch=1, version=base, digest=bytes(16))
        return FeedRows(ref=ref, first_base=base, hidden=torch.zeros(1, 4), next_ids=(7,), depth=3)

    engine = Recorder()
    proposer = DeferredProposer(cast(ProposerEngine, engine))
    proposer.feed([rows("a", 0), rows("b", 0)])
    proposer.feed([rows("a", 1)], ["b"])
    proposer.feed([rows("a", 2), rows("b", 5)])  # b came back
    assert engine.calls == []
    proposer.collect([rows("a", 2).ref], 1.0)
    proposer.collect([rows("a", 2).ref], 1.0)
    assert engine.calls == [(["a:0", "a:1", "a:2"], ("b",))]
    proposer.collect([rows("a", 2).ref, rows("b", 5).ref], 1.0)
    assert engine.calls[1:] == [(["b:5"], ())]


async def test_the_first_row_says_what_a_cache_spared_the_prompt() -> None:
    """Through scheduler, chunks and record: the second turn of a chat finds the pages of the first."""
    built, first = engine(), request(1, prompt_len=40)
    (rows,), _ = await generate_all(built, [first])
    seen = (*first.prompt_ids, *tokens_of(rows))
    turn = replace(first, request_id="turn", prompt_ids=(*seen, 5, 6, 7))
    (again,), _ = await generate_all(built, [turn])
    assert rows[0].cached == 0
    published = len(seen) - len(rows[-1].tokens) - 1  # the last row ends the text: nothing follows it here
    assert again[0].cached == published // 8 * 8
    assert all(row.cached == 0 for row in again[1:])
    assert tokens_of(again) == plain_text(TARGET, TINY, turn)
