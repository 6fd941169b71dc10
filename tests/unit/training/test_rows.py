"""Rows of the MTP depths on packed streams: tables by hand, every error, and properties over random streams."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.training.rows import MtpRow, compile_main_rows, compile_mtp_rows, num_labels, state_bases

TWO_SEGMENTS = [0, 0, 0, 0, 1, 1, 1, 1]
ALL_VALID = [True] * 8


def depths(segments: Sequence[int], valid: Sequence[bool], depth: int) -> list[list[MtpRow]]:
    """Rows of depths 1..depth, each fed with the bases of the one before."""
    bases, found = list(range(len(segments))), []
    for k in range(1, depth + 1):
        rows = compile_mtp_rows(list(range(len(segments))), segments, valid, k, bases)
        bases = state_bases(rows)
        found.append(rows)
    return found


def supervised(rows: Sequence[MtpRow]) -> list[int]:
    return [row.base for row in rows if row.loss_valid]


@pytest.mark.covers(28, 29, 30, 34, 111, 117, 142)
def test_two_segments() -> None:
    one, two, three, four = depths(TWO_SEGMENTS, ALL_VALID, 4)
    assert state_bases(one) == [0, 1, 2, 4, 5, 6]
    assert [row.previous_depth_row for row in one] == [0, 1, 2, 4, 5, 6]
    assert [row.shifted_token_index for row in one] == [1, 2, 3, 5, 6, 7]
    assert [row.label_index for row in one] == [2, 3, None, 6, 7, None]
    assert supervised(one) == [0, 1, 4, 5]
    assert state_bases(two) == [0, 1, 4, 5]
    assert [row.previous_depth_row for row in two] == [0, 1, 3, 4]  # physical rows: base 4 is row 3 of depth one
    assert [row.shifted_token_index for row in two] == [2, 3, 6, 7]
    assert [row.label_index for row in two] == [3, None, 7, None]
    assert supervised(two) == [0, 4]
    assert state_bases(three) == [0, 4]
    assert [row.previous_depth_row for row in three] == [0, 2]
    assert [row.shifted_token_index for row in three] == [3, 7]
    assert supervised(three) == []
    assert four == []
    for row in [*one, *two, *three]:
        assert row.position == row.base
        assert row.segment == TWO_SEGMENTS[row.base]
        assert row.loss_valid == (row.label_index is not None)


@pytest.mark.covers(28, 29, 117)
def test_a_layout_of_losses_only_loses_its_rows() -> None:
    """The old layout kept labelled rows only: base 4 then has physical row 2 and its address points past the end."""
    loss_only = supervised(depths(TWO_SEGMENTS, ALL_VALID, 1)[0])
    assert loss_only == [0, 1, 4, 5]
    assert 4 not in range(len(loss_only))  # what reading row `base` would do
    rows = compile_mtp_rows(list(range(8)), TWO_SEGMENTS, ALL_VALID, 2, loss_only)
    assert [row.previous_depth_row for row in rows] == [0, 1, 2, 3]


@pytest.mark.covers(24, 26, 27, 28, 53, 160, 166)
def test_six_tokens() -> None:
    letters = "ABCDEF"
    found = depths([0] * 6, [True] * 6, 6)

    def triples(rows: Sequence[MtpRow]) -> list[str]:
        return [
            letters[row.base] + letters[row.shifted_token_index] + letters[row.label_index]
            for row in rows
            if row.label_index is not None
        ]

    assert [state_bases(rows) for rows in found] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 1],
        [0],
        [],
    ]
    assert [row.previous_depth_row for row in found[1]] == [0, 1, 2, 3]
    assert triples(found[0]) == ["ABC", "BCD", "CDE", "DEF"]
    assert triples(found[1]) == ["ACD", "BDE", "CEF"]
    assert [supervised(rows) for rows in found[2:]] == [[0, 1], [0], [], []]
    # The paper sums its one-based i from 2+k to T+1, its t_{T+1} being an end token this stream does not have:
    # label_index + 1 covers 2+k..T.
    for k, rows in enumerate(found, start=1):
        one_based = [row.label_index + 1 for row in rows if row.label_index is not None]
        assert one_based == list(range(2 + k, 6 + 1))


@pytest.mark.covers(26, 166)
def test_the_papers_end_token_is_one_more_token() -> None:
    """With t_{T+1} appended to the stream, every state of T tokens but the newest has the paper's label."""
    found = depths([0] * 7, [True] * 7, 2)
    for k, rows in enumerate(found, start=1):
        assert [row.label_index + 1 for row in rows if row.label_index is not None] == list(range(2 + k, 6 + 2))


@pytest.mark.covers(28, 160)
def test_a_depth_consumes_the_tokens_up_to_its_shift_and_no_other() -> None:
    for k, rows in enumerate(depths(TWO_SEGMENTS, ALL_VALID, 3), start=1):
        for row in rows:
            assert row.shifted_token_index == row.base + k
            assert row.label_index in (None, row.base + k + 1)


@pytest.mark.covers(28, 116)
def test_a_hole_of_padding() -> None:
    valid = [True, True, True, False, True, True, True, True]
    one, two, three = depths([0] * 8, valid, 3)
    assert (state_bases(one), supervised(one)) == ([0, 1, 4, 5, 6], [0, 4, 5])
    assert (state_bases(two), supervised(two)) == ([0, 4, 5], [4])
    assert [row.previous_depth_row for row in two] == [0, 2, 3]
    assert (state_bases(three), supervised(three)) == ([4], [])
    assert three[0].previous_depth_row == 1


@pytest.mark.covers(28, 116)
def test_a_segment_id_used_again_after_another_segment() -> None:
    one, two = depths([0, 0, 1, 1, 0, 0], [True] * 6, 2)
    assert (state_bases(one), supervised(one), two) == ([0, 2, 4], [], [])


@pytest.mark.covers(28)
def test_padding_at_the_end() -> None:
    one, two, three = depths(TWO_SEGMENTS, [True] * 7 + [False], 3)
    assert (state_bases(one), supervised(one)) == ([0, 1, 2, 4, 5], [0, 1, 4])
    assert (state_bases(two), supervised(two)) == ([0, 1, 4], [0])
    assert [row.previous_depth_row for row in two] == [0, 1, 3]
    assert (state_bases(three), three[0].previous_depth_row) == ([0], 0)


@pytest.mark.covers(28, 29)
def test_the_order_of_the_predecessors_is_theirs() -> None:
    rows = compile_mtp_rows([7, 8, 9, 6], [0] * 4, [True] * 4, 1, [3, 2, 1, 0])
    assert state_bases(rows) == [0, 1, 2]
    assert [row.previous_depth_row for row in rows] == [3, 2, 1]


@pytest.mark.covers(28, 32)
@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ([0, 1], "required predecessor state is missing"),
        ([0, 1, 1, 2], "duplicate previous base"),
        ([0, 1, 4, 2], "invalid previous base"),
        ([0, 1, True, 3], "invalid previous base"),
        ([0, 1.0, 2, 3], "invalid previous base"),
        ([0, -1, 2, 3], "invalid previous base"),
    ],
)
def test_predecessors_that_cannot_be(bases: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_mtp_rows([1, 2, 3, 4], [0] * 4, [True] * 4, 1, bases)


@pytest.mark.covers(28)
@pytest.mark.parametrize("depth", [0, -1, 1.0, True])
def test_depths_that_cannot_be(depth: int) -> None:
    with pytest.raises(ValueError, match="depth must be positive"):
        compile_mtp_rows([1, 2], [0, 0], [True, True], depth, [0, 1])


@pytest.mark.covers(28)
@pytest.mark.parametrize(("segments", "valid"), [([0], [True] * 2), ([0, 0], [True]), ([0] * 3, [True] * 2)])
def test_streams_that_are_not_aligned(segments: list[int], valid: list[bool]) -> None:
    with pytest.raises(ValueError, match="unaligned packed inputs"):
        compile_mtp_rows([1, 2], segments, valid, 1, [0, 1])
    with pytest.raises(ValueError, match="unaligned packed inputs"):
        compile_main_rows([1, 2], segments, valid)


@pytest.mark.covers(28)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_streams_too_short_for_a_row(num_tokens: int) -> None:
    assert depths([0] * num_tokens, [True] * num_tokens, 3) == [[], [], []]


@pytest.mark.covers(28, 43)
def test_two_tokens_have_a_state_and_no_label() -> None:
    one, two, three = depths([0, 0], [True, True], 3)
    assert (state_bases(one), supervised(one), two, three) == ([0], [], [], [])


@pytest.mark.covers(43)
@pytest.mark.parametrize(
    ("sequence_len", "num_depths", "counts"),
    [(2, 3, [0, 0, 0]), (6, 2, [4, 3]), (6, 5, [4, 3, 2, 1, 0]), (6, 6, [4, 3, 2, 1, 0, 0]), (8, 3, [6, 5, 4])],
)
def test_label_counts(sequence_len: int, num_depths: int, counts: list[int]) -> None:
    assert num_labels(sequence_len, num_depths) == counts
    found = depths([0] * sequence_len, [True] * sequence_len, num_depths)
    assert [len(supervised(rows)) for rows in found] == counts


@pytest.mark.covers(43)
def test_the_polynomial_counts_labels_only_where_it_is_valid() -> None:
    def polynomial(sequence_len: int, num_depths: int) -> int:
        return num_depths * (sequence_len - 1) - num_depths * (num_depths + 1) // 2

    assert sum(num_labels(4096, 1)) == polynomial(4096, 1) == 4094
    assert sum(num_labels(4, 1)) == polynomial(4, 1) == 2
    assert sum(num_labels(6, 5)) == polynomial(6, 5) == 10
    assert (sum(num_labels(6, 6)), polynomial(6, 6)) == (10, 9)  # past D = T - 1 it subtracts labels that never were
    assert (sum(num_labels(2, 3)), polynomial(2, 3)) == (0, -3)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    segments: list[int] = []
    for segment, length in enumerate(draw(st.lists(st.integers(1, 6), max_size=4))):
        segments += [segment] * length
    valid = draw(st.lists(st.booleans(), min_size=len(segments), max_size=len(segments)))
    return segments, valid


@pytest.mark.covers(28, 29, 30)
@given(streams(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_properties(stream: tuple[list[int], list[bool]], depth: int, rng: random.Random) -> None:
    segments, valid = stream
    previous = set(range(len(segments)))
    for rows in depths(segments, valid, depth):
        assert set(supervised(rows)) <= set(state_bases(rows)) <= previous
        for row in rows:
            touched = [row.base, row.shifted_token_index] + ([row.label_index] if row.label_index else [])
            assert {segments[i] for i in touched} == {row.segment}
        previous = set(state_bases(rows))

    bases = list(range(len(segments)))
    shuffled = rng.sample(bases, len(bases))
    tokens = list(range(len(segments)))
    plain = compile_mtp_rows(tokens, segments, valid, depth, bases)
    moved = compile_mtp_rows(tokens, segments, valid, depth, shuffled)
    assert [bases[row.previous_depth_row] for row in plain] == [shuffled[row.previous_depth_row] for row in moved]

    def without_row(rows: list[MtpRow]) -> list[tuple[int, int, int | None, int]]:
        return [(row.base, row.shifted_token_index, row.label_index, row.segment) for row in rows]

    assert without_row(plain) == without_row(moved)


@pytest.mark.covers(28, 43)
@given(st.integers(0, 12), st.integers(1, 14))
def test_counts_of_one_sequence(sequence_len: int, depth: int) -> None:
    rows = depths([0] * sequence_len, [True] * sequence_len, depth)[-1]
    assert len(rows) == max(sequence_len - depth, 0)
    assert len(supervised(rows)) == max(sequence_len - depth - 1, 0)


@pytest.mark.covers(45)
def test_main_rows_read_every_real_token() -> None:
    rows = compile_main_rows(list(range(8)), TWO_SEGMENTS, [True] * 7 + [False])
    assert state_bases(rows) == [0, 1, 2, 3, 4, 5, 6]
    assert [row.label_index for row in rows] == [1, 2, 3, None, 5, 6, None]
