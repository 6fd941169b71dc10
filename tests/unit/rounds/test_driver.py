"""The driver on a fake target group and a store in memory: exactly-once rows through every fault."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import (
    AncestryMismatch,
    ContextOverflow,
    Draining,
    Fenced,
    InvalidField,
    NotReady,
    Overloaded,
    RequestNotFound,
    StaleVersion,
    StoreUnreachable,
)
from seqmtp_serve.fake import FAKE_INFO, FakeTargetGroup, fake_piece, fake_text
from seqmtp_serve.frontier.ancestry import digest_of
from seqmtp_serve.frontier.depth_choice import replay
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.frontier.round import State
from seqmtp_serve.ports import Commit, CommitResult, FrontierStore, Snapshot, StepPlan, StepReport
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams
from seqmtp_serve.rounds import OwnedElsewhere, RoundDriver

FAST = SchedulerConfig(
    max_batch=4, step_tokens=24, prefill_chunk=5, retry_first_s=0.002, retry_max_s=0.01, step_deadline_ms=5_000.0
)


def make_request(name: str, *, prompt_len: int = 7, eos: tuple[int, ...] = (), **params: Any) -> Request:
    prompt = tuple((ord(name[0]) + 3 * place) % 26 for place in range(prompt_len))
    params = {"max_tokens": 24, **params}
    return Request(request_id=name, prompt_ids=prompt, params=SamplingParams(**params), eos_token_ids=eos)


@asynccontextmanager
async def driving(
    target: FakeTargetGroup, store: FrontierStore, config: SchedulerConfig = FAST
) -> AsyncIterator[RoundDriver]:
    driver = RoundDriver(target, store, config, lambda _: fake_piece)
    await driver.start()
    async with asyncio.timeout(60):
        await until(lambda: driver.status().target_ready)
        yield driver
    await driver.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def read_all(rows: AsyncIterator[CommittedRow]) -> list[CommittedRow]:
    return [row async for row in rows]


async def generate(driver: RoundDriver, request: Request) -> list[CommittedRow]:
    return await read_all(await driver.submit(request))


def tokens_of(rows: Sequence[CommittedRow]) -> tuple[int, ...]:
    return tuple(token for row in rows for token in row.tokens)


def assert_exactly_once(request: Request, rows: Sequence[CommittedRow]) -> None:
    """Versions without a gap, the text of plain decoding, one end."""
    assert [row.version for row in rows] == list(range(1, len(rows) + 1))
    assert tokens_of(rows) == fake_text(request)
    assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]
    assert all(len(row.origins) == len(row.tokens) for row in rows)
    assert all(row.origins.count("l" if row.copied else "a") == row.accepted for row in rows)


class FaultyStore(MemoryFrontierStore):
    """Loses calls before they arrive and replies after, as scripted: True in `before` or `after` loses that one."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[bool] = []
        self.after: list[bool] = []
        self.down = False
        self.attempts = 0

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        self.attempts += 1
        if self.down or (self.before and self.before.pop(0)):
            raise StoreUnreachable("lost on the way there")
        results = await super().commit(commits)
        await asyncio.sleep(0)
        if self.after and self.after.pop(0):
            raise StoreUnreachable("lost on the way back")
        return results

    async def acquire(self, request: Request, owner: str, lease_s: float, **more: Any) -> Any:
        if self.down:
            raise StoreUnreachable("down")
        return await super().acquire(request, owner, lease_s, **more)


@pytest.mark.covers(73, 79, 80, 110)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("cohorts", [1, 2])
async def test_many_requests_at_once_give_the_plain_text(depth: int, cohorts: int) -> None:
    target, config = FakeTargetGroup(), replace(FAST, cohorts=cohorts, max_depth=depth)
    requests = [
        make_request(name, prompt_len=3 + 5 * index, max_tokens=index or 1, eos=(5,), min_tokens=index // 2)
        for index, name in enumerate("abcdefghij")
    ]
    async with driving(target, MemoryFrontierStore(), config) as driver:
        results = await asyncio.gather(*(generate(driver, request) for request in requests))
        for request, rows in zip(requests, results, strict=True):
            assert_exactly_once(request, rows)
        counters = driver.status().counters
        assert counters["outputs"] == counters["bootstraps"] + counters.get("progress.delivered", 0)
        assert counters["bootstraps"] == len(requests)
        rounds = [row for rows in results for row in rows[1:]]
        assert counters["rounds"] == len(rounds)
        kinds = ("rounds.accepted", "rounds.rejected", "rounds.plain")
        assert sum(counters.get(kind, 0) for kind in kinds) == len(rounds)
        await until(lambda: not target.held)  # every finished request was released
        driver.scheduler.check()


@pytest.mark.covers(81)
async def test_a_stop_string_cuts_the_row_before_it_is_committed() -> None:
    plain = "".join(map(fake_piece, fake_text(make_request("s"))))
    request = make_request("s", stop=(plain[9:12],))
    store = MemoryFrontierStore()
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await generate(driver, request)
    assert_exactly_once(request, rows)
    assert (rows[-1].finish, rows[-1].stop_reason) == (FinishReason.STOP, plain[9:12])
    assert len(tokens_of(rows)) == 12
    snapshot = await store.snapshot("s")
    assert snapshot is not None
    assert snapshot.rows == tuple(rows)


@pytest.mark.covers(85, 88)
async def test_lost_calls_and_lost_replies_are_sent_again_and_counted_once() -> None:
    store, requests = FaultyStore(), [make_request(name) for name in "abc"]
    store.before, store.after = [False, True, True] * 5, [True, False] * 6
    async with driving(FakeTargetGroup(), store) as driver:
        results = await asyncio.gather(*(generate(driver, request) for request in requests))
        counters = driver.status().counters
    for request, rows in zip(requests, results, strict=True):
        assert_exactly_once(request, rows)
    assert counters["commits.dup"] > 0
    assert counters["store_retries"] >= 16


@pytest.mark.covers(88)
async def test_nothing_is_shown_while_the_store_is_down() -> None:
    store, request = FaultyStore(), make_request("a", max_tokens=60)
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(request)
        seen = [await anext(rows)]
        store.down = True
        attempts = store.attempts
        await until(lambda: store.attempts > attempts + 4)
        snapshot = await store.snapshot("a")
        assert snapshot is not None
        while len(seen) < snapshot.version:
            seen.append(await anext(rows))
        following = asyncio.ensure_future(anext(rows))
        await asyncio.sleep(0.02)
        assert not following.done()
        assert not driver.status().store_ready
        store.down = False
        assert_exactly_once(request, [*seen, await following, *await read_all(rows)])


async def test_a_store_that_stays_away_ends_the_stream_with_its_name() -> None:
    store = FaultyStore()
    async with driving(FakeTargetGroup(), store, replace(FAST, store_wait_s=0.02, submit_wait_s=0.01)) as driver:
        rows = await driver.submit(make_request("a", max_tokens=60))
        await anext(rows)
        store.down = True
        with pytest.raises(StoreUnreachable):
            await read_all(rows)
        with pytest.raises(NotReady):
            await driver.submit(make_request("b"))
        store.down = False
        await generate(driver, make_request("c"))


@pytest.mark.covers(88, 89)
@pytest.mark.parametrize("cohorts", [1, 2])
async def test_a_target_lost_mid_stream_costs_a_replay_and_no_token(cohorts: int) -> None:
    target, store = FakeTargetGroup(delay_s=0.001), MemoryFrontierStore()
    requests = [make_request(name, max_tokens=50) for name in "abcdef"]
    async with driving(target, store, replace(FAST, cohorts=cohorts)) as driver:
        streams = [await driver.submit(request) for request in requests]
        readers = [asyncio.ensure_future(read_all(stream)) for stream in streams]
        for _ in range(3):
            num_plans = len(target.plans)
            await until(lambda: len(target.plans) > num_plans + 6)  # noqa: B023
            target.lose()
            await until(lambda: not driver.status().target_ready)
            await asyncio.sleep(0.01)
            target.restore()
        for request, rows in zip(requests, await asyncio.gather(*readers), strict=True):
            assert_exactly_once(request, rows)
        assert driver.status().counters["target_losses"] == 3
        assert driver.status().counters["replays"] > 3


async def test_a_target_that_stays_away_ends_streams_with_not_ready() -> None:
    target, store = FakeTargetGroup(), MemoryFrontierStore()
    request = make_request("a", max_tokens=60)
    async with driving(target, store, replace(FAST, target_wait_s=0.02)) as driver:
        rows = await driver.submit(request)
        first = await anext(rows)
        target.lose()
        with pytest.raises(NotReady):
            await read_all(rows)
        await until(lambda: not driver.status().running)
        with pytest.raises(NotReady):
            await driver.submit(make_request("b"))
        target.restore()
        await until(lambda: driver.status().target_ready)
        again = await generate(driver, request)  # the record was not ended: it goes on where it was
        assert again[0] == first
        assert_exactly_once(request, again)


async def test_a_target_that_does_not_answer_in_time_is_lost() -> None:
    class Hanging(FakeTargetGroup):
        hang = False

        async def step(self, plan: StepPlan) -> StepReport:
            if self.hang:
                self.hang = False
                await asyncio.sleep(3600)
            return await super().step(plan)

    target, request = Hanging(), make_request("a")
    async with driving(target, MemoryFrontierStore(), replace(FAST, step_deadline_ms=20.0)) as driver:
        rows = await driver.submit(request)
        first = await anext(rows)
        target.hang = True
        assert_exactly_once(request, [first, *await read_all(rows)])
        assert driver.status().counters["target_losses"] == 1


@pytest.mark.covers(88)
async def test_cancel_ends_the_stream_the_record_and_the_targets_state() -> None:
    target, store = FakeTargetGroup(delay_s=0.001), MemoryFrontierStore()
    async with driving(target, store) as driver:
        rows = await driver.submit(make_request("a", max_tokens=100))
        seen = [await anext(rows)]
        assert await driver.cancel("a")
        assert await driver.cancel("a")
        assert not await driver.cancel("unknown")
        seen += await read_all(rows)
        assert (seen[-1].finish, seen[-1].tokens) == (FinishReason.CANCELLED, ())
        assert [row.version for row in seen] == list(range(1, len(seen) + 1))
        snapshot = await store.snapshot("a")
        assert snapshot is not None
        assert (snapshot.finish, snapshot.rows) == (FinishReason.CANCELLED, tuple(seen[:-1]))
        await until(lambda: not target.held)
        assert driver.status().counters["finished.cancelled"] == 1


async def test_a_cancel_while_a_row_is_being_committed_shows_that_row_first() -> None:
    class SlowReply(MemoryFrontierStore):
        async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
            results = await super().commit(commits)
            await asyncio.sleep(0.02)
            return results

    store = SlowReply()
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(make_request("a", max_tokens=100))
        first = await anext(rows)
        while (snapshot := await store.snapshot("a")) is None or snapshot.version < 2:
            await asyncio.sleep(0.001)
        assert await driver.cancel("a")
        seen = [first, *await read_all(rows)]
    recorded = await store.snapshot("a")
    assert recorded is not None
    assert recorded.rows == tuple(seen[:-1])
    assert len(recorded.rows) == 2
    assert (seen[-1].version, seen[-1].finish) == (3, FinishReason.CANCELLED)


async def test_a_cancel_that_the_record_tells_of_first_counts_once() -> None:
    """The next commit is refused and the record read, all before the cancel itself is answered."""

    class Late(MemoryFrontierStore):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.cancelled = asyncio.Event(), asyncio.Event()

        async def cancel(self, request_id: str, *, abandoned_at: int | None = None) -> CommitResult:
            answer = await super().cancel(request_id, abandoned_at=abandoned_at)
            await self.read.wait()
            return answer

        async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None:
            snapshot = await super().snapshot(request_id, after_version)
            self.read.set()
            await self.cancelled.wait()
            return snapshot

    store = Late()
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(make_request("a", max_tokens=100))
        assert await driver.cancel("a")
        store.cancelled.set()
        assert (await read_all(rows))[-1].finish is FinishReason.CANCELLED
        for _ in range(10):
            await asyncio.sleep(0)  # the record's answer is acted on
        assert driver.status().counters["finished.cancelled"] == 1


@pytest.mark.covers(107)
async def test_auto_depth_finds_out_and_the_text_stays_the_same() -> None:
    request = make_request("a", max_tokens=100)
    async with driving(FakeTargetGroup(), MemoryFrontierStore(), replace(FAST, depth_policy="auto")) as driver:
        rows = await generate(driver, request)
        status = driver.status()
    assert_exactly_once(request, rows)
    assert {row.drafted for row in rows[1:]} >= {0, 1}
    assert rows[1].depth_reason == "plain: no step was measured yet"
    assert any(re.fullmatch(r"depth \d: .* times plain decoding at batch 1.*", row.depth_reason) for row in rows)
    assert status.depth_reason
    assert replay(json.loads(json.dumps(list(driver.depth.ledger)))) == []


async def test_a_cancel_from_elsewhere_ends_the_stream_the_same_way() -> None:
    store = MemoryFrontierStore()
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(make_request("a", max_tokens=100))
        await anext(rows)
        await store.cancel("a")
        assert (await read_all(rows))[-1].finish is FinishReason.CANCELLED


@pytest.mark.covers(85)
async def test_a_takeover_fences_the_first_owner_and_goes_on_from_the_record() -> None:
    target, gated = FakeTargetGroup(delay_s=0.002), Gated()
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=60)
    async with driving(target, store) as first, driving(gated, store) as second:
        rows = await first.submit(request)
        await anext(rows)
        gated.hold = True
        taken = await second.submit(request)
        with pytest.raises(Fenced):
            await read_all(rows)
        await until(lambda: not target.held)
        gated.hold = False
        assert_exactly_once(request, await read_all(taken))


@pytest.mark.covers(85)
async def test_a_fenced_owner_shows_the_rest_of_a_record_that_has_ended_meanwhile() -> None:
    gated, store, request = Gated(), MemoryFrontierStore(), make_request("a", max_tokens=60)
    async with driving(gated, store) as first, driving(FakeTargetGroup(), store) as second:
        gated.hold = True  # the first row is no round: it comes
        rows = await first.submit(request)
        seen = [await anext(rows)]
        taken = await generate(second, request)
        gated.hold = False
        seen += await read_all(rows)
    assert seen == taken
    assert_exactly_once(request, seen)


class Gated(FakeTargetGroup):
    """Answers no round while `hold` is set."""

    hold = False

    async def step(self, plan: StepPlan) -> StepReport:
        while self.hold and plan.verify:
            await asyncio.sleep(0.001)
        return await super().step(plan)


def roll_back(store: MemoryFrontierStore, request: Request, version: int) -> None:
    """The store comes back as it was at `version`: acknowledged rows are gone."""
    record = store._records[request.request_id]
    del record.rows[version:]
    record.digest = digest_of(request.prompt_ids, [row.tokens for row in record.rows])


@pytest.mark.covers(85)
async def test_an_owner_that_was_replaced_cannot_cancel_what_nobody_reads_there() -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=60)
    target = FakeTargetGroup(delay_s=0.002)
    async with driving(target, store) as first, driving(FakeTargetGroup(delay_s=0.002), store) as second:
        await anext(await first.submit(request))
        taken = await second.submit(request)
        rows = [await anext(taken)]
        assert not await first.cancel("a", abandoned=True)
        assert_exactly_once(request, [*rows, *await read_all(taken)])


@pytest.mark.covers(85, 88)
@pytest.mark.parametrize("epoch", [1, 0])
async def test_a_record_that_lost_rows_is_brought_up_to_what_was_shown(epoch: int) -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=100)
    target = FakeTargetGroup()
    async with driving(target, store) as driver:
        rows = await driver.submit(request, meta={"kept": "too"})
        seen = [await anext(rows) for _ in range(4)]
        roll_back(store, request, 2)
        store._records["a"].epoch = epoch
        seen += await read_all(rows)
        assert_exactly_once(request, seen)
        snapshot = await store.snapshot("a")
        assert snapshot is not None
        assert (snapshot.rows, snapshot.epoch, snapshot.meta) == (tuple(seen), 2, {"kept": "too"})
        assert driver.status().counters["restored_rows"] >= 2
        await until(lambda: not target.held)


@pytest.mark.covers(88)
async def test_a_record_that_vanished_is_written_again() -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=100)
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(request, meta={"kept": "too"})
        seen = [await anext(rows)]
        store._records.clear()
        seen += await read_all(rows)
    assert_exactly_once(request, seen)
    snapshot = await store.snapshot("a")
    assert snapshot is not None
    assert (snapshot.rows, snapshot.meta) == (tuple(seen), {"kept": "too"})


@pytest.mark.parametrize("fault", ["other rows", "further", "newer epoch"])
async def test_a_record_that_is_not_an_earlier_state_of_ours_ends_the_request_here(fault: str) -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=100)
    target = FakeTargetGroup()
    async with driving(target, store) as driver:
        rows = await driver.submit(request)
        for _ in range(3):
            await anext(rows)
        record = store._records["a"]
        match fault:
            case "other rows":
                record.rows[1:] = [replace(record.rows[1], tokens=(25,))]
            case "further":
                record.rows += [replace(record.rows[-1], version=len(record.rows) + 1 + more) for more in range(40)]
            case "newer epoch":
                roll_back(store, request, 1)
                record.epoch = 9
        error = {"other rows": AncestryMismatch, "further": StaleVersion, "newer epoch": Fenced}[fault]
        with pytest.raises(error):
            await read_all(rows)
        await until(lambda: not target.held)  # pages and drafts are given up at once


async def test_a_full_store_is_waited_for_by_streams_and_named_to_newcomers() -> None:
    class Full(FaultyStore):
        full = False

        async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
            if self.full:
                self.attempts += 1
                raise Overloaded("the store's memory is full")
            return await super().commit(commits)

        async def acquire(self, request: Request, owner: str, lease_s: float, **more: Any) -> Any:
            if self.full:
                raise Overloaded("the store's memory is full")
            return await super().acquire(request, owner, lease_s, **more)

    store, request = Full(), make_request("a", max_tokens=60)
    async with driving(FakeTargetGroup(), store) as driver:
        rows = await driver.submit(request)
        seen = [await anext(rows)]
        store.full = True
        with pytest.raises(Overloaded):
            await driver.submit(make_request("b"))
        attempts = store.attempts
        await until(lambda: store.attempts > attempts + 3)
        store.full = False
        assert_exactly_once(request, [*seen, *await read_all(rows)])


@pytest.mark.covers(85)
async def test_an_owner_that_learns_of_its_fencing_from_its_lease_stops_at_once() -> None:
    target, store, request = Gated(), MemoryFrontierStore(), make_request("a", max_tokens=60)
    async with driving(target, store) as driver:
        rows = await driver.submit(request)
        seen = [await anext(rows)]
        target.hold = True  # no commit will tell it
        await until(lambda: any(one.state is State.VERIFYING for one in driver.scheduler.running))
        await store.acquire(request, "other", 5.0)
        driver.renewed(driver.owned(), [CommitResult.FENCED])
        with pytest.raises(Fenced):
            seen += await read_all(rows)
        assert not driver.scheduler.running
        target.hold = False
        await until(lambda: not target.held)


async def test_a_cancel_whose_reply_was_lost_is_repeated_and_counts() -> None:
    target, store = FakeTargetGroup(delay_s=0.001), MemoryFrontierStore()
    async with driving(target, store) as driver:
        rows = await driver.submit(make_request("a", max_tokens=100))
        await anext(rows)
        await store.cancel("a")  # the call arrived, the reply did not
        assert await driver.cancel("a")
        assert (await read_all(rows))[-1].finish is FinishReason.CANCELLED
        await until(lambda: not target.held)
        await generate(driver, make_request("b"))
        assert not await driver.cancel("b")


async def test_a_record_is_joined_only_at_the_epoch_that_was_seen() -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=60)
    target = Gated()
    async with driving(FakeTargetGroup(delay_s=0.002), store) as first, driving(target, store) as second:
        rows = await first.submit(request, seen_epoch=0)
        with pytest.raises(OwnedElsewhere) as told:
            await second.submit(request, seen_epoch=0)
        assert (told.value.snapshot.owner, told.value.snapshot.epoch) == ("local", 1)
        target.hold = True
        await second.submit(request, seen_epoch=1)
        with pytest.raises(Fenced):
            await read_all(rows)
        target.hold = False
        assert_exactly_once(request, await generate(second, request))
        assert_exactly_once(request, await read_all(await first.submit(request, seen_epoch=0)))  # it has ended


@pytest.mark.covers(85, 90)
async def test_pressure_on_pages_preempts_and_replays_without_a_trace_in_the_text() -> None:
    target = FakeTargetGroup(replace(FAKE_INFO, num_pages=14))
    requests = [make_request(name, max_tokens=40) for name in "abcde"]
    async with driving(target, MemoryFrontierStore()) as driver:
        results = await asyncio.gather(*(generate(driver, request) for request in requests))
        counters = driver.status().counters
    for request, rows in zip(requests, results, strict=True):
        assert_exactly_once(request, rows)
    assert counters["preemptions"] > 0
    assert "refused.overloaded" not in counters


async def test_pages_held_by_somebody_else_are_waited_for() -> None:
    target = FakeTargetGroup(replace(FAKE_INFO, num_pages=20))
    store, others = MemoryFrontierStore(), MemoryFrontierStore()
    ours = [make_request(name, max_tokens=40) for name in "ab"]
    theirs = [make_request(name, max_tokens=40) for name in "yz"]
    async with driving(target, store) as here, driving(target, others) as there:
        results = await asyncio.gather(
            *(generate(here, request) for request in ours), *(generate(there, request) for request in theirs)
        )
        counters = [driver.status().counters.get("refused.overloaded", 0.0) for driver in (here, there)]
    for request, rows in zip([*ours, *theirs], results, strict=True):
        assert_exactly_once(request, rows)
    assert sum(counters) > 0


@pytest.mark.covers(85, 130)
async def test_a_target_whose_state_drifted_is_replayed_and_if_that_does_not_help_the_request_ends() -> None:
    class Forgetful(FakeTargetGroup):
        forgets = 0

        async def step(self, plan: StepPlan) -> StepReport:
            if self.forgets and plan.verify:
                self.forgets -= 1
                self.held.clear()
            return await super().step(plan)

    target, request = Forgetful(), make_request("a")
    async with driving(target, MemoryFrontierStore()) as driver:
        target.forgets = 1
        assert_exactly_once(request, await generate(driver, request))
        assert driver.status().counters["replays"] == 1
        target.forgets = 100
        rows = await generate(driver, make_request("b"))
        assert (rows[-1].finish, rows[-1].tokens) == (FinishReason.ERROR, ())
        assert rows[-1].stop_reason == "request_not_found"
        target.forgets = 0
        assert_exactly_once(make_request("c"), await generate(driver, make_request("c")))


@pytest.mark.parametrize("spoil", ["silence", "wrong_ref", "too_long", "repeat", "too_long_always"])
async def test_results_that_do_not_fit_harm_no_text(spoil: str) -> None:
    class Spoiling(FakeTargetGroup):
        num_spoiled = 0

        async def step(self, plan: StepPlan) -> StepReport:
            report = await super().step(plan)
            if not plan.verify or (self.num_spoiled and spoil != "too_long_always"):
                return report
            self.num_spoiled += 1
            (row,) = report.rows
            too_long = replace(row, tokens=(*row.tokens, 1, 2))
            rows = {
                "silence": (),
                "wrong_ref": (replace(row, ref=replace(row.ref, digest=bytes(16))),),
                "too_long": (too_long,),
                "too_long_always": (too_long,),
                "repeat": (row, row),
            }
            return replace(report, rows=rows[spoil])

    request = make_request("a")
    async with driving(Spoiling(), MemoryFrontierStore()) as driver:
        rows = await generate(driver, request)
    if spoil == "too_long_always":
        assert (rows[-1].finish, rows[-1].stop_reason) == (FinishReason.ERROR, "protocol_error")
        assert tokens_of(rows) == fake_text(request)[:1]
    else:
        assert_exactly_once(request, rows)


async def test_a_decoder_that_raises_ends_its_own_request_only() -> None:
    def broken(token: int) -> str:
        raise ValueError(f"no text for {token}")

    driver = RoundDriver(
        FakeTargetGroup(),
        MemoryFrontierStore(),
        FAST,
        lambda request: broken if request.request_id == "a" else fake_piece,
    )
    await driver.start()
    async with asyncio.timeout(60):
        await until(lambda: driver.status().target_ready)
        bad, good = await asyncio.gather(generate(driver, make_request("a")), generate(driver, make_request("b")))
    await driver.close()
    assert [(row.finish, row.stop_reason) for row in bad] == [(FinishReason.ERROR, "internal_error")]
    assert_exactly_once(make_request("b"), good)


async def test_what_cannot_be_served_is_refused_before_there_is_a_stream() -> None:
    async with driving(FakeTargetGroup(delay_s=0.01), MemoryFrontierStore(), replace(FAST, max_waiting=1)) as driver:
        with pytest.raises(ContextOverflow):
            await driver.submit(make_request("a", max_tokens=1000))
        with pytest.raises(InvalidField):
            await driver.submit(make_request("a", stop=("",)))
        for name in "abcde":
            await driver.submit(make_request(name))
        with pytest.raises(Overloaded):
            await driver.submit(make_request("f"))
        with pytest.raises(RequestNotFound):
            driver.attach("f")
    cold = RoundDriver(FakeTargetGroup(), MemoryFrontierStore(), FAST, lambda _: fake_piece)
    with pytest.raises(NotReady):
        await cold.submit(make_request("a"))


async def test_readers_join_at_any_version_and_a_second_submit_joins_too() -> None:
    request = make_request("a", max_tokens=40)
    async with driving(FakeTargetGroup(delay_s=0.001), MemoryFrontierStore()) as driver:
        rows = await driver.submit(request)
        head = [await anext(rows), await anext(rows)]
        joined, later = await driver.submit(request), driver.attach("a", after_version=2)
        tail = await read_all(rows)
        assert await read_all(joined) == head + tail
        assert await read_all(later) == tail
        assert await read_all(await driver.submit(request)) == head + tail  # from the record, after the end
        assert await read_all(await driver.submit(request, after_version=len(head + tail))) == []


async def test_closing_ends_streams_and_leaves_the_records() -> None:
    store, request = MemoryFrontierStore(), make_request("a", max_tokens=60)
    async with driving(FakeTargetGroup(delay_s=0.001), store) as driver:
        rows = await driver.submit(request)
        await anext(rows)
    with pytest.raises(Draining, match="another one goes on"):
        await read_all(rows)
    async with driving(FakeTargetGroup(), store) as driver:
        assert_exactly_once(request, await generate(driver, request))


async def test_a_retired_driver_finishes_what_it_has_and_takes_nothing_new() -> None:
    request = make_request("a", max_tokens=60)
    async with driving(FakeTargetGroup(delay_s=0.001), MemoryFrontierStore()) as driver:
        rows = await driver.submit(request)
        driver.retire()
        with pytest.raises(Draining):
            await driver.submit(make_request("b"))
        joined = await driver.submit(request)  # a reader is no newcomer
        assert driver.status().draining
        assert await read_all(rows) == await read_all(joined)


async def test_an_idle_driver_looks_whether_anything_is_left() -> None:
    async with driving(FakeTargetGroup(), MemoryFrontierStore()) as driver:
        await generate(driver, make_request("a"))
        driver.check()
        leaked = (await driver.submit(make_request("b", max_tokens=60)), driver._requests.get("b"))[1]
        await driver.cancel("b")
        driver.check()
        driver.scheduler.waiting.append(leaked)
        with pytest.raises(AssertionError):
            driver.check()
        driver.scheduler.waiting.clear()


async def test_a_pause_that_ends_between_two_looks_is_not_slept_through() -> None:
    """The plan kept to it, the rest after the plan saw none, and so had no end."""

    class Ending:
        looks = iter([0.01])

        @property
        def pause_s(self) -> float:
            return next(self.looks, 0.0)

        def observe(self, refused: bool) -> None:
            """Nobody is refused."""

    request = make_request("late", max_tokens=10)
    async with driving(FakeTargetGroup(), MemoryFrontierStore()) as driver, asyncio.timeout(30):
        driver._congestion = Ending()  # type: ignore[assignment]
        assert_exactly_once(request, await generate(driver, request))


async def test_a_target_group_that_is_ending_is_given_nothing_new() -> None:
    class Ending(FakeTargetGroup):
        ends = False

        async def step(self, plan: StepPlan) -> StepReport:
            return replace(await super().step(plan), draining=self.ends)

    target, store = Ending(delay_s=0.001), MemoryFrontierStore()
    first, second = make_request("a", max_tokens=60), make_request("b", max_tokens=60)
    async with driving(target, store) as driver:
        rows = await driver.submit(first)
        await anext(rows)
        target.ends = True
        await anext(rows)
        waiting = await driver.submit(second)
        await read_all(rows)  # to its end
        status = driver.status()
        assert (status.target_ready, status.waiting, status.running) == (False, 1, 0)
        assert "waits" in status.target_detail or "wait for another" in status.target_detail
        assert all(admit.ref.request_id == "a" for plan in target.plans for admit in plan.admit)
        target.lose()  # it ends, another comes
        target.ends = False
        driver._work[0].set()
        target.restore()
        assert_exactly_once(second, await read_all(waiting))


async def test_refused_drafts_are_counted() -> None:
    class Suspicious(FakeTargetGroup):
        async def step(self, plan: StepPlan) -> StepReport:
            return replace(await super().step(plan), refused_drafts=len(plan.verify))

    request = make_request("a")
    async with driving(Suspicious(), MemoryFrontierStore()) as driver:
        rows = await generate(driver, request)
        assert driver.status().counters["drafts.refused"] == len(rows) - 1
