"""Target, proposer and coordinator as real processes, and what a reader sees when one of them dies or hangs.

Every stream is compared with the text of the same request decoded plainly, at depth 0, in one process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from tiny_model import write_tiny_model

from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.errors import ContextOverflow, RequestNotFound, Unavailable
from seqmtp_serve.local import LocalService
from seqmtp_serve.ports import StepPlan
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams
from services.coordinator.target_link import GrpcTargetGroup
from services.settings import EngineSettings, ModelSettings, SchedulerSettings, Settings

MAX_LEN = 16_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, seeded=True, max_tokens=200, ignore_eos=True)
ENDLESS = replace(SEEDED, max_tokens=15_000)  # outlives any fault of these tests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = Settings(
        model=ModelSettings(path=str(model), mtp=str(model.parent / "tiny-mtp")),
        engine=EngineSettings(max_model_len=MAX_LEN, max_num_seqs=4, weights="fp32"),
        scheduler=SchedulerSettings(reader_grace_s=0.5, prefill_chunk=16),
    )
    with cluster(tmp_path_factory.mktemp("cluster"), settings) as running:
        running.start("target", "proposer", "coordinator")
        yield running


def request(name: str, params: SamplingParams) -> Request:
    return Request(request_id=name, prompt_ids=tuple(range(2, 42)), params=params)


async def plain_text(model: Path, params: SamplingParams, num_tokens: int) -> list[int]:
    """The first tokens of the request, decoded without speculation and without a network."""
    plain = replace(params, max_tokens=num_tokens, max_depth=0)
    engine = EngineConfig(weights="fp32", max_model_len=MAX_LEN, num_pages=MAX_LEN // 64, max_batch=1)
    async with LocalService.open(
        str(model), decoder=lambda *_: lambda _: "", engine=engine, scheduler=SchedulerConfig(max_batch=1)
    ) as service:
        return tokens_of(await service.generate(request("plain", plain)))


def tokens_of(rows: list[CommittedRow]) -> list[int]:
    return [token for row in rows for token in row.tokens]


async def read_until(stream: AsyncIterator[CommittedRow], rows: list[CommittedRow], holds) -> None:
    """Read on into `rows` until `holds(row)`; every version must follow the one before."""
    async for row in stream:
        assert row.version == len(rows) + 1
        rows.append(row)
        if holds(row):
            return
    pytest.fail("the stream ended first")


def drafted(row: CommittedRow) -> bool:
    return row.drafted > 0


def plain(row: CommittedRow) -> bool:
    return row.drafted == 0 and row.version > 1


@pytest.mark.covers(126, 157)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_stream_is_the_text_of_plain_decoding(workers: Cluster, model: Path, params: SamplingParams):
    await workers.ready()
    rows = [row async for row in workers.generate(request(f"whole-{params.seed}", params))]
    assert tokens_of(rows) == await plain_text(model, params, 200)
    assert [row.version for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1].finish is FinishReason.LENGTH
    assert sum(row.accepted for row in rows) > 0


@pytest.mark.covers(110)
async def test_the_coordinators_counters_reconcile(workers: Cluster):
    await workers.ready()
    [row async for row in workers.generate(request("counted", GREEDY))]
    counters = (await workers.until(lambda reply: reply.running == 0)).counters
    assert counters["outputs"] == counters["bootstraps"] + counters["progress.delivered"]
    by_position = [count for name, count in counters.items() if name.startswith("accepted.pos")]
    assert counters["accepted"] == sum(by_position) > 0
    kinds = ("rounds.accepted", "rounds.rejected", "rounds.plain")
    assert counters["rounds"] == sum(counters[kind] for kind in kinds if kind in counters)


async def test_an_ended_request_is_read_from_the_store(workers: Cluster):
    await workers.ready()
    rows = [row async for row in workers.generate(request("kept", SEEDED))]
    assert await workers.attach("kept") == rows
    assert await workers.attach("kept", after_version=5) == rows[5:]
    with pytest.raises(RequestNotFound):
        await workers.attach("never-heard-of")


async def test_a_prompt_that_does_not_fit_is_refused_with_its_own_error(workers: Cluster):
    await workers.ready()
    too_long = Request(request_id="long", prompt_ids=(3,) * (MAX_LEN + 1), params=SEEDED)
    with pytest.raises(ContextOverflow):
        await anext(workers.generate(too_long))


@pytest.mark.covers(155)
async def test_killing_the_proposer_loses_no_token_and_it_drafts_again_when_it_is_back(workers: Cluster, model: Path):
    await workers.ready()
    rows: list[CommittedRow] = []
    async with aclosing(workers.generate(request("proposer-killed", ENDLESS))) as stream:
        await read_until(stream, rows, lambda row: drafted(row) and row.version > 20)
        workers.send("proposer", signal.SIGKILL)
        await read_until(stream, rows, plain)
        workers.start("proposer")
        await read_until(stream, rows, drafted)
    assert tokens_of(rows) == await plain_text(model, ENDLESS, len(tokens_of(rows)))


async def test_a_hung_proposer_does_not_hold_the_stream_up(workers: Cluster, model: Path):
    await workers.ready()
    rows: list[CommittedRow] = []
    async with aclosing(workers.generate(request("proposer-hung", ENDLESS))) as stream:
        await read_until(stream, rows, lambda row: drafted(row) and row.version > 20)
        workers.send("proposer", signal.SIGSTOP)
        stopped = len(rows)
        await read_until(stream, rows, lambda row: plain(row) and row.version > stopped + 100)
        workers.send("proposer", signal.SIGCONT)
        await read_until(stream, rows, drafted)
    assert tokens_of(rows) == await plain_text(model, ENDLESS, len(tokens_of(rows)))


async def test_readiness_of_the_mtp_side_follows_the_proposer_while_nothing_runs(workers: Cluster):
    await workers.ready()
    await workers.until(lambda reply: reply.running == 0)
    workers.send("proposer", signal.SIGKILL)
    reply = await workers.until(lambda reply: not reply.mtp_ready)
    assert reply.target_ready
    assert reply.mtp_detail
    workers.start("proposer")
    await workers.ready()


@pytest.mark.covers(88, 126)
async def test_killing_the_target_costs_a_replay_and_no_token(workers: Cluster, model: Path):
    before = (await workers.ready()).counters
    rows: list[CommittedRow] = []
    async with aclosing(workers.generate(request("target-killed", ENDLESS))) as stream:
        await read_until(stream, rows, lambda row: row.version > 20)
        workers.send("target", signal.SIGKILL)
        workers.start("target")
        after = (await workers.until(lambda reply: reply.counters["replays"] > before["replays"])).counters
        at_replay = after["rounds"] - before["rounds"] + 1
        await read_until(stream, rows, lambda row: drafted(row) and row.version > at_replay + 20)
    assert tokens_of(rows) == await plain_text(model, ENDLESS, len(tokens_of(rows)))


@pytest.mark.covers(88, 126)
async def test_another_coordinator_takes_over_what_a_killed_one_left(workers: Cluster, model: Path):
    await workers.ready()
    rows: list[CommittedRow] = []
    wanted = request("coordinator-killed", replace(SEEDED, max_tokens=1000))
    with pytest.raises(Unavailable):
        async with aclosing(workers.generate(wanted)) as stream:
            await read_until(stream, rows, lambda row: row.version > 20)
            workers.send("coordinator", signal.SIGKILL)
            await read_until(stream, rows, lambda row: row.finish is not None)
    workers.start("coordinator")
    await workers.ready()
    again = [row async for row in workers.generate(wanted)]
    assert again[: len(rows)] == rows, "what was read is what was committed"
    assert tokens_of(again) == await plain_text(model, SEEDED, 1000)


async def test_a_request_nobody_reads_is_cancelled_after_its_grace_time_and_its_pages_are_free(workers: Cluster):
    await workers.ready()
    await workers.until(lambda reply: reply.running == 0)
    async with aclosing(workers.generate(request("left", ENDLESS))) as stream:
        for _ in range(5):
            await anext(stream)
    await workers.until(lambda reply: reply.running == 0)
    assert (await workers.attach("left"))[-1].finish is FinishReason.CANCELLED
    group = GrpcTargetGroup(lambda: workers.addresses("target"))
    info = await group.info()
    async with asyncio.timeout(60):  # the target hears of it a moment later
        while (await group.step(StepPlan(step_id=1))).free_pages != info.num_pages:
            await asyncio.sleep(0.05)
    await group.close()
