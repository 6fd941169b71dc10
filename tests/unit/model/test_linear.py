"""Rows must not see their neighbours, and int8 must stay close to fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.model.linear import FineInt8Linear, Fp32Linear, Int8Linear, Linear
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import gemm_rows_agree, int8_levels, probe

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 17, 33)


def weight(num_outputs: int = 80, num_inputs: int = 96) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1)) / num_inputs**0.5


def inputs(num_rows: int = 64) -> Tensor:
    rows = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(2))
    return rows * torch.logspace(-3, 3, num_rows)[:, None]  # a shared scale would ruin the small rows


FORMS = {
    "int8": lambda: Int8Linear(weight(), levels=int8_levels()),
    "int8, half range": lambda: Int8Linear(weight(), levels=63),
    "int8, two planes": lambda: FineInt8Linear(weight(), levels=int8_levels()),
    "fp32": lambda: Fp32Linear(weight(), fixed_tiles=not gemm_rows_agree(96, 80)),
    "fp32, fixed tiles": lambda: Fp32Linear(weight(), fixed_tiles=True),
    "fp32, three outputs": lambda: Fp32Linear(weight(3), fixed_tiles=not gemm_rows_agree(96, 80)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch_and_order(form: str) -> None:
    linear: Linear = FORMS[form]()
    x = inputs()
    expected = linear(x)
    for num_rows in ROWS:
        assert torch.equal(linear(x[:num_rows]), expected[:num_rows])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order]), expected[order])


@pytest.mark.parametrize("form", FORMS)
def test_threads_do_not_change_bits(form: str) -> None:
    linear, x = FORMS[form](), inputs()
    expected = linear(x)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(2, num_threads))
    try:
        assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("widest", [127, 63])
def test_int8_is_near_fp32_row_by_row(widest: int) -> None:
    levels = min(widest, int8_levels())
    tolerance = 0.015 if levels == 127 else 0.025
    x, plain = inputs(), Fp32Linear(weight())
    error = (Int8Linear(weight(), levels=levels)(x) - plain(x)).norm(dim=1) / plain(x).norm(dim=1)
    assert float(error.max()) < tolerance


def test_two_planes_round_the_weights_only() -> None:
    """A huge channel ruins the small ones of a one-plane row, and not those of a two-plane row."""
    x = inputs(8)
    x[:, 0] = 100.0 * x.abs().amax(1)
    small = weight()
    small[:, 0] = 0.0
    expected = Fp32Linear(small)(x)
    levels = int8_levels()
    one, two = (form(small, levels=levels)(x) for form in (Int8Linear, FineInt8Linear))
    assert float((one - expected).norm() / expected.norm()) > 0.2
    assert float((two - expected).norm() / expected.norm()) < 0.02


def test_the_widest_codes_the_probe_allows_are_exact() -> None:
    """Full-scale codes of equal sign are the worst case for an accumulator that saturates."""
    for num_inputs in (64, 576, 1536):
        for sign in (1.0, -1.0):
            out = Int8Linear(sign * torch.ones(16, num_inputs), levels=int8_levels())(torch.ones(3, num_inputs))
            assert torch.allclose(out, torch.full((3, 16), sign * num_inputs), rtol=1e-5)


def test_a_zero_row_stays_zero() -> None:
    assert torch.equal(Int8Linear(weight(), levels=63)(torch.zeros(2, 96)), torch.zeros(2, 80))


def test_the_probe_gives_what_was_asked_for() -> None:
    assert probe(EngineConfig(weights="fp32", numerics="fast")) == Numerics(invariant=False)
    chosen = probe(EngineConfig(weights="int8"))
    assert chosen.invariant
    assert chosen.int8_levels in (63, 127)
