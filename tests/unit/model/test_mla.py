"""Latent attention: the two forms against each other, the paged one against both, and its bits against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmtp_serve import oracle_latent
from seqmtp_serve.model.attention import Span, attend_cached, plan_attention
from seqmtp_serve.model.backends.latent_torch import LatentHeads
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.layers import block_weights
from seqmtp_serve.model.mla import LatentAttention, LatentKernels, naive_rows, plan_mla
from seqmtp_serve.model.mla_forms import UpProjections, attend_absorbed, attend_naive
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import attention_rows_agree, per_head_rows_agree
from seqmtp_serve.model.rope import rotation_table
from seqmtp_serve.model.synthetic import TINY_V3, target_tensors
from seqmtp_serve.model.yarn import inverse_frequencies, rotation_multiplier, softmax_scale

PAGE, LEN = 16, 75  # five pages, the last one partly filled
V3_HEADS = replace(
    TINY_V3, hidden_size=96, num_heads=2, q_lora_rank=48, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64,
    v_head_dim=128, num_layers=1,
)  # fmt: skip
WHOLE_QUERY = replace(TINY_V3, q_lora_rank=0, num_layers=1)
CONFIGS = {"tiny": TINY_V3, "V3 head sizes": V3_HEADS, "no query latent": WHOLE_QUERY}
AGREE = per_head_rows_agree(576) and attention_rows_agree(PAGE, 576) and attention_rows_agree(PAGE, 20)
NUMERICS = Numerics(fixed_tiles=not AGREE)
PREFIX = "model.layers.0."


def inputs(config: DeepseekConfig, num_rows: int = LEN, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def attention(config: DeepseekConfig, numerics: Numerics) -> tuple[LatentAttention, Tensor]:
    weights = block_weights(target_tensors(config), PREFIX)
    frequency = inverse_frequencies(config.rope_head_dim, config.rope_theta, config.yarn)
    return LatentAttention(weights, config, LatentKernels.choose(config, PAGE, numerics), numerics), rotation_table(
        frequency, 128, rotation_multiplier(config.yarn)
    )


def run(
    config: DeepseekConfig,
    x: Tensor,
    cuts: list[int],
    *,
    numerics: Numerics = NUMERICS,
    pages: list[int] | None = None,
    first_slot: int = 0,
) -> Tensor:
    """Attend the rows of one sequence in pieces of `cuts` rows, over a pool full of old values."""
    attend, table = attention(config, numerics)
    pool = torch.randn(16 * PAGE, config.latent_size, generator=torch.Generator().manual_seed(9))
    outputs, start = [], 0
    for num_rows in cuts:
        span = Span(pages=pages or list(range(3, 9)), start=start, num_rows=num_rows, first_slot=first_slot)
        shared = plan_mla(
            [span], torch.arange(start, start + num_rows), table, LatentKernels.choose(config, PAGE, numerics)
        )
        outputs.append(attend(x[start : start + num_rows].clone(), pool, shared))
        start += num_rows
    return torch.cat(outputs)


def plain(config: DeepseekConfig, x: Tensor) -> Tensor:
    """The reference, in float64."""
    return oracle_latent.latent_attention(
        target_tensors(config), PREFIX, config, x.double(), torch.arange(len(x))
    ).float()


def forms(config: DeepseekConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    heads, nope, rope = config.num_heads, config.nope_head_dim, config.rope_head_dim
    kv_b = draw(heads * (nope + config.v_head_dim), config.kv_lora_rank) / config.kv_lora_rank**0.5
    up = UpProjections.split(kv_b, heads, nope)
    seen = torch.ones(9, 30, dtype=torch.bool).tril(21)
    given = (draw(9, heads, nope), draw(9, heads, rope), draw(30, config.latent_size), up, softmax_scale(config), seen)
    return attend_naive(*given), attend_absorbed(*given)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_the_two_forms_are_one_function(config: DeepseekConfig, dtype: torch.dtype, tolerance: float) -> None:
    naive, absorbed = forms(config, dtype)
    assert float((naive - absorbed).abs().max()) < tolerance
    assert float(naive.abs().max()) > 0.1


@pytest.mark.covers(16, 22)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "numerics",
    [Numerics(), Numerics(fixed_tiles=True), Numerics(invariant=False)],
    ids=["invariant", "fixed tiles", "fast"],
)
@pytest.mark.parametrize("cuts", [[LEN], [40, 1, 30, 4]], ids=str)
def test_it_is_latent_attention(config: DeepseekConfig, numerics: Numerics, cuts: list[int]) -> None:
    x = inputs(config)
    assert torch.allclose(run(config, x, cuts, numerics=numerics), plain(config, x), atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "cuts", [[1] * LEN, [2] * 37 + [1], [4] * 18 + [3], [8] * 9 + [3], [16] * 4 + [11], [31, 33, 11]], ids=str
)
@pytest.mark.parametrize("fixed_tiles", [not AGREE, True], ids=["as probed", "fixed"])
def test_cutting_the_rows_changes_no_bit(config: DeepseekConfig, cuts: list[int], fixed_tiles: bool) -> None:
    x, numerics = inputs(config), Numerics(fixed_tiles=fixed_tiles)
    assert torch.equal(run(config, x, cuts, numerics=numerics), run(config, x, [LEN], numerics=numerics))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pages_and_neighbours_change_no_bit(config: DeepseekConfig) -> None:
    x, other = inputs(config), inputs(config, 21, seed=5)
    alone = run(config, x, [LEN])
    assert torch.equal(run(config, x, [40, 35], pages=[7, 2, 11, 10, 15]), alone)
    attend, table = attention(config, NUMERICS)
    spans = [Span(pages=[9, 10], start=0, num_rows=21), Span(pages=list(range(8)), start=0, num_rows=LEN)]
    positions = torch.cat((torch.arange(21), torch.arange(LEN)))
    shared = plan_mla(spans, positions, table, LatentKernels.choose(config, PAGE, NUMERICS))
    both = attend(torch.cat((other, x)), torch.zeros(16 * PAGE, config.latent_size), shared)
    assert torch.equal(both[21:], alone)


@pytest.mark.parametrize("numerics", [NUMERICS, Numerics(invariant=False)], ids=["invariant", "fast"])
def test_rows_before_the_first_slot_do_not_exist(numerics: Numerics) -> None:
    x, first = inputs(TINY_V3), 21
    out = run(TINY_V3, x, [LEN], first_slot=first, numerics=numerics)
    alone = oracle_latent.latent_attention(
        target_tensors(TINY_V3), PREFIX, TINY_V3, x[first:].double(), torch.arange(first, LEN)
    )
    assert torch.allclose(out[first:], alone.float(), atol=1e-5)


def test_which_form_runs_is_declared() -> None:
    """Invariant numerics never choose by size; fast ones do, from where expanding pays."""
    assert naive_rows(replace(V3_HEADS, num_heads=128)) == 171
    assert naive_rows(TINY_V3) == 13
    assert naive_rows(replace(TINY_V3, nope_head_dim=16, v_head_dim=16)) > 10**9, "expanding saves nothing"
    spans = [Span(pages=[0], start=0, num_rows=12), Span(pages=[1, 2], start=3, num_rows=13)]
    _, table = attention(TINY_V3, NUMERICS)
    positions = torch.arange(25)
    invariant = plan_mla(spans, positions, table, LatentKernels.choose(TINY_V3, PAGE, Numerics()))
    assert invariant.naive == ()
    assert len(invariant.absorbed_rows_N) == 25
    fast = plan_mla(spans, positions, table, LatentKernels.choose(TINY_V3, PAGE, Numerics(invariant=False)))
    assert [span.rows for span in fast.naive] == [slice(12, 25)]
    assert fast.absorbed_rows_N.tolist() == list(range(12))


def test_a_fast_pass_mixes_both_forms() -> None:
    """A verify row beside a prefill chunk: each as it would be alone."""
    fast, config = Numerics(invariant=False), TINY_V3
    x, other = inputs(config), inputs(config, 40, seed=5)
    attend, table = attention(config, fast)
    pool = torch.zeros(16 * PAGE, config.latent_size)
    first = Span(pages=list(range(6)), start=0, num_rows=LEN - 1)
    attend(
        x[:-1].clone(), pool, plan_mla([first], torch.arange(LEN - 1), table, LatentKernels.choose(config, PAGE, fast))
    )
    spans = [Span(pages=list(range(6)), start=LEN - 1, num_rows=1), Span(pages=[8, 9, 10], start=0, num_rows=40)]
    positions = torch.cat((torch.tensor([LEN - 1]), torch.arange(40)))
    out = attend(
        torch.cat((x[-1:], other)), pool, plan_mla(spans, positions, table, LatentKernels.choose(config, PAGE, fast))
    )
    assert torch.allclose(out[:1], plain(config, x)[-1:], atol=1e-5)
    assert torch.allclose(out[1:], plain(config, other), atol=1e-5)


def test_a_token_costs_its_latent_and_one_key() -> None:
    released = replace(V3_HEADS, num_layers=61)
    assert released.cache_row_size == 576
    assert released.cache_row_size * 2 * released.num_layers == 70_272  # bytes a token in bf16


@pytest.mark.covers(136)
def test_a_forgotten_magnitude_shows() -> None:
    """Without m squared the scores are too flat, and nothing else tells."""
    flat = replace(TINY_V3, yarn=replace(TINY_V3.yarn, mscale_all_dim=0.0, mscale=0.0))
    x = inputs(TINY_V3)
    assert softmax_scale(flat) < softmax_scale(TINY_V3)
    assert not torch.allclose(run(flat, x, [LEN]), plain(TINY_V3, x), atol=1e-3)


@pytest.mark.covers(136)
def test_rotary_halves_are_not_pairs() -> None:
    """The other rotary convention on the same weights: a mismatch no shape reveals."""
    x, config = inputs(TINY_V3), TINY_V3
    order = torch.tensor([0, 2, 1, 3])  # halves <- pairs, for a rotary part of 4
    tensors = target_tensors(config)
    swapped = dict(tensors)
    name = f"{PREFIX}self_attn.kv_a_proj_with_mqa.weight"
    rank = config.kv_lora_rank
    swapped[name] = torch.cat((tensors[name][:rank], tensors[name][rank:][order]))
    wrong = oracle_latent.latent_attention(swapped, PREFIX, config, x.double(), torch.arange(LEN)).float()
    assert not torch.allclose(run(config, x, [LEN]), wrong, atol=1e-2)


def test_values_are_the_first_columns_of_the_keys() -> None:
    """The absorbed pool as `attention.py` reads it, by hand: one row sees itself alone and returns itself."""
    heads = LatentHeads(num_heads=2, head_dim=6, softmax_scale=0.5)
    pool = torch.zeros(PAGE, 6)
    pool[0] = torch.arange(6.0)
    plan = plan_attention([Span(pages=[0], start=0, num_rows=1)], heads, PAGE, Numerics())
    out = attend_cached(torch.randn(1, 12), pool, plan, heads, PAGE)
    assert torch.allclose(out.view(2, 6), torch.arange(6.0).expand(2, 6))
