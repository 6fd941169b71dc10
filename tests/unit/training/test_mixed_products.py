"""Products with bf16 operands: near the float32 ones, gradients in float32, and the gate's choice untouched."""

from __future__ import annotations

import pytest
import torch

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.training.joint.recipe import Optimization
from seqmtp_serve.training.v3.gate import Gate
from seqmtp_serve.training.v3.products import FAST, MIXED, product


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 70])
def test_a_mixed_product_is_the_float32_product_of_rounded_operands(rows: int) -> None:
    torch.manual_seed(rows)
    x_NI = torch.randn(rows, 48, requires_grad=True)
    weight_OI = torch.randn(24, 48, requires_grad=True)
    mixed_NO = product(x_NI, weight_OI, MIXED)
    rounded_NO = product(x_NI.bfloat16().float(), weight_OI.bfloat16().float(), FAST)
    assert mixed_NO.shape == (rows, 24)
    torch.testing.assert_close(mixed_NO, rounded_NO, rtol=2**-7, atol=2**-7)
    if rows:
        assert not torch.equal(mixed_NO, product(x_NI, weight_OI, FAST))  # it did round

    grads = torch.autograd.grad(mixed_NO.square().sum(), (x_NI, weight_OI))
    exact = torch.autograd.grad(product(x_NI, weight_OI, FAST).square().sum(), (x_NI, weight_OI))
    for found, expected in zip(grads, exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_the_gate_chooses_in_float32_whatever_the_products() -> None:
    moe = MoeConfig(num_experts=8, num_shared=0, top_k=2, intermediate_size=4, num_groups=1, top_k_groups=1)
    gates = [Gate(16, moe, arithmetic) for arithmetic in (FAST, MIXED)]
    torch.manual_seed(0)
    weight_Ed, x_Nd = torch.randn(8, 16), torch.randn(64, 16)
    for gate in gates:
        with torch.no_grad():
            gate.weight.copy_(weight_Ed)
    (ids, weights), (mixed_ids, mixed_weights) = (gate(x_Nd) for gate in gates)
    assert torch.equal(ids, mixed_ids)
    assert torch.equal(weights, mixed_weights)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        Optimization(tokens=1, seed=1, products="float16")
