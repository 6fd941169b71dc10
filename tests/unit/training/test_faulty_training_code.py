"""Faults seen in published MTP code, rebuilt small: each is caught by a check that right code passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from tiny_v3 import CONFIG, random_documents, tiny_v3
from torch import Tensor

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.speculation.select_one import OneSelection, select_mtp_one
from seqmtp_serve.training.packing import main_tensors, mtp_tensors, pack
from seqmtp_serve.training.rows import compile_mtp_rows
from seqmtp_serve.training.v3 import attention
from seqmtp_serve.training.v3.block import MtpLayer
from seqmtp_serve.training.v3.products import normalised

D = CONFIG.hidden_size


def gains_are_linear(fuse: Callable[[Tensor, Tensor, Tensor], Tensor]) -> bool:
    """The projection is the last step: twice the matrix, twice the result. A norm after it would undo the factor."""
    torch.manual_seed(0)
    weight, hidden, embedded = torch.randn(D, 2 * D), torch.randn(4, D), torch.randn(4, D)
    return torch.allclose(fuse(2 * weight, hidden, embedded), 2 * fuse(weight, hidden, embedded), rtol=1e-4, atol=1e-5)


def fused(weight: Tensor, hidden: Tensor, embedded: Tensor) -> Tensor:
    layer = tiny_v3(1).mtp_layer(1)
    with torch.no_grad():
        layer.eh_proj.weight.copy_(weight)
        return layer.fused(hidden, embedded)


def fused_then_normed(weight: Tensor, hidden: Tensor, embedded: Tensor) -> Tensor:
    return normalised(fused(weight, hidden, embedded), torch.ones(D), 1e-6)


@pytest.mark.covers(16, 18, 167)
def test_a_norm_after_the_fusion_is_caught() -> None:
    assert gains_are_linear(fused)
    assert not gains_are_linear(fused_then_normed)
    own = {name for name, _ in tiny_v3(1).mtp_layer(1).named_parameters() if "norm" in name.split(".")[0]}
    assert own == {"input_layernorm.weight", "post_attention_layernorm.weight", "enorm.weight", "hnorm.weight"}


@pytest.mark.covers(15, 16, 18, 112, 113)
@pytest.mark.parametrize("order", ["eh", "he"])
def test_the_fusion_is_the_equation(order: Literal["eh", "he"]) -> None:
    """By hand, with unequal gains and an asymmetric matrix; the other order of the same matrix differs."""
    torch.manual_seed(1)
    layer = tiny_v3(1, mtp=MtpConfig(fusion_order=order)).mtp_layer(1)
    hidden, embedded = torch.randn(3, D), torch.randn(3, D)
    h = normalised(hidden, layer.hnorm.weight, CONFIG.rms_eps)
    e = normalised(embedded, layer.enorm.weight, CONFIG.rms_eps)
    parts = (e, h) if order == "eh" else (h, e)
    torch.testing.assert_close(layer.fused(hidden, embedded), torch.cat(parts, -1) @ layer.eh_proj.weight.T)
    swapped = torch.cat(parts[::-1], -1) @ layer.eh_proj.weight.T
    assert not torch.allclose(layer.fused(hidden, embedded), swapped, atol=1e-2)


def moves_an_earlier_row() -> bool:
    """Whether changing the last token changes the first row of the module."""
    model = tiny_v3(1).eval()
    document = random_documents([6])[0]
    states = []
    for last in (1, 2):
        stream = pack([[*document[:-1], last]])
        main = main_tensors(stream)
        rows = mtp_tensors(stream, 1, main.bases)
        with torch.no_grad():
            h0 = torch.ones(6, D)  # the same trunk state: what is left is the module's own attention
            states.append(model.mtp_states(1, h0, rows)[0])
    return not torch.allclose(states[0], states[1], atol=1e-6)


@pytest.mark.covers(17, 22, 167)
def test_an_encoder_in_place_of_the_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not moves_an_earlier_row()
    plain = F.scaled_dot_product_attention

    def seeing_everything(q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
        return plain(q, k, v, scale=kwargs["scale"])  # type: ignore[arg-type]

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", seeing_everything)
    assert moves_an_earlier_row()


@pytest.mark.covers(17)
def test_the_module_has_the_structure_of_a_main_layer() -> None:
    """The same parameters as the last main layer, with routed experts: not a dense stand-in."""
    model = tiny_v3(1)
    main = {name: p.shape for name, p in model.model.layers[CONFIG.num_layers - 1].named_parameters()}
    module = {name: p.shape for name, p in model.mtp_layer(1).named_parameters()}
    assert main.items() <= module.items()
    extra = {name.split(".")[0] for name in module.keys() - main.keys()}
    assert extra == {"enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head"}
    assert any(name.startswith("mlp.experts.") for name in main)
    assert isinstance(model.mtp_layer(1), MtpLayer)


def asked_for(labels: Callable[[Sequence[int]], Sequence[int]]) -> list[tuple[int, int]]:
    """(token the row reads, token it is asked for) of depth one on x0..x5."""
    tokens = list(range(6))
    rows = compile_mtp_rows(tokens, [0] * 6, [True] * 6, 1, list(range(6)))
    read = [row.shifted_token_index for row in rows]
    return list(zip(read, labels(tokens), strict=False))


@pytest.mark.covers(24, 111, 167)
def test_a_second_shift_of_the_labels_is_caught() -> None:
    """Targets that are shifted already, shifted again as if they were tokens: the label is two past the input."""

    def compiled(tokens: Sequence[int]) -> list[int]:
        stream = pack([list(tokens)])
        return mtp_tensors(stream, 1, main_tensors(stream).bases).labels_M.tolist()

    def shifted_twice(tokens: Sequence[int]) -> list[int]:
        targets = list(tokens[1:])  # the caller's targets are x1..x5
        return targets[2:]  # "t_{i+2}" of a list that begins at x1

    right, wrong = asked_for(compiled), asked_for(shifted_twice)
    assert all(label == read + 1 for read, label in right)
    assert len(right) == 4
    assert not all(label == read + 1 for read, label in wrong)
    assert {label - read for read, label in wrong} == {2}


P, Q, BONUS = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2), (0.0, 0.0, 1.0)


def marginal(select: Callable[[int, float, Callable[[Sequence[float]], int]], OneSelection]) -> list[float]:
    """The distribution of the round's first token, enumerated: over drafts, a fine grid of u, and corrections."""
    grid = 1000
    mass = [0.0, 0.0, 0.0]
    for draft, drawn in enumerate(Q):
        for step in range(grid):
            share = drawn / grid
            seen: list[Sequence[float]] = []

            def note(distribution: Sequence[float], seen: list[Sequence[float]] = seen) -> int:
                seen.append(distribution)
                return 0

            if select(draft, (step + 0.5) / grid, note).accepted:
                mass[draft] += share
            else:
                mass = [m + share * r for m, r in zip(mass, seen[0], strict=True)]
    return mass


@pytest.mark.covers(71, 167)
def test_simulated_acceptance_is_caught() -> None:
    """`accepted = True` emits the draft's distribution, not the target's."""

    def exact(draft: int, u: float, sample: Callable[[Sequence[float]], int]) -> OneSelection:
        return select_mtp_one(P, Q, draft, BONUS, u, sample, remaining=5)

    def always(draft: int, u: float, sample: Callable[[Sequence[float]], int]) -> OneSelection:
        return OneSelection(accepted=True, new_tokens=(draft, 2), keep_rows=2, pending=2, stopped=False)

    assert marginal(exact) == pytest.approx(P, abs=2e-3)
    assert marginal(always) == pytest.approx(Q, abs=1e-9)


@pytest.mark.covers(91, 167)
def test_the_targets_latent_is_not_the_modules() -> None:
    """ "Shares the same KV projection" fails: the cached latent of equal inputs differs between layers."""
    model = tiny_v3(1)
    x = torch.randn(4, D)
    latents = [layer.self_attn.kv_a_proj_with_mqa(x) for layer in model.model.layers[-2:]]
    assert not torch.allclose(latents[0], latents[1], atol=1e-2)
