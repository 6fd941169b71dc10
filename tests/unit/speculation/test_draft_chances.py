"""How likely a draft is to be accepted, by how sure the module is: what is known at first, and what is learned."""

from __future__ import annotations

import math

import pytest
import torch

from seqmtp_serve.request import SamplingParams
from seqmtp_serve.speculation.draft_chances import GREEDY, MEMORY, SAMPLED, DraftChances, confidences, num_worth

PLAIN = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seeded=True)
RATIO = SamplingParams(temperature=0.8)


def test_confidence_is_the_likeliest_tokens_probability() -> None:
    logits_BV = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    plain = []
    for row in logits_BV.tolist():
        weights = [math.exp(logit) for logit in row]
        plain.append(max(weights) / sum(weights))
    assert confidences(logits_BV) == pytest.approx(plain)


@pytest.mark.parametrize(("params", "first"), [(PLAIN, GREEDY), (SEEDED, SAMPLED), (RATIO, SAMPLED)])
def test_it_begins_with_what_was_measured(params: SamplingParams, first: tuple[float, ...]) -> None:
    chances = DraftChances()
    assert [chances.of(params, place / 10 + 0.05) for place in range(10)] == pytest.approx(first)
    assert (chances.of(params, 0.0), chances.of(params, 1.0)) == pytest.approx((first[0], first[-1]))
    assert list(first) == sorted(first)


def test_it_learns_from_drafts_up_to_the_first_that_was_wrong() -> None:
    chances = DraftChances()
    for _ in range(400):
        chances.learn(PLAIN, [7, 8, 9], [0.15, 0.55, 0.95], [7, 3, 9])
    assert chances.of(PLAIN, 0.15) > 0.95
    assert chances.of(PLAIN, 0.55) < 0.05
    assert chances.of(PLAIN, 0.95) == pytest.approx(GREEDY[9]), "what stood behind a wrong one says nothing"
    assert chances.of(SEEDED, 0.15) == pytest.approx(SAMPLED[1]), "others are drawn at another temperature"


def test_it_learns_as_much_as_is_known_of_the_text() -> None:
    chances = DraftChances()
    chances.learn(PLAIN, [7, 8], [0.15, 0.55], [7])
    assert chances.of(PLAIN, 0.15) > GREEDY[1]
    assert chances.of(PLAIN, 0.55) == pytest.approx(GREEDY[5])


def test_nothing_is_learned_where_a_draft_takes_part_in_choosing_the_text() -> None:
    chances = DraftChances()
    for _ in range(100):
        chances.learn(RATIO, [7], [0.95], [3])
    assert chances.of(RATIO, 0.95) == pytest.approx(SAMPLED[9])


def test_old_drafts_fade() -> None:
    chances = DraftChances()
    for _ in range(4 * int(MEMORY)):
        chances.learn(PLAIN, [7], [0.5], [7])
    for _ in range(int(MEMORY)):
        chances.learn(PLAIN, [7], [0.5], [8])
    assert chances.of(PLAIN, 0.5) < 0.45


def test_a_chain_is_worth_what_stands_before_its_first_poor_draft() -> None:
    assert num_worth((0.9, 0.5, 0.1), 0.5) == 2
    assert num_worth((0.4, 0.9), 0.5) == 0
    assert num_worth((), 0.5) == 0
