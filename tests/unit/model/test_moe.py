"""The mixture-of-experts layer against its equations, and the promise that a row never sees its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_fixture import MOE, SIZE, moe_weights, tokens

from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.dispatch import LocalDispatcher
from seqmtp_serve.model.expert_placement import experts_of, first_experts
from seqmtp_serve.model.moe import MoeLayer, MoeWeights
from seqmtp_serve.model.moe_naive import naive_moe, naive_route
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import int8_levels

FORMS = {
    "fp32": Numerics(),
    "fp32, fast": Numerics(invariant=False),
    "fp32, fixed tiles": Numerics(fixed_tiles=True),
    "int8": Numerics(int8_levels=int8_levels()),
}


def layer(config: MoeConfig = MOE, numerics: Numerics = FORMS["fp32"], **weights: float) -> MoeLayer:
    return MoeLayer(moe_weights(config, **weights), config, LocalDispatcher(), numerics)


@pytest.mark.parametrize("form", ["fp32", "fp32, fast", "fp32, fixed tiles"])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_the_layer_is_its_equations(form: str, num_shared: int):
    config = replace(MOE, num_shared=num_shared)
    expected = naive_moe(tokens(33).double(), moe_weights(config), config)
    torch.testing.assert_close(layer(config, FORMS[form])(tokens(33)).double(), expected, rtol=1e-5, atol=1e-5)


def test_int8_layers_are_near_the_equations():
    expected = naive_moe(tokens(33).double(), moe_weights(), MOE)
    found = layer(numerics=FORMS["int8"])(tokens(33)).double()
    assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("form", ["fp32", "fp32, fixed tiles", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 33])
def test_a_token_has_the_same_bits_in_any_batch_and_order(form: str, num_tokens: int):
    moe, x_Td = layer(numerics=FORMS[form]), tokens(64)
    expected = moe(x_Td)
    assert torch.equal(moe(x_Td[:num_tokens]), expected[:num_tokens])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(moe(x_Td[order]), expected[order])


@pytest.mark.parametrize("form", FORMS)
def test_no_token_gives_no_row(form: str):
    assert layer(numerics=FORMS[form])(tokens(0)).shape == (0, SIZE)


@pytest.mark.covers(99)
def test_touched_experts_are_the_union_over_the_rows_of_a_pass():
    weights, x_Td = moe_weights(), tokens(2)
    dispatcher = LocalDispatcher()
    MoeLayer(weights, MOE, dispatcher, Numerics())(x_Td)
    union = {expert for token in x_Td for expert in naive_route(token, weights, MOE)}
    assert dispatcher.tally.num_touched == len(union) < 2 * MOE.top_k
    assert (dispatcher.tally.num_pairs, dispatcher.tally.num_passes) == (2 * MOE.top_k, 1)
    assert dispatcher.tally.sent_bytes == 0


def test_weights_are_read_by_their_hugging_face_names_and_only_those_wanted():
    whole = moe_weights()
    assert whole.shared is not None
    tensors = {"m.gate.weight": whole.gate_Ed, "m.gate.e_score_correction_bias": whole.bias_E}
    parts = {f"experts.{expert}": one for expert, one in whole.experts.items()} | {"shared_experts": whole.shared}
    for name, part in parts.items():
        tensors[f"m.{name}.gate_proj.weight"] = part.gate_Fd
        tensors[f"m.{name}.up_proj.weight"] = part.up_Fd
        tensors[f"m.{name}.down_proj.weight"] = part.down_dF
    read = MoeWeights.read(tensors, "m.", MOE)
    assert torch.equal(MoeLayer(read, MOE, LocalDispatcher(), Numerics())(tokens(9)), layer()(tokens(9)))
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("m.experts.0.")}
    assert set(MoeWeights.read(others, "m.", MOE, experts=experts_of(1, 4, 16)).experts) == {4, 5, 6, 7}


@pytest.mark.parametrize("num_experts", [1, 3, 16, 256])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_ranks_tile_the_experts(num_experts: int, world_size: int):
    parts = [experts_of(rank, world_size, num_experts) for rank in range(world_size)]
    assert [expert for part in parts for expert in part] == list(range(num_experts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert first_experts(world_size, num_experts) == (*(part.start for part in parts), num_experts)
