"""Filters, masks and samplers of one row, against the plain forms."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmtp_serve.request import SamplingParams
from seqmtp_serve.speculation.distributions import (
    BadLogits,
    first_argmax,
    inverse_cdf,
    target_probs,
)
from seqmtp_serve.speculation.plain import plain_inverse_cdf, plain_probs
from seqmtp_serve.speculation.row_params import RowParams


def probs_of(logits, **params):
    rows = torch.tensor([logits])
    return target_probs(rows, RowParams.stack([(SamplingParams(**params), 0)]))[0].tolist()


@pytest.mark.covers(71)
@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([2, 5, 40, 700, 1500]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 600, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_filters_match_the_plain_form(seed, size, temperature, top_k, top_p, min_p):
    draws = random.Random(seed)
    logits = [round(draws.gauss(0.0, 3.0), 2) for _ in range(size)]  # rounding makes ties
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    exact = torch.tensor(logits).to(torch.float64).tolist()
    assert probs_of(logits, **params) == pytest.approx(plain_probs(exact, SamplingParams(**params)), abs=1e-12)


@pytest.mark.covers(71)
def test_rows_with_different_filters_share_a_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 3000) * 2
    params = [
        SamplingParams(top_p=0.99),
        SamplingParams(top_k=7),
        SamplingParams(top_k=900, top_p=0.8),
        SamplingParams(temperature=0.3),
        SamplingParams(min_p=0.1, top_p=0.999),
        SamplingParams(top_k=2000, top_p=0.9999),
    ]
    together = target_probs(logits, RowParams.stack([(each, 0) for each in params]))
    for row, each in enumerate(params):
        alone = target_probs(logits[row : row + 1], RowParams.stack([(each, 0)]))
        assert torch.equal(together[row] > 0, alone[0] > 0)
        assert torch.allclose(together[row], alone[0], rtol=1e-12, atol=0.0)


def test_top_p_keeps_the_token_that_crosses():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert probs_of(logits, top_p=0.6) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=1e-6)
    assert probs_of(logits, top_p=0.01) == [1.0, 0.0, 0.0, 0.0]


def test_top_p_counts_what_top_k_left():
    """After top-k 2 the two remaining are 0.625 and 0.375: 0.6 is reached by the first alone."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert probs_of(logits, top_k=2, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]


def test_tokens_tied_at_a_cut_all_stay():
    assert probs_of([1.0, 2.0, 1.0, 0.0], top_k=2)[:3] == pytest.approx([0.2119, 0.5761, 0.2119], abs=1e-3)


def test_extreme_temperatures_stay_finite():
    assert probs_of([3e4, -3e4, 2.9e4], temperature=1e-9) == [1.0, 0.0, 0.0]
    assert probs_of([1.0, 2.0], temperature=1e9) == pytest.approx([0.5, 0.5])


@pytest.mark.covers(67)
def test_a_large_vocabulary_sums_to_one():
    torch.manual_seed(0)
    probs = target_probs(torch.randn(2, 49_152) * 4, RowParams.stack([(SamplingParams(), 0)] * 2))
    assert (probs.sum(-1) - 1.0).abs().max() < 1e-12


def test_minus_infinity_masks_and_other_infinities_are_errors():
    assert probs_of([0.0, -math.inf, 0.0]) == [0.5, 0.0, 0.5]
    for bad in (math.nan, math.inf):
        with pytest.raises(BadLogits, match=r"rows \[0\]"):
            probs_of([0.0, bad, 0.0])
    with pytest.raises(BadLogits):
        probs_of([-math.inf, -math.inf])


@pytest.mark.covers(72)
@pytest.mark.parametrize("size", [1, 5, 256, 257, 511, 512, 1000, 49_152])
def test_first_argmax_is_the_lowest_id_of_the_largest(size):
    draws = torch.Generator().manual_seed(size)
    values = torch.randint(0, 4, (20, size), generator=draws).float()  # many ties
    index, top = first_argmax(values)
    assert top.tolist() == [max(row) for row in values.tolist()]
    assert index.tolist() == [row.index(max(row)) for row in values.tolist()]


@pytest.mark.parametrize("place", [0, 300, 999])
def test_first_argmax_passes_nan_on(place):
    values = torch.zeros(2, 1000)
    values[1, place] = math.nan
    assert first_argmax(values)[1].isnan().tolist() == [False, True]


def test_inverse_cdf_never_chooses_a_token_of_weight_zero():
    weights = [0.0, 0.1, 0.0, 0.2, 0.0]
    draws = [0.0, 1 / 3 - 1e-9, 1 / 3 + 1e-9, 0.5, 1.0 - 2.0**-53]
    tokens = inverse_cdf(torch.tensor([weights] * 5, dtype=torch.float64), torch.tensor(draws, dtype=torch.float64))
    assert tokens.tolist() == [1, 1, 3, 3, 3]
    assert [plain_inverse_cdf(weights, u) for u in draws] == [1, 1, 3, 3, 3]
