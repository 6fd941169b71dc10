"""Whose loss reaches whose parameters: one shared head, a chain of modules, a trunk that can be cut off."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3
from torch import Tensor

from seqmtp_serve.training.joint_terms import Taps, joint_terms
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import ObjectiveContract, counts_of, objective
from seqmtp_serve.training.packing import compile_stream, pack
from seqmtp_serve.training.ranks import Alone
from seqmtp_serve.training.v3.model import V3Model

CONTRACT = ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3),)))
DETACHED = replace(CONTRACT, detach_trunk=True)
WEIGHT = 0.3
Gradients = dict[str, Tensor]


def model_of(depths: int) -> V3Model:
    """In evaluation mode: routing is the same, and no load is counted."""
    return tiny_v3(depths).eval()


def gradients(
    model: V3Model,
    depths: int,
    *,
    contract: ObjectiveContract = CONTRACT,
    main: float = 1.0,
    keep: Sequence[float] | None = None,
    taps: Taps | None = None,
) -> Gradients:
    """Gradient by name of main * L_main + (λ/D) Σ keep_k L_k; zeros where none arrived."""
    stream = compile_stream(pack(random_documents([9, 6])), depths)
    totals = counts_of([stream], Alone())
    main_term, terms = joint_terms(model, stream, contract, taps)
    terms = [replace(t, nll_sum=t.nll_sum * k) for t, k in zip(terms, keep or [1.0] * depths, strict=True)]
    main_term = replace(main_term, nll_sum=main_term.nll_sum * main)
    model.zero_grad(set_to_none=True)
    objective(main_term, terms, totals, contract, WEIGHT).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=True)
    }


def is_trunk(name: str) -> bool:
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) < CONFIG.num_layers
    return False


def of_module(found: Gradients, depth: int) -> Gradients:
    prefix = f"model.layers.{CONFIG.num_layers + depth - 1}."
    return {name: gradient for name, gradient in found.items() if name.startswith(prefix)}


def same(left: Gradients, right: Gradients) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.covers(46, 98, 144)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_shared_gradient_is_the_sum_of_all_its_losses_once(name: str) -> None:
    model = model_of(2)
    whole = gradients(model, 2)[name]
    main = gradients(model, 2, keep=[0.0, 0.0])[name]
    parts = [gradients(model, 2, main=0.0, keep=keep)[name] for keep in ([1.0, 0.0], [0.0, 1.0])]
    assert all(part.abs().sum() > 0 for part in (main, *parts))
    torch.testing.assert_close(whole, main + parts[0] + parts[1], rtol=1e-4, atol=1e-6)
    unweighted = gradients(model, 2, main=0.0, keep=[2 / WEIGHT, 0.0])[name]  # undo λ/D
    torch.testing.assert_close(parts[0], unweighted * (WEIGHT / 2), rtol=1e-4, atol=1e-6)


@pytest.mark.covers(46, 120, 144)
def test_a_module_gets_its_own_loss_and_all_deeper_ones() -> None:
    model = model_of(2)
    whole, without_two, without_one = (gradients(model, 2, keep=keep) for keep in ([1, 1], [1, 0], [0, 1]))
    assert not same(of_module(whole, 1), of_module(without_two, 1))
    assert same(of_module(whole, 2), of_module(without_one, 2))
    assert all(gradient.abs().sum() == 0 for gradient in of_module(without_two, 2).values())
    only_two = gradients(model, 2, main=0.0, keep=[0, 1])
    assert of_module(only_two, 1)["model.layers.2.eh_proj.weight"].abs().sum() > 0


@pytest.mark.covers(46, 51, 120, 144, 145)
def test_detaching_cuts_the_trunk_and_nothing_else() -> None:
    model = model_of(2)
    main_only, attached, detached = (
        gradients(model, 2, keep=[0.0, 0.0]),
        gradients(model, 2),
        gradients(model, 2, contract=DETACHED),
    )
    trunk = [name for name in main_only if is_trunk(name)]
    assert all(torch.equal(detached[name], main_only[name]) for name in trunk)
    assert any(not torch.equal(attached[name], main_only[name]) for name in trunk)
    for shared in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not torch.equal(detached[shared], main_only[shared])
    assert same(of_module(attached, 2), of_module(detached, 2))


@pytest.mark.covers(108, 120)
def test_taps_show_the_mtp_part_of_a_shared_gradient() -> None:
    model, taps = model_of(2), Taps()
    whole = gradients(model, 2, taps=taps)
    mtp_only = gradients(model, 2, main=0.0)
    torch.testing.assert_close(taps.gradients["head"], mtp_only["lm_head.weight"], rtol=1e-4, atol=1e-7)
    main_only = gradients(model, 2, keep=[0.0, 0.0])
    rest = whole["model.embed_tokens.weight"] - taps.gradients["embedding"]
    assert taps.squares["trunk"] > 0
    detached = Taps()
    fully = gradients(model, 2, contract=DETACHED, taps=detached)["model.embed_tokens.weight"]
    assert "trunk" not in detached.squares
    torch.testing.assert_close(fully - detached.gradients["embedding"], main_only["model.embed_tokens.weight"])
    assert not torch.allclose(rest, main_only["model.embed_tokens.weight"])  # attached: also through h^0


@pytest.mark.covers(98, 159)
def test_the_graph_of_two_depths() -> None:
    """Edges of the D = 2 graph, by perturbing one node and seeing which others move."""
    model = model_of(2)
    stream = compile_stream(pack(random_documents([7])), 2)
    one, two = stream.depths
    with torch.no_grad():
        h0 = model.main_states(stream.main)
        h1 = model.mtp_states(1, h0, one)
        h2 = model.mtp_states(2, h1, two)
        moved_h1 = model.mtp_states(1, h0 + 0.1, one)
        assert not torch.equal(moved_h1, h1)  # h0 -> h1
        assert not torch.equal(model.mtp_states(2, moved_h1, two), h2)  # h1 -> h2, and h0 -> h2 only through it
        bigger = copy.deepcopy(model)
        bigger.lm_head.weight.mul_(2)
        assert torch.equal(bigger.mtp_states(2, h1, two), h2)  # the head is a leaf of the chain
        assert not torch.equal(bigger.logits(h2, 2), model.logits(h2, 2))  # and is the same one at every depth
        assert not torch.equal(bigger.logits(h0), model.logits(h0))
        last = stream.main.tokens_N.clone()
        last[-1] = (last[-1] + 1) % CONFIG.vocab_size
        changed = replace(stream.main, tokens_N=last)
        assert torch.equal(model.main_states(changed)[:-1], h0[:-1])  # the trunk never reads a shifted token


@pytest.mark.covers(20, 98)
def test_fusion_shapes_and_parameters() -> None:
    model = model_of(2)
    d = CONFIG.hidden_size
    for depth in (1, 2):
        layer = model.mtp_layer(depth)
        assert layer.eh_proj.weight.shape == (d, 2 * d)
        assert layer.eh_proj.weight.numel() == 2 * d * d
        assert layer.enorm.weight.shape == layer.hnorm.weight.shape == (d,)
        assert layer.fused(torch.randn(3, d), torch.randn(3, d)).shape == (3, d)
    assert 2 * 7168 * 7168 == 102_760_448


@pytest.mark.covers(163)
def test_a_module_is_testable_alone() -> None:
    """One depth's loss reaches exactly: its module, what it shares, and (through h^0) the trunk."""
    model = model_of(1)
    stream = compile_stream(pack(random_documents([6])), 1)
    state = torch.randn(6, CONFIG.hidden_size, requires_grad=True)
    out = model.logits(model.mtp_states(1, state, stream.depths[0]), 1)
    out.sum().backward()
    assert state.grad is not None
    assert state.grad[:5].abs().sum() > 0
    assert torch.equal(state.grad[5], torch.zeros(CONFIG.hidden_size))  # the last state has no next token
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert not any(is_trunk(name) for name in touched)
    assert {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"} <= touched
