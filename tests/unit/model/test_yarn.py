"""YaRN to the digits of the released configuration, by hand and against the formula of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig
from seqmtp_serve.model.rope import rotate_, rotation_table
from seqmtp_serve.model.yarn import (
    inverse_frequencies,
    magnitude,
    pair_of_turns,
    ramp_ends,
    rotation_multiplier,
    softmax_scale,
)

RELEASED = YarnConfig(factor=40.0, original_max_position=4096)
V3 = DeepseekConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_layers=61,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_head_dim=128,
    rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    num_dense_layers=3,
    moe=MoeConfig(num_experts=256, num_shared=1, top_k=8, intermediate_size=2048),
    yarn=RELEASED,
)
DIVISORS = [1.0811, 1.1765, 1.2903, 1.4286, 1.6, 1.8182, 2.1053, 2.5, 3.0769, 4.0, 5.7143, 10.0]  # pairs 11 .. 22


def test_the_ramp_of_the_released_configuration() -> None:
    assert pair_of_turns(64, 10_000.0, 32.0, 4096) == pytest.approx(10.4722, abs=5e-5)
    assert pair_of_turns(64, 10_000.0, 1.0, 4096) == pytest.approx(22.5134, abs=5e-5)
    assert ramp_ends(64, 10_000.0, RELEASED) == (10, 23)


def test_frequencies_of_the_released_configuration() -> None:
    found = inverse_frequencies(64, 10_000.0, RELEASED)
    base = inverse_frequencies(64, 10_000.0, None)
    assert torch.equal(found[:11], base[:11])
    assert torch.allclose(base[11:23] / found[11:23], torch.tensor(DIVISORS, dtype=torch.float64), atol=5e-5)
    assert torch.allclose(base[23:] / found[23:], torch.full((9,), 40.0, dtype=torch.float64))
    for pair, value in {0: 1.0, 10: 0.056234129, 11: 0.039006926, 22: 1.7782794e-4, 31: 3.3338035e-6}.items():
        assert float(found[pair]) == pytest.approx(value, rel=2e-7)  # the reference values are float32


def test_scale_and_multiplier_of_the_released_configuration() -> None:
    assert magnitude(40.0, 1.0) == pytest.approx(1.3688879454, abs=5e-11)
    assert softmax_scale(replace(V3, yarn=None)) == pytest.approx(0.0721687836, abs=5e-11)
    assert softmax_scale(V3) == pytest.approx(0.1352337789, abs=5e-11)
    assert rotation_multiplier(RELEASED) == 1.0
    assert rotation_multiplier(None) == 1.0


def test_scale_of_a_small_configuration() -> None:
    small = replace(V3, nope_head_dim=16, rope_head_dim=8, yarn=replace(RELEASED, factor=4.0))
    assert magnitude(4.0, 1.0) == pytest.approx(1.1386294361, abs=5e-11)
    assert softmax_scale(small) == pytest.approx(0.2646422580, abs=5e-11)


def test_unequal_mscales_move_the_magnitude_between_rotation_and_scale() -> None:
    unequal = replace(RELEASED, mscale=0.5, mscale_all_dim=0.0)
    assert rotation_multiplier(unequal) == pytest.approx(1.0 + 0.05 * 3.6888794541)
    assert softmax_scale(replace(V3, yarn=unequal)) == softmax_scale(replace(V3, yarn=None))
    table = rotation_table(inverse_frequencies(64, 10_000.0, unequal), 8, rotation_multiplier(unequal))
    assert torch.allclose(table.abs(), torch.full((8, 32), rotation_multiplier(unequal)))


def test_nothing_is_stretched_by_a_factor_of_one() -> None:
    unstretched = inverse_frequencies(64, 10_000.0, replace(RELEASED, factor=1.0))
    assert torch.allclose(unstretched, inverse_frequencies(64, 10_000.0, None), rtol=1e-15)
    assert magnitude(1.0, 1.0) == 1.0


@pytest.mark.covers(117)
def test_neighbouring_values_are_one_pair() -> None:
    """(x0, x1), (x2, x3) rotate together, each pair by its own angle: position 3, frequencies 1 and 1/2."""
    table = rotation_table(torch.tensor([1.0, 0.5], dtype=torch.float64), 4)
    heads = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    rotate_(heads, table[3:4].unsqueeze(1))
    cos, sin = torch.cos(torch.tensor([3.0, 1.5])), torch.sin(torch.tensor([3.0, 1.5]))
    assert torch.allclose(heads[0, 0], torch.stack((cos[0], sin[0], -sin[1], cos[1])))
