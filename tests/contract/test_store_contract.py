"""What every frontier store promises, whatever it is made of."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from seqmtp_serve.frontier.ancestry import digest_of, initial_digest
from seqmtp_serve.ports import CommitResult, FrontierStore
from seqmtp_serve.request import FinishReason, Ref
from tests.contract.conftest import WINDOW_S
from tests.contract.store_rows import PROMPT, a_commit, a_request, tokens_of

OK, DUP, CONFLICT, FENCED, GONE = CommitResult
TICK_S = 0.01  # what two clocks may differ by meanwhile


async def test_acquire_creates_a_record_at_version_zero(store: FrontierStore) -> None:
    snapshot = await store.acquire(a_request("r"), "coordinator-1", 5.0)
    assert (snapshot.request, snapshot.epoch, snapshot.version) == (a_request("r"), 1, 0)
    assert (snapshot.digest, snapshot.rows, snapshot.finish) == (initial_digest(PROMPT), (), None)
    assert snapshot.owner == "coordinator-1"


@pytest.mark.covers(85)
async def test_a_commit_appends_one_row_and_moves_the_version(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    for version in (1, 2, 3):
        assert await store.commit([a_commit("r", version)]) == [OK]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert snapshot.version == 3
    assert snapshot.rows == tuple(a_commit("r", version).row for version in (1, 2, 3))
    assert snapshot.digest == digest_of(PROMPT, map(tokens_of, (1, 2, 3)))
    assert snapshot.output_ids == (*tokens_of(1), *tokens_of(2), *tokens_of(3))


@pytest.mark.covers(85)
async def test_a_commit_sent_again_is_recognised(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    assert [*await store.commit([a_commit("r", 1)]), *await store.commit([a_commit("r", 1)])] == [OK, DUP]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert [row.version for row in snapshot.rows] == [1]


@pytest.mark.covers(85, 88)
@pytest.mark.parametrize(
    ("commit", "result"),
    [
        (a_commit("r", 3, epoch=2), CONFLICT),  # a version skipped
        (a_commit("r", 1, epoch=2, rows=[(7,)]), CONFLICT),  # this version, another row
        (a_commit("r", 0, epoch=2, rows=[()]), CONFLICT),  # a version that is no row
        (a_commit("r", 2, epoch=1), FENCED),  # the owner before
        (a_commit("r", 1, epoch=1), FENCED),  # the owner before, repeating what it once committed
        (a_commit("unknown", 1, epoch=2), GONE),
    ],
)
async def test_a_refused_commit_changes_nothing(store: FrontierStore, commit: object, result: CommitResult) -> None:
    await store.acquire(a_request("r"), "c1", 5.0)
    await store.commit([a_commit("r", 1)])
    await store.acquire(a_request("r"), "c2", 5.0)
    before = await store.snapshot("r")
    assert await store.commit([commit]) == [result]  # type: ignore[list-item]
    assert await store.snapshot("r") == before
    assert await store.commit([a_commit("r", 2, epoch=2)]) == [OK]


async def test_taking_over_raises_the_epoch_and_keeps_the_rows(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c1", 5.0)
    await store.commit([a_commit("r", 1)])
    taken = await store.acquire(a_request("r"), "c2", 5.0)
    assert (taken.epoch, taken.version, taken.owner) == (2, 1, "c2")
    assert taken.rows == (a_commit("r", 1).row,)


@pytest.mark.covers(85)
async def test_each_row_says_who_committed_it_and_the_digest_after_it(store: FrontierStore) -> None:
    for epoch, version in ((1, 1), (2, 2)):
        await store.acquire(a_request("r"), "c", 5.0)
        assert await store.commit([a_commit("r", version, epoch=epoch)]) == [OK]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    digests = [digest_of(PROMPT, map(tokens_of, range(1, version + 1))) for version in (1, 2)]
    assert [(row.epoch, row.digest) for row in snapshot.rows] == [*zip((1, 2), digests, strict=True)]
    assert snapshot.ref == Ref(request_id="r", epoch=2, version=2, digest=digests[1])


@pytest.mark.covers(85)
async def test_a_record_is_taken_over_only_at_the_epoch_that_was_seen(store: FrontierStore) -> None:
    assert (await store.acquire(a_request("r"), "c1", 5.0, seen_epoch=0)).acquired
    for seen in (0, 2):
        other = await store.acquire(a_request("r"), "c2", 5.0, seen_epoch=seen)
        assert (other.acquired, other.epoch, other.owner) == (False, 1, "c1")
    taken = await store.acquire(a_request("r"), "c2", 5.0, seen_epoch=1)
    assert (taken.acquired, taken.epoch, taken.owner) == (True, 2, "c2")
    third = await store.acquire(a_request("r"), "c3", 5.0, seen_epoch=1)  # saw the same, came second
    assert (third.acquired, third.owner) == (False, "c2")
    nothing = await store.acquire(a_request("unknown"), "c", 5.0, seen_epoch=3)
    assert (nothing.acquired, nothing.epoch, nothing.version) == (False, 0, 0)
    assert await store.snapshot("unknown") is None


@pytest.mark.covers(85)
async def test_a_claim_that_is_made_again_is_recognised(store: FrontierStore) -> None:
    for _ in range(2):
        taken = await store.acquire(a_request("r"), "c1", 5.0, seen_epoch=0, claim="mine")
        assert (taken.acquired, taken.epoch) == (True, 1)
    await store.acquire(a_request("r"), "c2", 5.0, seen_epoch=1, claim="theirs")
    late = await store.acquire(a_request("r"), "c1", 5.0, seen_epoch=0, claim="mine")
    assert (late.acquired, late.epoch, late.owner) == (False, 2, "c2")


async def test_an_epoch_rises_above_one_that_the_record_has_forgotten(store: FrontierStore) -> None:
    assert (await store.acquire(a_request("r"), "c", 5.0, above=7)).epoch == 8
    assert (await store.acquire(a_request("r"), "c", 5.0, above=3)).epoch == 9


async def test_the_first_acquire_says_what_is_kept_beside_the_request(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c1", 5.0, meta={"answer": '{"id":"é"}'})
    taken = await store.acquire(a_request("r"), "c2", 5.0, meta={"answer": "other"})
    read = await store.snapshot("r")
    assert read is not None
    assert read.meta == taken.meta == {"answer": '{"id":"é"}'}


async def test_a_lease_lapses_by_the_stores_clock(store: FrontierStore) -> None:
    taken = await store.acquire(a_request("r"), "c", 0.05)
    assert 0 < taken.lease_left_s <= 0.05
    await asyncio.sleep(0.06)
    lapsed = await store.snapshot("r")
    assert lapsed is not None
    assert lapsed.lease_left_s < 0


async def test_a_finishing_row_ends_the_record(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    last = a_commit("r", 1, finish=FinishReason.STOP)
    assert await store.commit([last]) == [OK]
    assert await store.commit([last]) == [DUP]
    assert await store.commit([a_commit("r", 2)]) == [GONE]
    again = await store.acquire(a_request("r"), "other", 5.0)
    assert (again.epoch, again.owner, again.finish, again.rows) == (1, "c", FinishReason.STOP, (last.row,))


async def test_cancel_ends_the_record_whatever_its_epoch(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    await store.commit([a_commit("r", 1)])
    assert [await store.cancel("r"), await store.cancel("r"), await store.cancel("unknown")] == [OK, DUP, GONE]
    assert await store.commit([a_commit("r", 1)]) == [DUP]  # it was committed, whatever came after
    assert await store.commit([a_commit("r", 2)]) == [GONE]
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert (snapshot.finish, snapshot.version, len(snapshot.rows)) == (FinishReason.CANCELLED, 1, 1)


async def test_an_owner_that_was_replaced_abandons_nothing(store: FrontierStore) -> None:
    for owner in ("first", "second"):
        await store.acquire(a_request("r"), owner, 5.0)
    assert await store.cancel("r", abandoned_at=1) == FENCED
    assert (await store.snapshot("r")).finish is None
    assert [await store.cancel("r", abandoned_at=2), await store.cancel("r", abandoned_at=2)] == [OK, DUP]
    assert await store.cancel("unknown", abandoned_at=1) == GONE


async def test_a_finished_record_is_not_cancelled(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    await store.commit([a_commit("r", 1, finish=FinishReason.LENGTH)])
    assert await store.cancel("r") == GONE
    snapshot = await store.snapshot("r")
    assert snapshot is not None
    assert snapshot.finish == FinishReason.LENGTH


async def test_one_pipeline_answers_each_row_for_itself(store: FrontierStore) -> None:
    for request_id in "abcd":
        await store.acquire(a_request(request_id), "c", 5.0)
    await store.commit([a_commit("b", 1)])
    await store.acquire(a_request("c"), "other", 5.0)
    commits = [a_commit("a", 1), a_commit("b", 1), a_commit("c", 1), a_commit("d", 2), a_commit("e", 1)]
    assert await store.commit(commits) == [OK, DUP, FENCED, CONFLICT, GONE]
    assert await store.commit([]) == []


async def test_a_snapshot_starts_after_a_version(store: FrontierStore) -> None:
    await store.acquire(a_request("r"), "c", 5.0)
    for version in (1, 2, 3):
        await store.commit([a_commit("r", version)])
    for after, versions in ((0, [1, 2, 3]), (2, [3]), (3, []), (9, [])):
        snapshot = await store.snapshot("r", after)
        assert snapshot is not None
        assert (snapshot.version, [row.version for row in snapshot.rows]) == (3, versions)
    assert await store.snapshot("unknown") is None


async def test_a_finished_record_is_readable_for_the_replay_window(forgetful_store: FrontierStore) -> None:
    await forgetful_store.acquire(a_request("r"), "c", 5.0)
    finished_at = monotonic()
    await forgetful_store.commit([a_commit("r", 1, finish=FinishReason.STOP)])
    async with asyncio.timeout(30):
        while await forgetful_store.snapshot("r") is not None:
            await asyncio.sleep(0.01)
    assert monotonic() - finished_at > WINDOW_S - TICK_S
    assert (await forgetful_store.acquire(a_request("r"), "c", 5.0)).epoch == 1
