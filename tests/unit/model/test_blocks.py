"""Norm, rotation, trunk and module against the plain reference in `oracle.py`."""

from __future__ import annotations

import pytest
import torch

from seqmtp_serve import oracle
from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.layers import RmsNorm, block_weights
from seqmtp_serve.model.llama import LlamaTrunk
from seqmtp_serve.model.mtp import DepthPool, MtpModule, _embedding_first
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import int8_levels
from seqmtp_serve.model.rope import fused_rotation, interleave_pairs, rotate_, rotate_rows_, rotations
from seqmtp_serve.model.rotate import random_rotation, rotated_block, rotated_head
from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors

PAGE, MAX_LEN = 8, 64
FP32 = Numerics()
PREFIX = f"model.layers.{TINY.num_layers}."


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(TINY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.covers(16)
def test_rms_norm_by_hand() -> None:
    norm = RmsNorm(torch.ones(2), 1e-12)
    assert torch.allclose(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.848528, 1.131371]]))
    assert torch.allclose(norm(torch.tensor([[300.0, 400.0]])), torch.tensor([[0.848528, 1.131371]]))
    one_plus = RmsNorm(torch.tensor([1.0, -0.5]), 1e-12, plus_one=True)
    assert torch.allclose(one_plus(torch.tensor([[3.0, 4.0]])), torch.tensor([[1.697056, 0.565685]]))


def test_rms_norm_honours_eps() -> None:
    x = torch.full((1, 4), 1e-3)
    expected = x / torch.sqrt(x.pow(2).mean() + 1e-5)
    assert torch.allclose(RmsNorm(torch.ones(4), 1e-5)(x), expected)


@pytest.mark.covers(117)
def test_complex_rotation_gives_the_scores_of_rotate_half() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_q, weight_k = torch.randn(2, 16, 12, generator=generator).unbind(0)
    x = torch.randn(6, 12, generator=generator)
    positions = torch.tensor([0, 1, 5, 17, 40, 63])
    config = TINY  # head_dim 8: two heads
    plain_q, plain_k = (
        oracle.rotate_half((x @ weight.T).unflatten(1, (2, 8)).transpose(0, 1), positions, config)
        for weight in (weight_q, weight_k)
    )
    table = rotations(8, config.rope_theta, MAX_LEN)[positions].unsqueeze(1)
    fast_q, fast_k = ((x @ interleave_pairs(weight, 8).T).view(6, 2, 8) for weight in (weight_q, weight_k))
    rotate_(fast_q, table)
    rotate_(fast_k, table)
    fast = torch.einsum("thd,shd->hts", fast_q, fast_k)
    assert torch.allclose(fast, plain_q @ plain_k.transpose(1, 2), atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_rotating_whole_rows_has_the_bits_of_rotating_heads(num_rows: int) -> None:
    rows = torch.randn(num_rows, 15 * 64, generator=torch.Generator().manual_seed(0))
    plain, kept = rows.clone().view(num_rows, 15, 64), rows[:, 12 * 64 :].clone()
    table = rotations(64, 10_000.0, 99)[99 - num_rows :].unsqueeze(1)
    rotate_(plain[:, :12], table)
    rotate_rows_(rows, fused_rotation(table, 12, 3))
    assert torch.equal(rows, plain.flatten(1))
    assert torch.equal(rows[:, 12 * 64 :], kept)


@pytest.mark.parametrize("cuts", [[30], [7, 1, 1, 4, 16, 1]], ids=str)
def test_the_trunk_is_the_reference(cuts: list[int]) -> None:
    tensors, ids = target_tensors(), prompt(30)
    trunk = LlamaTrunk(tensors, TINY, PAGE, MAX_LEN, FP32)
    pool = torch.zeros(TINY.num_layers, 8 * PAGE, 2 * TINY.kv_size)
    rows, start = [], 0
    for num_rows in cuts:
        span = Span(pages=[5, 1, 2, 7], start=start, num_rows=num_rows)
        rows.append(trunk.forward(ids[start : start + num_rows], [span], pool))
        start += num_rows
    logits, hidden = oracle.forward(tensors, TINY, ids)
    assert torch.allclose(trunk.features(torch.cat(rows)), hidden, atol=1e-4)
    assert torch.allclose(trunk.logits(torch.cat(rows)), logits, atol=1e-3)


def test_rotation_is_the_same_model_in_another_basis() -> None:
    tensors, ids = target_tensors(), prompt(30)
    rotation = random_rotation(TINY.hidden_size)
    assert torch.allclose(rotation @ rotation.T, torch.eye(TINY.hidden_size), atol=1e-6)
    rotated = {
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"] @ rotation,
        "model.norm.weight": torch.ones(TINY.hidden_size),
        "lm_head.weight": rotated_head(tensors["lm_head.weight"], tensors["model.norm.weight"], rotation),
    }
    for layer in range(TINY.num_layers):
        block = rotated_block(block_weights(tensors, f"model.layers.{layer}."), TINY, rotation)
        rotated |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in block.items()}
    logits, hidden = oracle.forward(tensors, TINY, ids)
    found_logits, found_hidden = oracle.forward(rotated, TINY, ids)
    assert torch.allclose(found_hidden @ rotation.T, hidden, atol=1e-4)
    assert torch.allclose(found_logits, logits, atol=1e-3)


def test_int8_is_near_the_reference() -> None:
    """A channel a hundred times the others, as trained models have them, must not drown the rest: in the model's own
    basis the errors are 1.6 % and 1.5 %, rotated 1.0 % and 0.9 %."""
    levels = int8_levels()
    tensors, ids = target_tensors(), prompt(30)
    tensors["model.embed_tokens.weight"][:, 3] *= 100.0
    trunk = LlamaTrunk(tensors, TINY, PAGE, MAX_LEN, Numerics(int8_levels=levels))
    pool = torch.zeros(TINY.num_layers, 8 * PAGE, 2 * TINY.kv_size)
    state = trunk.forward(ids, [Span(pages=[0, 1, 2, 3], start=0, num_rows=30)], pool)
    logits, hidden = oracle.forward(tensors, TINY, ids)
    others = torch.arange(TINY.hidden_size) != 3
    error = (trunk.features(state) - hidden)[:, others].norm() / hidden[:, others].norm()
    assert float(error) < 0.0125 * 127 / levels
    assert float((trunk.logits(state) - logits).norm() / logits.norm()) < 0.011 * 127 / levels


def module_rows(
    tensors: dict[str, torch.Tensor], mtp: MtpConfig, hidden: torch.Tensor, next_ids: list[int]
) -> torch.Tensor:
    module = MtpModule(tensors, TINY, mtp, PAGE, MAX_LEN, FP32)
    pool = DepthPool(depth=1, rows_SE=torch.zeros(8 * PAGE, TINY.cache_row_size))
    bases = torch.arange(len(next_ids))
    span = Span(pages=[0, 1, 2, 3], start=1, num_rows=len(next_ids), first_slot=1)
    return module.forward(module.fed(hidden), torch.tensor(next_ids), bases, [span], pool)


@pytest.mark.covers(15, 18, 19)
def test_the_module_is_the_reference() -> None:
    target = target_tensors()
    tensors, ids = mtp_tensors(target), prompt(20)
    _, hidden = oracle.forward(target, TINY, ids)
    expected = oracle.mtp_rows(tensors, TINY, MtpConfig(), hidden[:-1], ids[1:])
    assert torch.allclose(module_rows(tensors, MtpConfig(), hidden[:-1], ids[1:]), expected, atol=1e-4)


@pytest.mark.covers(57, 58, 59, 60)
def test_either_fusion_order_gives_the_same_states() -> None:
    target = target_tensors()
    tensors, ids = mtp_tensors(target), prompt(20)
    _, hidden = oracle.forward(target, TINY, ids)
    name, size = f"{PREFIX}eh_proj.weight", TINY.hidden_size
    swapped = tensors | {name: torch.cat((tensors[name][:, size:], tensors[name][:, :size]), 1)}
    eh = module_rows(tensors, MtpConfig(fusion_order="eh"), hidden[:-1], ids[1:])
    he = module_rows(swapped, MtpConfig(fusion_order="he"), hidden[:-1], ids[1:])
    wrong = module_rows(swapped, MtpConfig(fusion_order="eh"), hidden[:-1], ids[1:])
    assert torch.equal(eh, he)
    assert not torch.allclose(wrong, eh, atol=0.1)


@pytest.mark.covers(20, 58)
def test_a_fusion_weight_must_say_its_order_and_fit() -> None:
    for order in ("", "EH", "None"):
        with pytest.raises(MtpIncomplete, match="declare the fusion order"):
            _embedding_first(torch.zeros(2, 4), order)
    with pytest.raises(MtpIncomplete, match=r"\[d, 2d\]"):
        _embedding_first(torch.zeros(2, 3), "eh")


@pytest.mark.covers(64, 113, 135)
def test_hidden_contracts_are_applied_once_each() -> None:
    target = target_tensors()
    tensors = mtp_tensors(target) | {f"{PREFIX}shared_head.norm.weight": torch.linspace(0.5, 2.0, TINY.hidden_size)}
    x = torch.randn(3, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    main = oracle.rms_norm(x, tensors["model.norm.weight"], TINY)
    own = oracle.rms_norm(x, tensors[f"{PREFIX}shared_head.norm.weight"], TINY)
    head = tensors["lm_head.weight"]

    def module(**fields: object) -> MtpModule:
        return MtpModule(tensors, TINY, MtpConfig(**fields), PAGE, MAX_LEN, FP32)  # type: ignore[arg-type]

    pre = module()
    assert pre.fed(x) is x
    assert pre.recycled(x) is x
    assert torch.allclose(pre.draft_logits(x), main @ head.T, atol=1e-4)
    post = module(fed_hidden="post", recycled_hidden="post", final_norm_owner="mtp")
    assert torch.allclose(post.fed(x), main, atol=1e-5)
    assert torch.allclose(post.recycled(x), own, atol=1e-5)
    assert torch.allclose(post.draft_logits(x), own @ head.T, atol=1e-4)
    assert torch.allclose(module(final_norm_owner="none").draft_logits(x), x @ head.T, atol=1e-4)


@pytest.mark.covers(64)
def test_position_zero_may_be_declared_blind() -> None:
    target = target_tensors()
    tensors, ids = mtp_tensors(target), prompt(6)
    _, hidden = oracle.forward(target, TINY, ids)
    other = [(ids[1] + 1) % TINY.vocab_size, *ids[2:]]
    seeing = [module_rows(tensors, MtpConfig(), hidden[:-1], each)[0] for each in (ids[1:], other)]
    blind = [module_rows(tensors, MtpConfig(zero_position0=True), hidden[:-1], each)[0] for each in (ids[1:], other)]
    assert not torch.equal(*seeing)
    assert torch.equal(*blind)
