"""How the proposer batches frames into passes."""

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.ports import FeedRows
from seqmtp_serve.request import Ref
from services.proposer.passes import Close, Feed, original, renamed, take_pass


def feed(name: str, version: int = 1, rows: int = 1) -> Feed:
    ref = Ref(request_id=name, epoch=1, version=version, digest=b"d" * 16)
    return Feed(rows=FeedRows(ref=ref, first_base=0, hidden=torch.zeros(rows, 2), next_ids=(7,) * rows, depth=1))


def names(feeds):
    return [rows.ref.request_id for rows in feeds]


def test_different_sequences_share_a_pass_and_one_sequence_does_not():
    waiting = deque([feed("a"), feed("b"), feed("a", version=2)])
    feeds, _ = take_pass(waiting)
    assert names(feeds) == ["a", "b"]
    assert names(take_pass(waiting)[0]) == ["a"]


def test_a_close_before_a_feed_joins_its_pass_and_one_after_it_waits():
    waiting = deque([Close(sequence="a"), feed("a"), feed("b"), Close(sequence="b")])
    feeds, closed = take_pass(waiting)
    assert (names(feeds), closed) == (["a", "b"], ["a"])
    assert take_pass(waiting) == ([], ["b"])


def test_a_long_prompt_does_not_share_a_pass_that_is_full():
    waiting = deque([feed("a", rows=300), feed("b", rows=300), feed("c", rows=1)])
    assert names(take_pass(waiting, max_rows=512)[0]) == ["a", "c"]
    assert names(take_pass(waiting, max_rows=512)[0]) == ["b"]


def test_a_feed_larger_than_a_pass_still_runs():
    assert names(take_pass(deque([feed("a", rows=600)]), max_rows=512)[0]) == ["a"]


def test_namespaces_come_off_again():
    rows = renamed(feed("chat-1").rows, "stream7")
    assert original(rows.ref) == ("stream7", feed("chat-1").rows.ref)


items = st.one_of(
    st.builds(feed, st.sampled_from("abc"), st.just(1), st.integers(1, 5)),
    st.builds(Close, sequence=st.sampled_from("abc")),
)


@given(st.lists(items, max_size=12))
def test_each_sequence_sees_its_items_once_and_in_order(given_items):
    waiting, seen = deque(given_items), {name: [] for name in "abc"}
    while waiting:
        feeds, closed = take_pass(waiting, max_rows=6)
        assert feeds or closed, "a pass must make progress"
        for name in closed:
            seen[name].append("close")
        for rows in feeds:
            seen[rows.ref.request_id].append(rows)
    for name in "abc":
        expected = ["close" if isinstance(i, Close) else i.rows for i in given_items if i.sequence == name]
        assert len(seen[name]) == len(expected)
        assert all(a is b for a, b in zip(seen[name], expected, strict=True))
