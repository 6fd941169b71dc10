"""What a grammar forces is drafted for nothing: the same text in fewer rounds, and the row says who proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqmtp_serve.engine.own_drafts import OwnDrafts
from seqmtp_serve.local import LocalService
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Ref, Request, SamplingParams, Shaping
from services.detokenizer import Detokenizer
from tests.unit.engine.driver import Driver, Stream
from tests.unit.engine.test_structured_text import EOS_ID, GRAMMARS, TOKENIZER, batch, constrained, engine, json_grammar

LONG_KEYS = {
    "type": "object",
    "properties": {"identification_number": {"type": "boolean"}, "temperature_in_celsius": {"enum": [10, 20]}},
    "required": ["identification_number", "temperature_in_celsius"],
    "additionalProperties": False,
}
GREEDY, SEEDED, RATIO = (
    {"temperature": 0.0},
    {"temperature": 1.1, "seeded": True, "seed": 5},
    {"temperature": 1.1, "seed": 5},
)


def long_keys(**sampling: object) -> Request:
    return replace(
        constrained("object", 1),
        params=SamplingParams(max_tokens=100, shaping=Shaping(grammar=json_grammar(LONG_KEYS)), **sampling),  # type: ignore[arg-type]
    )


def run(request: Request, *, depth: int, forced: int, proposing: bool = True) -> Stream:
    (stream,) = Driver(engine(proposing=proposing), depth=depth, predicted=forced).run(request)
    return stream


@pytest.mark.covers(68, 72)
def test_constrained_text_is_the_same_with_and_without_forced_drafts() -> None:
    requests = batch()[::2]
    plain = [stream.output for stream in Driver(engine(proposing=False), depth=0).run(*requests)]
    for depth, proposing in ((3, True), (0, False)):
        streams = Driver(engine(proposing=proposing), depth=depth, predicted=8).run(*requests)
        assert [stream.output for stream in streams] == plain
        assert sum(row.forced for stream in streams for row in stream.rows) > 15


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_long_forced_keys_raise_the_progress_of_a_round(sampling: dict[str, object]) -> None:
    """E[R] = tokens of rounds / rounds; the first token is no round."""
    without = run(long_keys(**sampling), depth=3, forced=0)
    with_ = run(long_keys(**sampling), depth=3, forced=12)
    alone = run(long_keys(**sampling), depth=0, forced=12, proposing=False)
    assert with_.output == without.output == alone.output
    assert not any(row.forced for row in without.rows)
    progress = [(len(stream.output) - 1) / (len(stream.rows) - 1) for stream in (without, with_, alone)]
    assert progress[1] > 1.5 * progress[0]
    assert progress[2] > 3
    # No merge of this tokenizer spells these keys otherwise, so what is forced is sure.
    assert all(row.accepted >= row.forced for row in with_.rows[:-1])


def test_ordinary_decoding_has_no_forced_drafts() -> None:
    request = long_keys(**GREEDY)
    stream = run(replace(request, params=replace(request.params, max_depth=0)), depth=0, forced=12)
    assert not any(row.drafted for row in stream.rows)
    assert stream.output == run(request, depth=3, forced=12).output


def test_a_replay_goes_on_with_forced_drafts() -> None:
    stream, driver = Stream.open(long_keys(**SEEDED)), Driver(engine(), predicted=8)
    while len(stream.output) < 20:
        driver.step([stream])
    driver.preempt(stream)
    driver.resume([stream])
    assert stream.output == run(long_keys(**SEEDED), depth=0, forced=0).output


def test_forced_drafts_leave_the_distribution_alone() -> None:
    """The ratio contract: each spelling of the words is as likely with and without drafts."""
    grammar = Shaping(grammar=GRAMMARS["choice"][0])
    counts: list[dict[tuple[int, ...], int]] = []
    for forced in (0, 8):
        found: dict[tuple[int, ...], int] = {}
        requests = [
            replace(
                constrained("choice", 1),
                request_id=f"c{seed}",
                params=SamplingParams(temperature=1.2, seed=seed, max_tokens=8, shaping=grammar),
            )
            for seed in range(150)
        ]
        for first in range(0, len(requests), 15):
            for stream in Driver(engine(), predicted=forced).run(*requests[first : first + 15]):
                found[tuple(stream.output)] = found.get(tuple(stream.output), 0) + 1
        counts.append(found)
    without, with_ = counts
    statistic = sum(
        (without.get(text, 0) - with_.get(text, 0)) ** 2 / (without.get(text, 0) + with_.get(text, 0))
        for text in {*without, *with_}
    )
    assert len({*without, *with_}) > 1
    assert statistic < 3.5 * len({*without, *with_})  # two samples' chi-square: about its degrees of freedom


def draft(*tokens: int, sampled: bool = True) -> Draft:
    ref = Ref(request_id="r", epoch=1, version=3, digest=bytes(16))
    return Draft(ref=ref, tokens=tokens, draft_probs=tuple(((token, 0.5 if sampled else 1.0),) for token in tokens))


def test_sources_in_their_order() -> None:
    forced = draft(1, 2, sampled=False)
    own = OwnDrafts(forced={"r": forced})
    agreeing = own.choose("r", draft(1, 2, 3))
    assert agreeing.draft is not None
    assert (agreeing.draft.tokens, agreeing.num_forced) == ((1, 2, 3), 2)
    # Forced tokens are judged as certain; the one behind them by the q it was drawn from.
    assert agreeing.draft.draft_probs == (((1, 1.0),), ((2, 1.0),), ((3, 0.5),))
    for proposed in (None, draft(1), draft(1, 2), draft(1, 9, 3)):
        chosen = own.choose("r", proposed)
        assert (chosen.draft, chosen.num_forced, chosen.is_predicted) == (forced, 2, False)
    assert own.suffices("r", 2)
    assert not own.suffices("r", 3)
    sure = OwnDrafts(forced={"r": forced}, predicted={"r": draft(1, 2, 7, 8)})
    assert sure.choose("r", None).is_predicted
    assert not OwnDrafts(forced={"r": forced}, predicted={"r": draft(1, 7, 8)}).choose("r", None).is_predicted
    guess = OwnDrafts(guessed={"r": draft(4)})
    assert guess.choose("r", None).is_predicted
    assert guess.choose("r", draft(5)).draft == draft(5)


async def test_the_record_and_the_ledger_say_who_proposed_a_token() -> None:
    async with LocalService.running(engine(), lambda one: Detokenizer(TOKENIZER, one.prompt_ids)) as service:
        rows = await service.generate(long_keys(**GREEDY))
        counters = service.driver.ledger.counters()
    origins = "".join(row.origins for row in rows)
    assert origins[0] == "b"
    assert origins.count("f") == counters["forced.accepted"] > 30
    assert rows[-1].tokens[-1] == EOS_ID
    kinds = ("accepted", "rejected", "plain", "forced")
    assert counters["rounds"] == sum(counters.get(f"rounds.{kind}", 0) for kind in kinds) == len(rows) - 1
