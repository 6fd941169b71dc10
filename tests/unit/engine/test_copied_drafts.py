"""A proposer copies from the request's own text where that repeats itself; whose a draft was changes no token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from seqmtp_serve import oracle
from seqmtp_serve.engine.depths import MtpRows
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Contract, Ref, Request
from tests.unit.engine.driver import Driver
from tests.unit.engine.engines import MTP, TARGET, proposer, request, seeded, target
from tests.unit.test_local import engine, generate_all, tokens_of

MAKERS = {"greedy": request, "seeded": seeded}
OUTSIDE = next(  # a token that the module's draft vocabulary lacks
    token
    for token in range(TINY.vocab_size)
    if token not in MTP[f"model.layers.{TINY.num_layers}.draft_token_ids"].tolist()
)


def repeating(each: Request, text: list[int]) -> Request:
    """The same request after a prompt that holds its own answer, twice."""
    return replace(each, prompt_ids=(*each.prompt_ids, *text, *each.prompt_ids, *text, *each.prompt_ids))


def feed(ids: list[int], start: int, stop: int, depth: int, opener: Request | None) -> FeedRows:
    hidden = oracle.forward(TARGET, TINY, ids)[1]
    ref = Ref(request_id="r0", epoch=1, version=stop, digest=bytes(16))
    return FeedRows(
        ref=ref,
        first_base=start,
        hidden=hidden[start:stop],
        next_ids=tuple(ids[start + 1 : stop + 1]),
        depth=depth,
        reset=opener is not None,
        request=opener,
    )


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_text_is_the_same_with_copies_and_without(make: object, depth: int) -> None:
    assert callable(make)
    for index in range(4):
        each = make(index, max_tokens=30, ignore_eos=True)
        each = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
        text = oracle.generate(TARGET, TINY, each)
        outputs = [Driver(target(proposer(prompt_lookup=on)), depth=depth).run(each)[0].output for on in (True, False)]
        assert outputs == [text, text]


def test_a_text_that_repeats_itself_is_copied_whole_and_outside_the_draft_vocabulary() -> None:
    ids = [3, 1, OUTSIDE, 4, 2, 9, 3, 1]
    one = replace(request(), request_id="r0", prompt_ids=tuple(ids))
    (draft,) = proposer().engine.propose([feed(ids, 0, len(ids) - 1, 3, one)])
    assert isinstance(draft, Draft)
    assert draft.copied
    assert draft.tokens == (OUTSIDE, 4, 2)
    (module,) = proposer(prompt_lookup=False).engine.propose([feed(ids, 0, len(ids) - 1, 3, one)])
    assert isinstance(module, Draft)
    assert not module.copied
    hidden = oracle.forward(TARGET, TINY, ids)[1][: len(ids) - 1]
    assert list(module.tokens) == oracle.draft_greedily(MTP, TINY, MtpConfig(), ids, hidden, 3)


def test_a_round_after_a_copy_finds_every_row_of_the_module() -> None:
    """The rows fed for a copy waited; the module goes on as if it had drafted itself."""
    ids = [3, 1, OUTSIDE, 4, 2, 9, 3, 1, 5, 6, 7, 8]
    one = replace(request(), request_id="r0", prompt_ids=tuple(ids[:8]))
    engine = proposer().engine
    (first,) = engine.propose([feed(ids, 0, 7, 3, one)])
    (second,) = engine.propose([feed(ids, 7, 11, 3, None)])
    assert isinstance(first, Draft)
    assert isinstance(second, Draft)
    assert (first.copied, second.copied) == (True, False)
    assert list(second.tokens) == oracle.draft_greedily(
        MTP, TINY, MtpConfig(), ids, oracle.forward(TARGET, TINY, ids)[1][:11], 3
    )
    engine.check()


def test_rows_of_copies_wait_until_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that says one thing over and over: no pass of the module, but one whenever five rows wait."""
    monkeypatch.setattr("seqmtp_serve.engine.proposer.MOST_WAITING", 4)
    ids = [3, 1, 4, 5] * 11
    one = replace(request(), request_id="r0", prompt_ids=tuple(ids[:8]))
    engine = proposer().engine
    passes: list[int] = []
    compute = engine._depths.compute

    def counted(module: object, rows: list[MtpRows]) -> object:
        passes.append(sum(len(each.next_ids) for each in rows))
        return compute(module, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._depths, "compute", counted)
    for start, stop in pairwise([0, *range(8, 42, 3)]):
        (draft,) = engine.propose([feed(ids, start, stop, 2, None if start else one)])
        assert isinstance(draft, Draft)
        assert draft.copied
        engine.check()
    assert passes == [8, *[6] * 5]
    (sequence,) = engine._sequences.values()
    assert sequence.waiting_ids == ids[39:42]


def test_a_sequence_that_opens_late_knows_its_prompt() -> None:
    """Only the last hidden rows of a prompt were given; its tokens are in the request."""
    ids = [3, 1, OUTSIDE, 4, 2, 9, 5, 6, 3, 1]
    one = replace(request(), request_id="r0", prompt_ids=tuple(ids))
    (draft,) = proposer().engine.propose([feed(ids, 7, 9, 2, one)])
    assert isinstance(draft, Draft)
    assert draft.tokens == (OUTSIDE, 4)


def test_under_the_ratio_contract_a_copied_token_is_judged_as_certain() -> None:
    ids = [3, 1, OUTSIDE, 4, 2, 9, 3, 1]
    one = replace(request(temperature=0.8), request_id="r0", prompt_ids=tuple(ids))
    assert one.params.contract is Contract.RATIO
    (draft,) = proposer().engine.propose([feed(ids, 0, 7, 2, one)])
    assert isinstance(draft, Draft)
    assert draft.draft_probs == (((OUTSIDE, 1.0),), ((4, 1.0),))


def test_copies_keep_the_distribution_under_the_ratio_contract() -> None:
    """First two tokens after a prompt that repeats itself: as often with copies as the model alone draws them."""
    ids = (3, 1, 5, 4, 2, 9, 3, 1, 5, 4, 2, 9)
    trials = 1500
    counts = {}
    for on in (True, False):
        built = target(proposer(prompt_lookup=on))
        tokens = torch.zeros(2, TINY.vocab_size)
        for seed in range(trials):
            one = replace(request(temperature=1.0, seed=seed, max_tokens=3, ignore_eos=True), prompt_ids=ids)
            output = Driver(built, depth=2).run(replace(one, request_id=f"r{seed}"))[0].output
            for place in (1, 2):  # the first comes from the prompt's pass
                tokens[place - 1, output[place]] += 1
        counts[on] = tokens / trials
    distance = (counts[True] - counts[False]).abs().sum(-1) / 2
    noise = (counts[False] * (1 - counts[False]) * 2 / trials).sqrt().sum(-1) / 2
    assert (distance < 1.6 * noise).all(), (distance, noise)


async def test_the_record_says_which_tokens_were_copied() -> None:
    each = request(1, max_tokens=30, ignore_eos=True)
    one = repeating(each, oracle.generate(TARGET, TINY, each)[:12])
    (rows,), counters = await generate_all(engine(), [one])
    assert tokens_of(rows) == oracle.generate(TARGET, TINY, one)
    origins = "".join(row.origins for row in rows)
    assert origins.count("l") == sum(row.accepted for row in rows if row.copied) == counters["copied.accepted"] > 0
    assert origins.count("a") == sum(row.accepted for row in rows if not row.copied)
    assert counters["copied.rounds"] == sum(row.copied for row in rows)
    assert counters["accepted"] == sum(row.accepted for row in rows)
