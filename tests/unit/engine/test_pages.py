"""Pages have one holder each, whatever is opened, grown and closed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmtp_serve.engine.caches import untouched_zeros
from seqmtp_serve.engine.pages import Owner, PagePool
from seqmtp_serve.errors import InternalError, Overloaded


@pytest.mark.covers(90)
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=40))
def test_any_history_keeps_the_pool_whole(history: list[tuple[int, int]]) -> None:
    pool, leases = PagePool(Owner.TARGET, 12, 4), {}
    for name, num_slots in history:
        if num_slots == 0 and name in leases:
            pool.close(leases.pop(name))
            continue
        lease = leases.setdefault(name, pool.open()) if name not in leases else leases[name]
        before = list(pool.pages(lease))
        try:
            pool.grow(lease, num_slots)
        except Overloaded:
            assert pool.pages(lease) == before, "a refused growth must change nothing"
        else:
            assert len(pool.pages(lease)) * 4 >= num_slots
            assert pool.pages(lease)[: len(before)] == before, "slots must stay where they are"
        pool.check()
    for lease in leases.values():
        pool.close(lease)
    assert pool.num_free == 12


@pytest.mark.covers(83, 84, 91)
def test_a_lease_is_good_for_its_pool_and_life_only() -> None:
    target, mtp = PagePool(Owner.TARGET, 4, 4), PagePool(Owner.MTP, 4, 4)
    lease = target.open()
    target.grow(lease, 4)
    with pytest.raises(InternalError):
        mtp.pages(lease)
    target.close(lease)
    with pytest.raises(InternalError):
        target.pages(lease)
    again = target.open()
    assert again != lease


def test_sequences_that_grow_side_by_side_stay_consecutive() -> None:
    pool = PagePool(Owner.TARGET, 64, 4)
    leases = [pool.open() for _ in range(4)]
    for num_slots in range(4, 33, 4):
        for lease in leases:
            pool.grow(lease, num_slots)
    for lease in leases:
        pages = pool.pages(lease)
        assert pages == list(range(pages[0], pages[0] + 8))


def test_slots_follow_the_page_table() -> None:
    pool = PagePool(Owner.TARGET, 8, 4)
    first, second = pool.open(), pool.open()
    pool.grow(first, 32)
    pool.close(first)
    pool.grow(second, 12)
    pages = pool.pages(second)
    assert pool.slots(second, 3, 9).tolist() == [pages[slot // 4] * 4 + slot % 4 for slot in range(3, 9)]


def test_untouched_zeros_are_zeros_one_can_write():
    rows = untouched_zeros(2, 3, 4)
    assert rows.shape == (2, 3, 4)
    assert not rows.any()
    rows[1, 2] = 5.0
    assert rows.sum() == 20.0
    assert untouched_zeros(0, 7).shape == (0, 7)
