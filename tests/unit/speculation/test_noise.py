"""Keyed randomness: the same bits in both forms, and independent of everything but its key."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from seqmtp_serve.speculation.noise import (
    Purpose,
    as_word,
    gumbel,
    gumbel_one,
    mix64,
    stream_key,
    stream_keys,
    uniform,
    uniforms,
)

STREAMS = [
    (seed, choice, position, purpose)
    for seed in (0, 1, 2**63, 2**64 - 1)
    for choice in (0, 3)
    for position in (0, 7, 40_000)
    for purpose in Purpose
]


def tensor_keys(streams):
    keys = []
    for seed, choice, position, purpose in streams:
        parts = (torch.tensor([as_word(part)]) for part in (seed, choice, position))
        keys.append(stream_keys(*parts, purpose))
    return torch.cat(keys)


@pytest.mark.covers(138)
def test_both_forms_are_the_same_bits():
    key_N = tensor_keys(STREAMS)
    assert key_N.tolist() == [as_word(stream_key(*stream)) for stream in STREAMS]
    assert uniforms(key_N).tolist() == [uniform(*stream) for stream in STREAMS]


def test_the_generator_is_splitmix64():
    """First outputs for state 1234567, as the reference implementation prints them."""
    state, outputs = 1234567, []
    for _ in range(3):
        state += 0x9E3779B97F4A7C15
        outputs.append(mix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.covers(138)
def test_every_stream_has_its_own_key():
    streams = list(itertools.product(range(40), range(3), range(60), Purpose))
    assert len({stream_key(*stream) for stream in streams}) == len(streams)


def test_a_token_has_one_gumbel_value_whatever_else_is_asked_for():
    key_N = tensor_keys(STREAMS[:3])
    full_NV = gumbel(key_N, torch.arange(1000))
    some = torch.tensor([999, 3, 0, 512])
    assert torch.equal(gumbel(key_N, some), full_NV[:, some])
    expected = [gumbel_one(stream_key(*STREAMS[1]), token) for token in some.tolist()]
    assert full_NV[1, some].tolist() == pytest.approx(expected, rel=1e-12)


def test_gumbel_values_are_finite_at_both_ends_of_the_unit_interval():
    for cell in (0, 2**52 - 1):
        u = (cell + 0.5) * 2.0**-52
        assert 0.0 < u < 1.0
        assert math.isfinite(-math.log(-math.log(u)))


def test_draws_are_uniform_and_purposes_uncorrelated():
    position_N = torch.arange(100_000)
    seed_N = torch.full_like(position_N, 5)
    choice_N = torch.zeros_like(position_N)
    draws = {purpose: uniforms(stream_keys(seed_N, choice_N, position_N, purpose)) for purpose in Purpose}
    for u_N in draws.values():
        assert u_N.min() >= 0.0
        assert u_N.max() < 1.0
        counts = torch.histc(u_N, 50, 0.0, 1.0)
        assert ((counts - 2000) ** 2 / 2000).sum() < 94.6  # chi-square, 49 degrees, 1e-4
    for a, b in itertools.combinations(draws.values(), 2):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / 100_000**0.5


def test_gumbel_values_follow_their_distribution():
    key_N = stream_keys(*(torch.arange(400) + shift for shift in (1, 2, 3)), Purpose.TOKEN)
    uniform_again = torch.exp(-torch.exp(-gumbel(key_N, torch.arange(500)))).flatten()
    counts = torch.histc(uniform_again, 50, 0.0, 1.0)
    assert ((counts - 4000) ** 2 / 4000).sum() < 94.6
