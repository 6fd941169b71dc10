"""A row that another process sent is taken only if it follows; one that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.errors import AncestryMismatch, Fenced, ProtocolError, StaleVersion
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.frontier import Frontier
from seqmtp_serve.frontier.row_chain import RowChain, check_record
from seqmtp_serve.frontier.sequence import end_row
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams

REQUEST = Request(request_id="r", prompt_ids=(1, 2), params=SamplingParams())
tokens = st.integers(0, 2**32 - 1)
row_lists = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), min_size=3, max_size=8)
ROWS = [(5,), (6, 7), (8,), (9, 10, 11)]


def committed(parts: list[tuple[int, ...]], epochs: tuple[int, ...] = (1,)) -> list[CommittedRow]:
    """Rows as owners commit them, one epoch after the other."""
    frontier, rows = Frontier.start(REQUEST, 1), []
    for place, part in enumerate(parts):
        part = part[:1] if not place else part
        frontier = frontier.advance(part)
        epoch = epochs[min(place, len(epochs) - 1)]
        rows.append(
            CommittedRow(
                request_id="r", version=frontier.version, tokens=part, origins="n", epoch=epoch, digest=frontier.digest
            )
        )
    return rows


@given(row_lists)
def test_rows_follow_whoever_committed_them(parts: list[tuple[int, ...]]) -> None:
    chain, rows = RowChain(REQUEST), committed(parts, (1, 1, 3, 7))
    for row in rows:
        chain.take(row)
        assert chain.ref == replace(chain.ref, epoch=row.epoch, version=row.version, digest=row.digest)
    chain.take(end_row(replace(chain.ref, epoch=9), FinishReason.CANCELLED))


WRONG: dict[str, tuple[Callable[[list[CommittedRow]], CommittedRow], type[ProtocolError]]] = {
    "of another request": (lambda rows: replace(rows[2], request_id="other"), ProtocolError),
    "repeated": (lambda rows: rows[1], StaleVersion),
    "ahead": (lambda rows: rows[3], StaleVersion),
    "of an epoch that has passed": (lambda rows: replace(rows[2], epoch=1), Fenced),
    "of no epoch": (lambda rows: replace(rows[2], epoch=0), Fenced),
    "altered": (lambda rows: replace(rows[2], tokens=(80,)), AncestryMismatch),
    "cut otherwise": (lambda rows: replace(rows[2], tokens=(8, 9)), AncestryMismatch),
    "repeated under the next version": (lambda rows: replace(rows[1], version=3), AncestryMismatch),
    "ahead under the next version": (lambda rows: replace(rows[3], version=3), AncestryMismatch),
    "of another prefix": (
        lambda rows: replace(rows[2], digest=extend_digest(rows[0].digest, rows[2].tokens)),
        AncestryMismatch,
    ),
    "without a digest": (lambda rows: replace(rows[2], digest=b""), AncestryMismatch),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_row_that_does_not_follow_is_named_and_changes_nothing(what: str) -> None:
    chain, rows = RowChain(REQUEST), committed(ROWS, (2,))
    for row in rows[:2]:
        chain.take(row)
    wrong, error = WRONG[what]
    with pytest.raises(ProtocolError) as refused:
        chain.take(wrong(rows))
    assert type(refused.value) is error
    chain.take(rows[2])
    chain.take(rows[3])


@given(row_lists, st.data())
def test_whatever_token_is_altered_is_found(parts: list[tuple[int, ...]], data: st.DataObject) -> None:
    chain, rows = RowChain(REQUEST), committed(parts)
    place = data.draw(st.integers(0, len(rows) - 1))
    row = rows[place]
    altered = list(row.tokens)
    altered[data.draw(st.integers(0, len(altered) - 1))] ^= data.draw(st.integers(1, 2**32 - 1))
    for before in rows[:place]:
        chain.take(before)
    with pytest.raises(AncestryMismatch):
        chain.take(replace(row, tokens=tuple(altered)))


def test_another_prompt_has_no_row_of_this_text() -> None:
    chain = RowChain(replace(REQUEST, prompt_ids=(2, 1)))
    with pytest.raises(AncestryMismatch):
        chain.take(committed(ROWS)[0])


def test_a_record_is_all_of_its_rows() -> None:
    rows = committed(ROWS)
    record = Snapshot(request=REQUEST, epoch=1, version=4, digest=rows[-1].digest, rows=tuple(rows))
    check_record(record)
    check_record(Snapshot(request=REQUEST, epoch=1, version=0, digest=RowChain(REQUEST).ref.digest))
    for wrong in (
        replace(record, rows=tuple(rows[:-1])),
        replace(record, digest=rows[0].digest),
        replace(record, rows=(*rows[:1], *rows[2:])),
        replace(record, request=replace(REQUEST, prompt_ids=(1,))),
    ):
        with pytest.raises(ProtocolError):
            check_record(wrong)
