"""`select_mtp_one`, row by row, on a three-token vocabulary."""

from __future__ import annotations

import random

import pytest

from seqmtp_serve.speculation.select_one import OneSelection, select_mtp_one

P, Q, BONUS = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2), (0.0, 0.0, 1.0)


class Argmax:
    """A sampler that takes the likeliest token and remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, distribution):
        self.seen.append(tuple(distribution))
        return max(range(len(distribution)), key=distribution.__getitem__)


def select(draft, u, *, remaining=5, eos=None, p=P, q=Q, bonus=BONUS):
    sample = Argmax()
    return select_mtp_one(p, q, draft, bonus, u, sample, remaining=remaining, eos=eos), sample.seen


def outcome(accepted, tokens, keep, pending, stopped):
    return OneSelection(accepted=accepted, new_tokens=tokens, keep_rows=keep, pending=pending, stopped=stopped)


@pytest.mark.covers(67, 76, 78, 81)
@pytest.mark.parametrize(
    ("arguments", "expected", "num_samples"),
    [
        ({"draft": 0, "u": 0.19}, outcome(True, (0, 2), 2, 2, False), 1),
        ({"draft": 0, "u": 0.2}, outcome(False, (1,), 1, 1, False), 1),  # strictly below the ratio
        ({"draft": 1, "u": 0.999}, outcome(True, (1, 2), 2, 2, False), 1),
        ({"draft": 1, "u": 0.5, "remaining": 1}, outcome(True, (1,), 2, None, True), 0),
        ({"draft": 1, "u": 0.5, "eos": 1}, outcome(True, (1,), 2, None, True), 0),
        ({"draft": 1, "u": 0.5, "eos": 2}, outcome(True, (1, 2), 2, 2, True), 1),
        ({"draft": 1, "u": 0.5, "remaining": 2}, outcome(True, (1, 2), 2, 2, True), 1),
        ({"draft": 0, "u": 0.9, "remaining": 1}, outcome(False, (1,), 1, 1, True), 1),
        ({"draft": 0, "u": 0.9, "eos": 1}, outcome(False, (1,), 1, 1, True), 1),
        ({"draft": 0, "u": 0.0, "p": (0.0, 0.7, 0.3)}, outcome(False, (1,), 1, 1, False), 1),
    ],
)
def test_outcomes(arguments, expected, num_samples):
    result, seen = select(**arguments)
    assert result == expected
    assert len(seen) == num_samples
    assert all(sum(distribution) == pytest.approx(1.0, abs=1e-12) for distribution in seen)


@pytest.mark.covers(69)
def test_a_correction_comes_from_the_normalised_residual():
    _, seen = select(0, 0.9)
    assert seen[0] == pytest.approx((0.0, 0.75, 0.25))


@pytest.mark.covers(68)
def test_a_bonus_comes_from_its_own_distribution_untouched():
    _, seen = select(1, 0.0, bonus=(0.25, 0.25, 0.5))
    assert seen == [(0.25, 0.25, 0.5)]


@pytest.mark.covers(67)
def test_equal_distributions_accept_every_draw():
    assert all(select(0, u, p=Q)[0].accepted for u in (0.0, 0.5, 1.0 - 2.0**-53))


@pytest.mark.covers(67, 69, 127)
def test_the_marginal_of_the_whole_procedure_is_the_target():
    """Exact, no simulation: sum over y of q(y) [accept y, or the residual]."""
    marginal, accepted = [0.0, 0.0, 0.0], 0.0
    for draft, q in enumerate(Q):
        accept = min(1.0, P[draft] / Q[draft])
        accepted += q * accept
        marginal[draft] += q * accept
        if accept < 1.0:
            (residual,) = select(draft, accept)[1]
            marginal = [m + q * (1.0 - accept) * r for m, r in zip(marginal, residual, strict=True)]
    assert marginal == pytest.approx(P)
    assert accepted == pytest.approx(0.6)


@pytest.mark.covers(67)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[({"remaining": r}, "at least one new output slot is required") for r in (0, True, 1.0, -1)],
        *[
            ({name: bad}, "aligned normalized distributions required")
            for name in ("p", "q", "bonus")
            for bad in (
                (),
                (0.5, 0.5),
                (float("nan"), 0.5, 0.5),
                (float("inf"), 0.0, 0.0),
                (-0.1, 0.6, 0.5),
                (0.5, 0.3, 0.2 + 1e-9),
            )
        ],
        *[({"draft": y}, "candidate must be sampled from positive draft support") for y in (True, 1.0, -1, 3)],
        ({"q": (0.0, 0.5, 0.5)}, "candidate must be sampled from positive draft support"),
        *[({"u": u}, r"uniform draw must be in \[0, 1\)") for u in (-0.1, 1.0, float("nan"))],
        (
            {"p": (0.5 - 1e-13, 0.5), "q": (0.5, 0.5), "bonus": (0.5, 0.5), "u": 1 - 1e-13},
            "rejection must have positive residual mass",
        ),
    ],
)
def test_arguments_no_correct_caller_has(arguments, message):
    with pytest.raises(ValueError, match=message):
        select(**{"draft": 0, "u": 0.5, **arguments})


@pytest.mark.covers(67)
def test_sums_off_by_rounding_pass():
    assert select(1, 0.0, p=(0.1, 0.6, 0.3 + 5e-13))[0].accepted


@pytest.mark.covers(103)
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
def test_progress_is_one_plus_the_acceptance_rate(acceptance):
    """p accepts the only drafted token with this probability, so a round yields 1 + a tokens in the mean."""
    draws, rounds = random.Random(1), 20_000
    total = 0
    for _ in range(rounds):
        p = (acceptance, 1.0 - acceptance)
        result, _ = select(0, draws.random(), p=p, q=(1.0, 0.0), bonus=(0.5, 0.5))
        total += len(result.new_tokens)
    tolerance = 4.0 * (acceptance * (1.0 - acceptance) / rounds) ** 0.5
    assert total / rounds == pytest.approx(1.0 + acceptance, abs=tolerance + 1e-12)
