"""The gate, against hand-made scores. Each test of a known bug fails with that bug put in (arXiv 2412.19437, 2.1.2).

An identity weight lets a test write the logits itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_fixture import MOE, moe_weights, tokens
from torch import Tensor

from seqmtp_serve.errors import TargetIncomplete
from seqmtp_serve.model.deepseek_config import MoeConfig
from seqmtp_serve.model.gate import Gate, Routing
from seqmtp_serve.model.moe_naive import naive_route
from seqmtp_serve.model.numerics import Numerics

SMALL = MoeConfig(num_experts=8, num_shared=0, top_k=2, intermediate_size=4, num_groups=4, top_k_groups=2)


def route(scores: list[float], bias: list[float] | None = None, config: MoeConfig = SMALL) -> Routing:
    """Route one token whose sigmoid scores are `scores`."""
    size = config.num_experts
    gate = Gate(torch.eye(size), torch.tensor(bias or [0.0] * size), config, Numerics())
    return gate(torch.logit(torch.tensor([scores], dtype=torch.float64)).float())


def chosen(routing: Routing) -> list[int]:
    return routing.experts_Tk[0].tolist()


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bias", [0.0, 0.2, 2.0])
def test_every_token_goes_where_the_equations_say(bias: float, normalise: bool):
    config, weights = replace(MOE, normalise_weights=normalise), moe_weights(bias=bias)
    routing = Gate(weights.gate_Ed, weights.bias_E, config, Numerics())(tokens(64))
    for token, experts, shares in zip(tokens(64), routing.experts_Tk, routing.weights_Tk, strict=True):
        expected = naive_route(token.double(), weights, config)
        assert experts.tolist() == list(expected)
        assert shares.tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_experts_come_in_ascending_order_and_once():
    weights = moe_weights()
    experts_Tk = Gate(weights.gate_Ed, weights.bias_E, MOE, Numerics())(tokens(64)).experts_Tk
    assert bool((experts_Tk[:, 1:] > experts_Tk[:, :-1]).all())


def test_the_bias_selects_and_does_not_weigh():
    """The bug: the biased score is the weight."""
    routing = route([0.5, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1], bias=[0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0])
    assert chosen(routing) == [0, 4]
    assert routing.weights_Tk[0].tolist() == pytest.approx([0.5 / 0.6, 0.1 / 0.6])


def test_a_score_far_below_its_bias_keeps_its_digits():
    """The bug: the score is recovered as biased - bias, which float32 cannot do."""
    tiny = [1e-8, 3e-8, *[1e-9] * 6]
    routing = route(tiny, bias=[12.0, 12.0, *[0.0] * 6])
    assert chosen(routing) == [0, 1]
    assert routing.weights_Tk[0].tolist() == pytest.approx([0.25, 0.75], rel=1e-4)


def test_a_group_is_ranked_by_the_sum_of_its_two_best():
    """The bug: by its maximum. Group 0 has the best expert, groups 1 and 2 the best pairs."""
    routing = route([0.9, 0.1, 0.7, 0.6, 0.65, 0.64, 0.1, 0.1])
    assert chosen(routing) == [2, 4]


@pytest.mark.parametrize("size", [3, 4])
def test_only_the_two_best_of_a_larger_group_count(size: int):
    """The bug: the whole group is summed."""
    config = replace(SMALL, num_experts=2 * size, num_groups=2, top_k_groups=1)
    routing = route([0.6, 0.6, *[0.01] * (size - 2), *[0.5] * size], config=config)
    assert chosen(routing) == [0, 1]


def test_a_masked_expert_never_wins_against_negative_scores():
    """The bug: other groups are masked with 0, which beats a biased score below 0."""
    bias = [-3.0, -3.0, -3.0, -3.0, -9.0, -9.0, -9.0, -9.0]
    routing = route([0.5, 0.4, 0.6, 0.3, 0.9, 0.9, 0.9, 0.9], bias=bias)
    assert chosen(routing) == [0, 2]


def test_scores_that_underflow_give_no_nan():
    """The bug: 0 / 0 without the 1e-20."""
    gate = Gate(torch.eye(8), torch.zeros(8), SMALL, Numerics())
    weights = gate(torch.full((1, 8), -200.0)).weights_Tk
    assert weights.tolist() == [[0.0, 0.0]]


def test_equal_scores_go_to_the_lower_id_in_experts_and_in_groups():
    assert chosen(route([0.5] * 8)) == [0, 1]
    assert chosen(route([0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], config=replace(SMALL, top_k_groups=1))) == [2, 3]
    many = MoeConfig(num_experts=256, num_shared=0, top_k=8, intermediate_size=4, num_groups=8, top_k_groups=4)
    gate = Gate(torch.zeros(256, 4), torch.zeros(256), many, Numerics())
    assert gate(torch.ones(3, 4)).experts_Tk.tolist() == [list(range(8))] * 3


def test_routed_scaling_multiplies_after_normalisation():
    weights = route([0.5, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1], config=replace(SMALL, routed_scaling=2.5)).weights_Tk
    assert weights[0].tolist() == pytest.approx([1.25, 1.25])


def test_the_gate_is_float32_however_the_layers_are_stored():
    """The bug: the gate's product in a low precision, which moves tokens to other experts."""
    weights, x_Td = moe_weights(), tokens(64)
    expected = Gate(weights.gate_Ed, weights.bias_E, MOE, Numerics())(x_Td)
    found = Gate(weights.gate_Ed, weights.bias_E, MOE, Numerics(int8_levels=63))(x_Td)
    assert torch.equal(found.weights_Tk, expected.weights_Tk)
    low = moe_weights().gate_Ed.bfloat16()
    rounded = Gate(low, weights.bias_E, MOE, Numerics())(x_Td)
    assert torch.equal(rounded.weights_Tk, Gate(low.float(), weights.bias_E, MOE, Numerics())(x_Td).weights_Tk)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 9, 33])
def test_a_token_is_routed_alike_in_any_batch(num_tokens: int):
    weights = moe_weights()
    gate = Gate(weights.gate_Ed, weights.bias_E, MOE, Numerics())
    whole, part = gate(tokens(64)), gate(tokens(64)[:num_tokens])
    assert torch.equal(part.experts_Tk, whole.experts_Tk[:num_tokens])
    assert torch.equal(part.weights_Tk, whole.weights_Tk[:num_tokens])


def test_a_token_alone_has_the_weights_it_has_in_a_crowd():
    """An elementwise loop computes what lies beyond its last whole vector otherwise: 14 of these 200 tokens show it."""
    weights = moe_weights()
    gate = Gate(weights.gate_Ed, weights.bias_E, MOE, Numerics())
    alone = torch.cat([gate(token_1d).weights_Tk for token_1d in tokens(200).split(1)])
    assert torch.equal(alone, gate(tokens(200)).weights_Tk)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_groups": 3}, "n_group must divide"),
        ({"num_groups": 0}, "n_group must divide"),
        ({"top_k_groups": 5}, "topk_group must be"),
        ({"top_k_groups": 0}, "topk_group must be"),
        ({"num_groups": 8, "top_k_groups": 4}, "two best"),
        ({"top_k": 5}, "cannot give a token 5"),
        ({"top_k": 0}, "cannot give a token 0"),
        ({"num_experts": 12}, "not (8, 8)"),
    ],
)
def test_a_gate_that_cannot_work_is_refused_when_it_is_made(wrong: dict[str, int], words: str):
    with pytest.raises(TargetIncomplete) as refused:
        Gate(torch.eye(8), torch.zeros(8), replace(SMALL, **wrong), Numerics())
    assert words in str(refused.value)


def shape_of(bias: Tensor) -> None:
    with pytest.raises(TargetIncomplete, match="a bias"):
        Gate(torch.eye(8), bias, SMALL, Numerics())


def test_a_bias_of_another_shape_is_refused():
    shape_of(torch.zeros(7))
    shape_of(torch.zeros(8, 1))
