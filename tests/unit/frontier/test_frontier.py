"""The frontier record, its digest, the transition table, and recovery from a snapshot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmtp_serve.errors import AncestryMismatch, IllegalTransition, StoreBehind
from seqmtp_serve.frontier.ancestry import digest_of, extend_digest, initial_digest
from seqmtp_serve.frontier.frontier import Frontier
from seqmtp_serve.frontier.recovery import admission, frontier_from
from seqmtp_serve.frontier.round import TRANSITIONS, Event, State, next_state
from seqmtp_serve.ports import Snapshot
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams

tokens = st.integers(0, 2**32 - 1)
prompts = st.lists(tokens, min_size=1, max_size=5).map(tuple)
row_lists = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=5)


def make_request(prompt: tuple[int, ...]) -> Request:
    return Request(request_id="r", prompt_ids=prompt, params=SamplingParams())


def as_rows(parts: list[tuple[int, ...]]) -> tuple[CommittedRow, ...]:
    parts = [part[:1] if index == 0 else part for index, part in enumerate(parts)]
    return tuple(CommittedRow(request_id="r", version=v, tokens=part) for v, part in enumerate(parts, 1))


@pytest.mark.covers(85)
@given(prompts, row_lists)
def test_digest_grows_row_by_row(prompt: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    digest = initial_digest(prompt)
    for part in parts:
        digest = extend_digest(digest, part)
    assert digest == digest_of(prompt, parts)


@pytest.mark.covers(86)
def test_equal_length_is_not_equal_ancestry() -> None:
    digests = [digest_of((1, 2), [(3,), (4, 5)]), digest_of((1, 2), [(3,), (4, 6)])]
    digests += [digest_of((1, 2), [(3, 4), (5,)]), digest_of((1, 2, 3), [(4, 5)]), digest_of((2, 1), [(3,), (4, 5)])]
    assert len(set(digests)) == len(digests)


@pytest.mark.covers(73, 77, 79)
@given(prompts, row_lists)
def test_output_is_p_and_f_at_every_version(prompt: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    frontier = Frontier.start(make_request(prompt), epoch=1)
    for row in as_rows(parts):
        before, frontier = frontier, frontier.advance(row.tokens)
        frontier.check()
        *prefilled, last = (*prompt, *frontier.output_ids)
        assert last == frontier.token
        assert len(prefilled) == frontier.kv_len == before.total_len + len(row.tokens) - 1
        assert frontier.version == before.version + 1


@pytest.mark.covers(78)
def test_no_row_follows_the_end() -> None:
    start = Frontier.start(make_request((1,)), epoch=1)
    ended = start.advance((5,), finished=True)
    for frontier, row, finished in (
        (ended, (6,), False),
        (ended, (), True),
        (start, (), False),
        (start, (1, 2), False),
    ):
        with pytest.raises(IllegalTransition):
            frontier.advance(row, finished=finished)
    assert start.advance((), finished=True).output_ids == ()


@pytest.mark.covers(88)
@given(prompts, row_lists)
def test_a_snapshot_rebuilds_the_frontier(prompt: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    rows = as_rows(parts)
    digest = digest_of(prompt, [row.tokens for row in rows])
    snapshot = Snapshot(request=make_request(prompt), epoch=3, version=len(rows), digest=digest, rows=rows)
    frontier = frontier_from(snapshot)
    assert frontier.ref.digest == digest
    assert frontier.output_ids == snapshot.output_ids
    assert admission(snapshot.request, frontier).output_ids == snapshot.output_ids
    with pytest.raises(AncestryMismatch):
        frontier_from(replace(snapshot, digest=bytes(16)))
    if rows:
        with pytest.raises(StoreBehind):
            frontier_from(replace(snapshot, rows=rows[:-1]))


def test_a_finished_snapshot_gives_a_finished_frontier() -> None:
    row = CommittedRow(request_id="r", version=1, tokens=(4,), finish=FinishReason.STOP)
    snapshot = Snapshot(request=make_request((1,)), epoch=1, version=1, digest=digest_of((1,), [(4,)]), rows=(row,))
    assert frontier_from(snapshot).finished


@pytest.mark.covers(78, 79)
def test_every_path_through_the_table_ends_or_goes_on_legally() -> None:
    for state in State:
        for event in Event:
            if (state, event) in TRANSITIONS:
                assert next_state(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    next_state(state, event)
    assert not any(state is State.FINISHED for state, _ in TRANSITIONS)
    path = [Event.ADMIT, Event.CHUNK, Event.BOOTSTRAP, Event.COMMIT, Event.VERIFY, Event.SELECT, Event.FINISH]
    state = State.QUEUED
    for event, following in pairwise([*path, Event.DROP]):
        state = next_state(state, event)
        assert state is not State.FINISHED or following is Event.DROP
    assert state is State.FINISHED


def test_decisions_import_no_torch() -> None:
    folder = Path(frontier_from.__code__.co_filename).parent
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(modules) > 10
    code = "; ".join(f"import seqmtp_serve.frontier.{name}" for name in modules)
    code += "; import seqmtp_serve.rounds, seqmtp_serve.config, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
