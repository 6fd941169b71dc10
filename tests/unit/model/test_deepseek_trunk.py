"""The DeepSeek-V3 trunk against the plain reference in float64, its bits, and a rank that has no rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmtp_serve import oracle
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.deepseek import DeepseekTrunk, ExpertShare
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.dispatch import LocalDispatcher
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import int8_levels
from seqmtp_serve.model.synthetic import TINY_V3, target_tensors

PAGE, MAX_LEN, LEN = 8, 64, 45
VARIANTS = {
    "released layout": TINY_V3,
    "no query latent": replace(TINY_V3, q_lora_rank=0),
    "no YaRN": replace(TINY_V3, yarn=None),
    "all dense": replace(TINY_V3, num_dense_layers=3),
    "no shared expert": replace(TINY_V3, moe=replace(TINY_V3.moe, num_shared=0)),
    "weights not normalised": replace(TINY_V3, moe=replace(TINY_V3.moe, normalise_weights=False)),
    "large eps": replace(TINY_V3, rms_eps=1e-2),
}


def prompt(length: int = LEN, seed: int = 0) -> list[int]:
    return torch.randint(TINY_V3.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(trunk: DeepseekTrunk, config: DeepseekConfig, ids: list[int], cuts: list[int]) -> Tensor:
    pool = torch.zeros(config.num_layers, 8 * PAGE, config.cache_row_size)
    rows, start = [], 0
    for num_rows in cuts:
        span = Span(pages=[5, 1, 2, 7, 0, 3], start=start, num_rows=num_rows)
        rows.append(trunk.forward(ids[start : start + num_rows], [span], pool))
        start += num_rows
    return torch.cat(rows)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("numerics", [Numerics(), Numerics(invariant=False)], ids=["invariant", "fast"])
@pytest.mark.parametrize("cuts", [[LEN], [7, 1, 1, 4, 30, 2]], ids=str)
def test_the_trunk_is_the_reference(config: DeepseekConfig, numerics: Numerics, cuts: list[int]) -> None:
    tensors, ids = target_tensors(config), prompt()
    trunk = DeepseekTrunk(tensors, config, PAGE, MAX_LEN, numerics)
    state = run(trunk, config, ids, cuts)
    logits, hidden = oracle.forward(tensors, config, ids, torch.float64)
    assert torch.allclose(trunk.features(state).double(), hidden, atol=5e-5)
    assert torch.allclose(trunk.logits(state).double(), logits, atol=5e-4)


def test_a_tied_head_is_the_embedding() -> None:
    config = replace(TINY_V3, tie_word_embeddings=True)
    tensors, ids = target_tensors(TINY_V3), prompt()
    del tensors["lm_head.weight"]
    state = run(DeepseekTrunk(tensors, config, PAGE, MAX_LEN, Numerics()), config, ids, [LEN])
    expected = oracle.rms_norm(state, tensors["model.norm.weight"], config) @ tensors["model.embed_tokens.weight"].T
    trunk = DeepseekTrunk(tensors, config, PAGE, MAX_LEN, Numerics())
    assert torch.allclose(trunk.logits(state), expected, atol=1e-3)


@pytest.mark.parametrize("cuts", [[1] * LEN, [2] * 22 + [1], [4] * 11 + [1], [16, 16, 13]], ids=str)
@pytest.mark.parametrize("fixed_tiles", [False, True], ids=["tiles", "fixed tiles"])
def test_cutting_the_prompt_changes_no_bit(cuts: list[int], fixed_tiles: bool) -> None:
    trunk = DeepseekTrunk(target_tensors(TINY_V3), TINY_V3, PAGE, MAX_LEN, Numerics(fixed_tiles=fixed_tiles))
    whole, pieces = (run(trunk, TINY_V3, prompt(), each) for each in ([LEN], cuts))
    assert torch.equal(pieces, whole)
    assert torch.equal(torch.cat([trunk.logits(row) for row in whole.split(3)]), trunk.logits(whole))


def test_int8_weights_are_near_the_reference() -> None:
    """Rounded weights move a row by 1.3 % here, with experts or without; a row whose expert choice flips, by more."""
    for config in (TINY_V3, VARIANTS["all dense"]):
        tensors, ids = target_tensors(config), prompt()
        trunk = DeepseekTrunk(tensors, config, PAGE, MAX_LEN, Numerics(int8_levels=int8_levels()))
        state = run(trunk, config, ids, [LEN])
        _, hidden = oracle.forward(tensors, config, ids)
        errors = (state - hidden).norm(dim=-1) / hidden.norm(dim=-1)
        assert float(errors.median()) < 0.02


@pytest.mark.covers(19, 113)
def test_the_final_norm_is_applied_once() -> None:
    """On the logits' side only: the state is residual-completed and not normalised."""
    tensors, ids = target_tensors(TINY_V3), prompt()
    trunk = DeepseekTrunk(tensors, TINY_V3, PAGE, MAX_LEN, Numerics())
    state = run(trunk, TINY_V3, ids, [LEN])
    normed = oracle.rms_norm(state, tensors["model.norm.weight"], TINY_V3)
    right = trunk.logits(state)
    assert torch.allclose(right, normed @ tensors["lm_head.weight"].T, atol=1e-4)
    assert not torch.allclose(right, state @ tensors["lm_head.weight"].T, atol=1e-1), "no norm must show"
    assert not torch.allclose(right, trunk.logits(normed), atol=1e-2), "two norms must show"


@pytest.mark.covers(122)
def test_one_layer_fewer_shows() -> None:
    tensors, ids = target_tensors(TINY_V3), prompt()
    short = replace(TINY_V3, num_layers=2)
    whole = run(DeepseekTrunk(tensors, TINY_V3, PAGE, MAX_LEN, Numerics()), TINY_V3, ids, [LEN])
    cut = run(DeepseekTrunk(tensors, short, PAGE, MAX_LEN, Numerics()), short, ids, [LEN])
    assert not torch.allclose(whole, cut, atol=1e-1)


def test_a_rank_without_rows_runs_its_experts_and_nothing_else() -> None:
    dispatcher = LocalDispatcher()
    trunk = DeepseekTrunk(
        target_tensors(TINY_V3), TINY_V3, PAGE, MAX_LEN, Numerics(), ExpertShare(dispatcher=dispatcher)
    )
    pool = torch.full((TINY_V3.num_layers, 8 * PAGE, TINY_V3.cache_row_size), 7.0)
    state = trunk.forward([], [], pool)
    assert state.shape == (0, TINY_V3.hidden_size)
    assert bool((pool == 7.0).all())
    assert dispatcher.tally.num_passes == TINY_V3.num_layers - TINY_V3.num_dense_layers
