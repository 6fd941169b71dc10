"""Drafts and hidden rows that were swapped, replayed, reordered or forged: refused and counted, and no token is harmed.

Each run draws its mischief from a seed. The text is compared with plain decoding; what may be verified at all (a draft
that names the right state and was drawn with other weights) is verified like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from driver import Driver
from engines import MTP, config, proposer, request, seeded, target

from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref, Request

SEEDS = range(6)
MISCHIEF = 0.4  # of all answers


class Hostile(DirectProposer):
    """Answers some states with something else. `num_spoiled` counts what the target must refuse."""

    def __init__(self, engine: ProposerEngine, rng: Random) -> None:
        super().__init__(engine)
        self.rng, self.num_spoiled, self.past = rng, 0, list[Draft]()

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        honest = super().collect(refs, timeout_s)
        answers = {
            name: self._spoiled(draft) if self.rng.random() < MISCHIEF else draft for name, draft in honest.items()
        }
        self.past += honest.values()
        return answers

    def _spoiled(self, draft: Draft) -> Draft:
        self.num_spoiled += 1
        ref = draft.ref
        return self.rng.choice(
            (
                lambda: (
                    self.rng.choice(self.past) if self.past else replace(draft, tokens=(-1,))
                ),  # replayed or swapped
                lambda: replace(draft, ref=replace(ref, epoch=ref.epoch + self.rng.choice((-1, 1)))),
                lambda: replace(draft, ref=replace(ref, version=ref.version + self.rng.choice((-1, 1)))),
                lambda: replace(draft, ref=replace(ref, digest=self.rng.randbytes(16))),
                lambda: replace(draft, tokens=(TINY.vocab_size, *draft.tokens[1:])),
                lambda: replace(draft, tokens=(-7, *draft.tokens[1:])),
                lambda: replace(draft, chances=(0.5,) * (len(draft.tokens) - 1) or (0.5, 0.5)),
                lambda: replace(draft, chances=(1.5,) * len(draft.tokens)),
                lambda: replace(draft, chances=(float("nan"),) * len(draft.tokens)),
                lambda: replace(
                    draft, chances=(*(0.5 for _ in draft.tokens[1:]), 0.6) if draft.tokens[1:] else (-0.1,)
                ),
            )
        )()


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [stream.output for stream in Driver(target(None), depth=0).run(*requests)]


def wishes() -> list[Request]:
    greedy = [request(index, max_tokens=30) for index in (0, 2, 4)]
    return [*greedy, *(seeded(index, max_tokens=30) for index in (1, 3, 5))]


@pytest.mark.covers(85, 86, 130, 153)
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_drafts_are_refused_each_one_counted_and_the_text_is_exact(seed: int) -> None:
    link = Hostile(ProposerEngine(config(), TINY, MtpConfig(), MTP), Random(seed))
    engine = target(link)
    streams = Driver(engine).run(*wishes())
    assert [stream.output for stream in streams] == texts(wishes())
    assert link.num_spoiled > 10
    assert engine._feeder.num_refused_drafts == link.num_spoiled
    link.engine.check()


@pytest.mark.covers(86)
def test_drafts_of_other_weights_are_verified_like_any_and_harm_nothing() -> None:
    other = {name: -tensor if "eh_proj" in name else tensor for name, tensor in MTP.items()}
    engine = target(DirectProposer(ProposerEngine(config(), TINY, MtpConfig(), other)))
    streams = Driver(engine).run(*wishes())
    assert [stream.output for stream in streams] == texts(wishes())
    assert sum(row.drafted for stream in streams for row in stream.rows) > 0


class Garbling(DirectProposer):
    """Spoils some feeds on their way to the proposer: lost, doubled, reordered, renamed, shortened."""

    def __init__(self, engine: ProposerEngine, rng: Random) -> None:
        super().__init__(engine)
        self.rng, self.num_spoiled = rng, 0
        self.spoiled_at: dict[str, int] = {}  # the first version whose drafts cannot come

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        spoiled = [one for rows in feeds for one in (self._spoil(rows) if self._may(rows) else (rows,))]
        super().feed(spoiled, closed)

    def _may(self, rows: FeedRows) -> bool:
        return not rows.reset and self.rng.random() < 0.25

    def _spoil(self, rows: FeedRows) -> tuple[FeedRows, ...]:
        self.num_spoiled += 1
        self.spoiled_at.setdefault(rows.ref.request_id, rows.ref.version)
        spoils: tuple[Callable[[], tuple[FeedRows, ...]], ...] = (
            lambda: (rows, rows),  # replayed
            lambda: (replace(rows, first_base=rows.first_base + 1),),  # one is missing
            lambda: (replace(rows, first_base=rows.first_base - 1),),  # one came before
            lambda: (replace(rows, ref=replace(rows.ref, epoch=rows.ref.epoch - 1)),),
            lambda: (replace(rows, ref=replace(rows.ref, epoch=rows.ref.epoch + 1)),),
            lambda: (replace(rows, ref=replace(rows.ref, version=rows.ref.version - 2)),),
            lambda: (replace(rows, hidden=rows.hidden[:, :-1]),),
            lambda: (replace(rows, next_ids=(*rows.next_ids, 1)),),
            lambda: (replace(rows, next_ids=(TINY.vocab_size,) * len(rows.next_ids)),),
            lambda: (replace(rows, reset=True),),  # opens anew, in the middle, without its request
        )
        return self.rng.choice(spoils)()


@pytest.mark.covers(84, 86, 131)
@pytest.mark.parametrize("seed", SEEDS)
def test_garbled_hidden_rows_are_refused_and_their_sequence_drafts_no_more(seed: int) -> None:
    link = Garbling(ProposerEngine(config(), TINY, MtpConfig(), MTP), Random(seed))
    streams = Driver(target(link, prompt_lookup=False)).run(*wishes())
    assert [stream.output for stream in streams] == texts(wishes())
    assert link.num_spoiled
    assert len(link.refusals) >= link.num_spoiled
    for stream in streams:  # what was refused is closed until it is opened anew, which this link never does
        first = link.spoiled_at.get(stream.request.request_id, len(stream.rows))
        assert not any(row.drafted for row in stream.rows if row.ref.version >= first)
    link.engine.check()
    assert not link.engine.num_sequences


def test_an_honest_run_refuses_nothing() -> None:
    link = proposer()
    engine = target(link)
    Driver(engine).run(*wishes())
    assert (engine._feeder.num_refused_drafts, link.refusals) == (0, [])
