"""A text that starts like another takes its rows; nothing shows of it but the work that was saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driver import Driver, Stream
from engines import TARGET, proposer, request, seeded, target
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmtp_serve import oracle
from seqmtp_serve.engine.pages import Lease, Owner, PagePool
from seqmtp_serve.engine.prefix import page_keys
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.errors import Overloaded
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.request import Request

PAGE = 8  # of the fixture's engines


def following(first: Stream, more: int, *, name: str = "next") -> Request:
    """The next turn of a chat: prompt and answer of the first, and `more` tokens that nobody has seen."""
    seen = (*first.request.prompt_ids, *first.output)
    new = [(17 * index + 5) % TINY.vocab_size for index in range(more)]
    return replace(first.request, request_id=name, prompt_ids=(*seen, *new))


def cached(stream: Stream) -> int:
    return sum(row.cached for row in stream.rows)


@pytest.mark.parametrize("make", [request, seeded])
@pytest.mark.parametrize("chunk", [5, 8, 1000])
def test_a_hit_changes_neither_text_nor_drafts(make: object, chunk: int) -> None:
    assert callable(make)
    link = proposer()
    engine = target(link)
    driver = Driver(engine, chunk=chunk)
    first = driver.run(make(1, prompt_len=40))[0]
    turn = following(first, 7)
    hit = driver.run(turn)[0]
    assert engine.cache.pool.num_shared > 0
    cold = Driver(target(proposer(), prefix_cache_pages=0), chunk=chunk).run(turn)[0]
    assert hit.output == cold.output == oracle.generate(TARGET, TINY, turn)
    assert [(row.drafted, row.accepted) for row in hit.rows] == [(row.drafted, row.accepted) for row in cold.rows]
    assert not link.refusals


def test_only_what_is_new_is_computed() -> None:
    engine = target(None)
    driver = Driver(engine, depth=0)
    first = driver.run(request(1, prompt_len=40))[0]
    known = len(first.request.prompt_ids) + len(first.output) - 1  # the last token was never an input
    turn = Stream.open(following(first, 7))
    report = driver.step([turn])
    expected = known // PAGE * PAGE
    assert cached(turn) == expected
    assert report.costs.num_rows == len(turn.request.prompt_ids) - expected
    cold = Stream.open(replace(turn.request, request_id="cold"))
    assert Driver(target(None), depth=0).step([cold]).costs.num_rows == len(turn.request.prompt_ids)


def test_cached_rows_are_the_rows_bit_for_bit() -> None:
    engine = target(None)
    driver = Driver(engine, depth=0)
    first = driver.run(request(1, prompt_len=40))[0]
    turn = following(first, 7)
    rows = []
    for one in (engine, target(None, prefix_cache_pages=0)):
        stream = Stream.open(turn)
        Driver(one, depth=0).step([stream])
        lease = one._sequences[turn.request_id].lease
        slots = one.cache.pool.slots(lease, 0, len(turn.prompt_ids))
        rows.append((one.cache.kv_LSE[:, slots].clone(), one.cache.hidden(lease, 0, len(turn.prompt_ids))))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])


def test_a_b_a_is_exact_side_by_side_and_one_after_the_other() -> None:
    driver = Driver(target(proposer()))
    base = request(1, prompt_len=40)
    other = replace(base, request_id="b", prompt_ids=(*base.prompt_ids[:20], 3, *base.prompt_ids[21:]))
    again = replace(base, request_id="again")
    streams = [*driver.run(base), *driver.run(other), *driver.run(again, replace(other, request_id="b2"))]
    assert [one.output for one in streams] == [oracle.generate(TARGET, TINY, one.request) for one in streams]
    hits = [cached(one) for one in streams]
    assert hits[0] == 0
    assert hits[1] == 16  # the two differ in the third page
    assert hits[2] == hits[3] == (len(base.prompt_ids) - 1) // PAGE * PAGE


def test_a_sequence_shares_while_the_first_still_runs() -> None:
    driver = Driver(target(proposer()))
    first = Stream.open(request(1, prompt_len=40, max_tokens=30))
    driver.step([first])
    second = Stream.open(replace(first.request, request_id="second"))
    driver.resume([first, second])
    assert cached(second) > 0
    assert first.output == second.output == oracle.generate(TARGET, TINY, first.request)


def test_provisional_rows_are_never_published() -> None:
    """After a verification, rows that await their commit fill a page: it becomes known only with the commit."""
    engine = target(proposer())
    driver = Driver(engine)
    stream = Stream.open(request(1, prompt_len=16, max_tokens=40))
    while not stream.done:
        driver.step([stream])
        sequence = engine._sequences[stream.ref.request_id]
        assert len(sequence.page_keys) == sequence.length // PAGE
        committed = [*stream.request.prompt_ids, *stream.output][: sequence.length]
        assert sequence.page_keys == page_keys(committed, PAGE)
    assert any(row.accepted for row in stream.rows)


def test_a_preempted_sequence_finds_its_own_rows() -> None:
    driver = Driver(target(proposer()))
    stream = Stream.open(request(1, prompt_len=40, max_tokens=30))
    for _ in range(3):
        driver.step([stream])
    driver.preempt(stream)
    report = driver.step([stream])
    assert sum(row.cached for row in report.rows) >= 32
    driver.resume([stream])
    assert stream.output == oracle.generate(TARGET, TINY, stream.request)


def test_rows_that_are_no_numbers_reach_nobody() -> None:
    """The page that spoils a sequence is withdrawn, and zeroed once its last holder has left."""
    engine = target(None)
    driver = Driver(engine, depth=0)
    first, second = (Stream.open(replace(request(1, prompt_len=40), request_id=name)) for name in "ab")
    driver.step([first])
    driver.step([first, second])
    page = engine.cache.pool.pages(engine._sequences["a"].lease)[1]
    assert page in engine.cache.pool.pages(engine._sequences["b"].lease)
    engine.cache.kv_LSE[:, page * PAGE] = float("nan")
    driver.step([first, second])
    assert {row.ref.request_id for row in driver.refused} == {"a", "b"}
    engine.check()
    assert bool(engine.cache.kv_LSE.isfinite().all())
    assert engine.cache.pool.num_shared == 0
    clean = replace(first.request, request_id="c")
    driver.refused.clear()
    assert driver.run(clean)[0].output == oracle.generate(TARGET, TINY, clean)


def test_a_holder_that_leaves_in_peace_leaves_no_spoilt_page() -> None:
    engine = target(None)
    driver = Driver(engine, depth=0)
    first, second = (Stream.open(replace(request(1, prompt_len=40), request_id=name)) for name in "ab")
    driver.step([first])
    driver.step([first, second])
    page = engine.cache.pool.pages(engine._sequences["a"].lease)[1]
    engine.cache.kv_LSE[:, page * PAGE] = float("nan")
    driver.step([first])  # only this one meets it
    assert [row.ref.request_id for row in driver.refused] == ["a"]
    driver.preempt(second)
    assert bool(engine.cache.kv_LSE.isfinite().all())


def test_pages_of_ended_texts_make_room() -> None:
    """Kept pages never turn anybody away, however full the pool is with them."""
    engine: TargetEngine = target(None, num_pages=14, prefix_cache_pages=14, max_batch=1)
    driver = Driver(engine, depth=0)
    for index in range(6):
        each = request(index, prompt_len=40, max_tokens=12)
        assert driver.run(each)[0].output == oracle.generate(TARGET, TINY, each)
    assert engine.cache.pool.num_free == 14
    assert 0 < engine.cache.pool.num_shared <= 14


def test_no_more_pages_are_kept_than_allowed() -> None:
    engine = target(None, prefix_cache_pages=3)
    Driver(engine, depth=0).run(*(request(index, prompt_len=40) for index in range(4)))
    assert engine.cache.pool.num_shared == 3


def test_a_key_stands_for_the_whole_text_before_it() -> None:
    tokens = list(range(20))
    keys = page_keys(tokens, 4)
    assert len(keys) == 5
    assert page_keys(tokens, 4, keys[:2]) == keys[2:]
    assert page_keys(tokens[:19], 4) == keys[:4]
    for changed in range(20):
        other = page_keys([*tokens[:changed], 99, *tokens[changed + 1 :]], 4)
        assert other[: changed // 4] == keys[: changed // 4]
        assert all(one != two for one, two in zip(other[changed // 4 :], keys[changed // 4 :], strict=True))


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 30)), max_size=60))
def test_any_history_of_sharing_keeps_the_pool_whole(history: list[tuple[int, int, int]]) -> None:
    """Four sequences of texts that start alike; each action opens and shares, grows, publishes, withdraws or closes."""
    pool, leases, keys = PagePool(Owner.TARGET, 12, 4, num_kept=5), {}, page_keys([7] * 48, 4)
    for who, action, number in history:
        if who not in leases:
            leases[who] = pool.open()
            pool.share(leases[who], keys[: number % 7])
            pool.check()
        _act(pool, leases, keys, who, action, number)
        pool.check()
    for lease in leases.values():
        pool.close(lease)
        pool.check()
    assert pool.num_free == 12


def _act(pool: PagePool, leases: dict[int, Lease], keys: list[bytes], who: int, action: int, number: int) -> None:
    lease = leases[who]
    if action == 0:
        pool.close(leases.pop(who))
    elif action == 1:
        pool.withdraw(lease)
    elif action == 2 and pool.pages(lease):
        last = len(pool.pages(lease)) - 1
        pool.publish(lease, last, keys[last])
    else:
        before = list(pool.pages(lease))
        try:
            pool.grow(lease, number)
        except Overloaded:
            assert pool.pages(lease) == before
