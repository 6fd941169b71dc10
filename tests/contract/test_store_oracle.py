"""Any sequence of calls, from any owner, in any order: the scripts answer as the plain store in memory does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.ports import FrontierStore
from seqmtp_serve.request import FinishReason
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.contract.store_rows import a_commit, a_request
from tests.patience import PATIENT

IDS = st.sampled_from(["a", "b"])
ROW = st.builds(
    a_commit,
    IDS,
    st.integers(1, 4),
    epoch=st.integers(1, 3),
    rows=st.sampled_from([None, None, None, [(7, 7)]]),
    finish=st.sampled_from([None, None, None, FinishReason.STOP]),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), IDS),
        st.tuples(st.just("take"), st.tuples(IDS, st.sampled_from([None, 0, 1, 2]), st.sampled_from([0, 3]))),
        st.tuples(st.just("commit"), st.lists(ROW, max_size=3, unique_by=lambda commit: commit.row.request_id)),
        st.tuples(st.just("commit"), st.lists(ROW, max_size=1)),
        st.tuples(st.just("cancel"), IDS),
        st.tuples(st.just("snapshot"), IDS),
    ),
    max_size=24,
)


async def answers(store: FrontierStore, operations: list[tuple[str, Any]]) -> list[object]:
    found: list[object] = []
    for kind, argument in operations:
        match kind:
            case "acquire":
                found.append(await store.acquire(a_request(argument), "c", 60.0))
            case "take":
                request_id, seen, above = argument
                taken = await store.acquire(a_request(request_id), "d", 60.0, seen_epoch=seen, above=above)
                found.append(taken)
            case "commit":
                found.append(list(await store.commit(argument)))
            case "cancel":
                found.append(await store.cancel(argument))
            case "snapshot":
                found.append(await store.snapshot(argument, 1))
    return found


@pytest.mark.covers(85, 88)
@given(operations=OPERATIONS)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_scripts_answer_as_the_memory_store(server: EmbeddedValkey, operations: list[tuple[str, Any]]) -> None:
    async def both() -> tuple[list[object], list[object]]:
        store = RedisFrontierStore(server.url, PATIENT)
        await store.redis.flushall()
        try:
            return await answers(store, operations), await answers(MemoryFrontierStore(), operations)
        finally:
            await store.close()

    scripts, oracle = asyncio.run(both())
    assert scripts == oracle
