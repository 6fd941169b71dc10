"""Whom a reader prefers among the workers it finds."""

from hypothesis import given
from hypothesis import strategies as st

from services.rpc.discovery import favourites

workers = st.dictionaries(st.text(min_size=1, max_size=6), st.text(min_size=1, max_size=6), min_size=1, max_size=6)


@given(st.text(), workers)
def test_every_worker_is_in_the_order_once(reader, found):
    assert sorted(favourites(reader, found)) == sorted(found.values())


@given(st.text(), workers)
def test_a_reader_moves_only_when_its_own_favourite_is_gone(reader, found):
    distinct = {worker: worker for worker in found}
    order = favourites(reader, distinct)
    for gone in order:
        left = {worker: worker for worker in distinct if worker != gone}
        assert favourites(reader, left) == [worker for worker in order if worker != gone]


def test_readers_spread_over_the_workers():
    three = {"a": "a", "b": "b", "c": "c"}
    assert {favourites(f"reader-{i}", three)[0] for i in range(50)} == {"a", "b", "c"}
