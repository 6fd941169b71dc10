"""Kernel backends: how one is chosen, and each that can run here against an oracle, with the head sizes of DeepSeek-V3.

What cannot run here is skipped with its reason: no figure and no claim is made for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqmtp_serve import oracle
from seqmtp_serve.config import Kernels
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.backends.dispatch import DISPATCH, DispatchCase
from seqmtp_serve.model.backends.grouped_gemm import GROUPED_GEMM, GemmCase, GroupedGemm, Groups
from seqmtp_serve.model.backends.latent_attention import LATENT_ATTENTION, LatentAttentionBackend, LatentCase
from seqmtp_serve.model.backends.latent_flashinfer import FlashInfer, FlashInferKernel
from seqmtp_serve.model.backends.latent_prefill import LATENT_PREFILL, PrefillBackend, PrefillCase
from seqmtp_serve.model.backends.latent_torch import TorchReference, slots_of
from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.deepseek import DeepseekTrunk
from seqmtp_serve.model.dispatch import LocalDispatcher
from seqmtp_serve.model.experts import Experts, SwiGlu, SwiGluWeights, choose_gemm
from seqmtp_serve.model.family import build_layers
from seqmtp_serve.model.mla_forms import UpProjections, attend_absorbed
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.probe import attention_rows_agree, gemm_rows_agree
from seqmtp_serve.model.synthetic import TINY, TINY_V3, target_tensors
from services.backends import run

LATENT, ROPE, HEADS, PAGE = 512, 64, 4, 64
INVARIANT = Numerics(fixed_tiles=not (gemm_rows_agree() and attention_rows_agree(PAGE, LATENT + ROPE)))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake:
    name: str
    missing: str = ""
    unfit: str = ""

    def unavailable(self) -> str:
        return self.missing

    def refuses(self, case: object) -> str:
        return self.unfit


def able(registry: Registry[Any], case: object) -> Sequence[Any]:
    """Each backend as a parameter; one that cannot run is a skipped test that says why."""
    reasons = {one["name"]: one["reason"] for one in registry.report(case)}
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.skip(reason=why)] if (why := reasons[one.name]) else [])
        for one in registry.backends
    ]


def test_the_first_that_can_run_is_chosen() -> None:
    best, middle, last = Fake(name="a", missing="no device"), Fake(name="b", unfit="too large"), Fake(name="c")
    registry = Registry("kind", (best, middle, last))
    assert registry.choose(None) is last
    assert Registry("kind", (replace(best, missing=""), middle, last)).choose(None).name == "a"
    assert [one["reason"] for one in registry.report(None)] == ["no device", "too large", ""]


def test_a_named_one_is_used_or_refused_with_its_reason() -> None:
    registry = Registry(
        "kind", (Fake(name="a", missing="no device"), Fake(name="b", unfit="too large"), Fake(name="c"))
    )
    assert registry.choose(None, named="c").name == "c"
    for name, reason in (("a", "no device"), ("b", "too large"), ("z", "not one of auto, a, b, c")):
        with pytest.raises(InvalidField, match=reason):
            registry.choose(None, named=name)


# ---- latent attention

FAST = Numerics(invariant=False)
PLACE = torch.device(DEVICE)
V3 = LatentCase(
    latent_size=LATENT,
    rope_size=ROPE,
    num_heads=HEADS,
    page_size=PAGE,
    softmax_scale=0.1352,
    numerics=replace(FAST, device=PLACE),
    dtype=DTYPE,
)
OTHER = replace(V3, latent_size=40, rope_size=12, num_heads=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows of three sequences over shuffled pages; what no row sees is large. `expected_NHC` is an oracle's."""

    spans: list[Span]
    rows_NHE: Tensor
    pool_SE: Tensor
    expected_NHC: Tensor


def random_pass(case: LatentCase, num_rows: tuple[int, ...], first_slot: int = 0) -> Pass:
    generator = torch.Generator().manual_seed(sum(num_rows))
    size, heads, page = case.latent_size, case.num_heads, case.page_size
    pages = torch.randperm(12, generator=generator)[:9].view(3, 3).tolist()
    starts = (first_slot, page - 1, 3 * page - max(num_rows))
    spans = [
        Span(pages=pages[b], start=start, num_rows=count, first_slot=first_slot)
        for b, (start, count) in enumerate(zip(starts, num_rows, strict=True))
    ]
    pool = torch.full((12 * page, size + case.rope_size), 30.0)
    rows = torch.randn(sum(num_rows), heads, size + case.rope_size, generator=generator) / 4
    identity = UpProjections(
        keys_HnC=torch.eye(size, dtype=torch.float64).expand(heads, -1, -1),
        values_HvC=torch.eye(size, dtype=torch.float64).expand(heads, -1, -1),
    )
    expected = []
    for span, part in zip(spans, rows.split(list(num_rows)), strict=True):
        slots = slots_of(span, page)
        cached = torch.randn(len(slots), pool.shape[1], generator=generator)
        pool[slots[first_slot:]] = cached[first_slot:]
        slot = torch.arange(len(slots))
        seen = (slot <= slot[span.start :, None]) & (slot >= first_slot)
        latent, rope = part.double().split([size, case.rope_size], -1)
        expected.append(attend_absorbed(latent, rope, cached.double(), identity, case.softmax_scale, seen))
    return Pass(
        spans=spans,
        rows_NHE=rows.to(DEVICE, DTYPE),
        pool_SE=pool.to(DEVICE, DTYPE),
        expected_NHC=torch.cat(expected),
    )


@pytest.mark.parametrize("num_rows", [(1, 1, 1), (2, 2, 2), (4, 1, 30)], ids=str)
@pytest.mark.parametrize("backend", able(LATENT_ATTENTION, V3))
def test_latent_attention_is_the_oracle_at_the_sizes_of_v3(
    backend: LatentAttentionBackend, num_rows: tuple[int, ...]
) -> None:
    given = random_pass(V3, num_rows)
    found = backend.make(V3).plan(given.spans).attend(given.rows_NHE, given.pool_SE)
    assert found.shape == given.expected_NHC.shape
    assert torch.allclose(found.double().cpu(), given.expected_NHC, atol=1e-5 if torch.float32 == DTYPE else 2e-2)


@pytest.mark.parametrize("first_slot", [0, 2, 70])
@pytest.mark.parametrize("backend", able(LATENT_ATTENTION, replace(OTHER, skips_slots=True)))
def test_latent_attention_of_other_sizes_and_of_modules(backend: LatentAttentionBackend, first_slot: int) -> None:
    """Slots before an MTP sequence's first row do not exist, a whole page of them neither."""
    case = replace(OTHER, skips_slots=True)
    given = random_pass(case, (3, 66, 5), first_slot)
    found = backend.make(case).plan(given.spans).attend(given.rows_NHE, given.pool_SE)
    bad = torch.cat([torch.arange(s.start, s.start + s.num_rows) < first_slot for s in given.spans])
    assert torch.allclose(found.double().cpu()[~bad], given.expected_NHC[~bad], atol=1e-5)


INVARIANT_V3 = replace(V3, numerics=replace(INVARIANT, device=PLACE))


@pytest.mark.parametrize("backend", able(LATENT_ATTENTION, INVARIANT_V3))
def test_the_bits_of_an_invariant_backend_are_a_rows_own(backend: LatentAttentionBackend) -> None:
    case = INVARIANT_V3
    given = random_pass(case, (4, 1, 30))
    kernel = backend.make(case)
    whole = kernel.plan(given.spans).attend(given.rows_NHE, given.pool_SE)
    first_row = 0
    for span in given.spans:
        for row in range(span.num_rows):
            alone = replace(span, start=span.start + row, num_rows=1)
            found = kernel.plan([alone]).attend(given.rows_NHE[first_row : first_row + 1], given.pool_SE)
            assert torch.equal(found[0], whole[first_row]), (span.start, row)
            first_row += 1


@pytest.mark.parametrize("setting", ["paged", "sdpa", "torch"])
def test_a_trunk_with_any_backend_is_the_reference(setting: str) -> None:
    numerics = replace(FAST, kernels=Kernels(attention=setting, prefill="torch", experts="torch"))
    tensors, ids = target_tensors(TINY_V3), list(range(2, 40))
    trunk = DeepseekTrunk(tensors, TINY_V3, 8, 64, numerics)
    assert trunk.kernels == {"attention": setting, "prefill": "torch", "experts": "torch", "dispatch": "local"}
    pool, rows, start = torch.zeros(TINY_V3.num_layers, 64, TINY_V3.cache_row_size), [], 0
    for count in (30, 1, 4, 3):  # 30: the naive form
        span = Span(pages=[5, 1, 2, 7, 0], start=start, num_rows=count)
        rows.append(trunk.forward(ids[start : start + count], [span], pool))
        start += count
    _, hidden = oracle.forward(tensors, TINY_V3, ids, torch.float64)
    assert torch.allclose(torch.cat(rows).double(), hidden, atol=5e-5)


@pytest.mark.parametrize(
    ("kernels", "numerics", "reason"),
    [
        (Kernels(attention="flashinfer"), FAST, "compiled for a latent of 512|no CUDA device"),
        (Kernels(attention="sdpa"), INVARIANT, "invariant numerics forbid"),
        (Kernels(attention="xformers"), FAST, "not one of auto, flashinfer, paged, sdpa, torch"),
        (Kernels(prefill="torch"), INVARIANT, "absorbed form for every row"),
        (Kernels(prefill="other"), FAST, "not one of auto, sdpa, torch"),
        (Kernels(experts="torch-grouped"), INVARIANT, "invariant numerics forbid"),
        (Kernels(experts="torch-grouped"), replace(FAST, int8_levels=63), "no int8 form"),
        (Kernels(experts="deep-gemm"), FAST, "not one of auto, torch-grouped, torch"),
    ],
    ids=str,
)
def test_a_named_backend_that_cannot_run_here_is_a_typed_error(
    kernels: Kernels, numerics: Numerics, reason: str
) -> None:
    with pytest.raises(InvalidField, match=reason) as refused:
        DeepseekTrunk(target_tensors(TINY_V3), TINY_V3, 8, 64, replace(numerics, kernels=kernels))
    assert refused.value.param in {f"kernels.{name}" for name in ("attention", "prefill", "experts")}


def test_a_dense_model_has_no_choice() -> None:
    build_layers(TINY, 8, 64, replace(FAST, kernels=Kernels(attention="paged")))
    for kernels in (Kernels(attention="sdpa"), Kernels(experts="torch"), Kernels(dispatch="local")):
        with pytest.raises(InvalidField, match="this model has"):
            build_layers(TINY, 8, 64, replace(FAST, kernels=kernels))


def test_a_module_takes_the_best_where_the_targets_backend_cannot_skip_slots() -> None:
    able_to, not_able = Fake(name="b"), Fake(name="a", unfit="it cannot hide slots")
    registry = Registry("kind", (able_to, not_able))
    assert registry.choose_or_best(None, named="a") is able_to
    assert registry.choose_or_best(None, named="b") is able_to
    with pytest.raises(InvalidField, match="not one of"):
        registry.choose_or_best(None, named="z")


# ---- FlashInfer: no GPU, so its release's signatures and the documented meaning of its metadata


class PretendMla:
    """`flashinfer.mla` 0.7.4 as documented: keyword-only signatures of that release, rows attended by the reference."""

    @dataclass(frozen=True)
    class MLAPlanMetadata:
        qo_indptr: Tensor
        kv_indptr: Tensor
        kv_indices: Tensor
        kv_len_arr: Tensor

        @classmethod
        def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> Any:
            return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, backend: str = "auto") -> None:
            assert float_workspace_buffer.numel() >= 128 * 2**20

        def plan(
            self,
            *,
            metadata: Any,
            num_heads: int,
            head_dim_ckv: int,
            head_dim_kpe: int,
            page_size: int,
            causal: bool,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            query_layout: str = "packed",
            kv_cache_layout: str = "packed",
        ) -> None:
            assert causal
            assert all(each.dtype == torch.int32 and each.is_contiguous() for each in vars(metadata).values())
            self.heads, self.sizes, self.page_size = num_heads, (head_dim_ckv, head_dim_kpe), page_size
            self.scale, self.metadata, self.dtypes = sm_scale, metadata, (q_data_type, kv_data_type)

        def run(self, *, query: Tensor, kv_cache: Tensor) -> Tensor:
            assert query.shape[1:] == (self.heads, sum(self.sizes))
            assert kv_cache.shape[1:] == (self.page_size, sum(self.sizes))
            assert (query.dtype, kv_cache.dtype) == self.dtypes
            told, spans = self.metadata, []
            for b, length in enumerate(told.kv_len_arr.tolist()):
                pages = told.kv_indices[told.kv_indptr[b] : told.kv_indptr[b + 1]].tolist()
                assert len(pages) == -(-length // self.page_size)
                count = int(told.qo_indptr[b + 1] - told.qo_indptr[b])
                spans.append(Span(pages=pages, start=length - count, num_rows=count))
            case = replace(V3, num_heads=self.heads, page_size=self.page_size, softmax_scale=self.scale)
            return TorchReference().make(case).plan(spans).attend(query, kv_cache.flatten(0, 1))


@pytest.mark.parametrize("num_rows", [(1, 1, 1), (2, 2, 2), (4, 1, 30)], ids=str)
def test_flashinfer_is_told_the_pass(num_rows: tuple[int, ...]) -> None:
    given = random_pass(V3, num_rows)
    kernel = FlashInferKernel(V3, PretendMla)
    for _ in range(2):  # a wrapper is planned again for each pass
        found = kernel.plan(given.spans).attend(given.rows_NHE, given.pool_SE)
        assert torch.allclose(found.double().cpu(), given.expected_NHC, atol=1e-5 if torch.float32 == DTYPE else 2e-2)


def test_a_kernel_for_v3_sizes_refuses_others() -> None:
    kernel = FlashInfer()
    half = replace(V3, dtype=torch.bfloat16, numerics=replace(FAST, device=torch.device("cuda", 0)))
    assert kernel.refuses(half) == ""
    assert "512" in kernel.refuses(replace(half, latent_size=64))
    assert "64" in kernel.refuses(replace(half, rope_size=16))
    assert "half precision" in kernel.refuses(replace(half, dtype=torch.float32))
    assert "cpu" in kernel.refuses(replace(half, numerics=FAST))
    assert "invariant" in kernel.refuses(replace(half, numerics=replace(half.numerics, invariant=True)))
    assert "first row" in kernel.refuses(replace(half, skips_slots=True))


# ---- the naive form


@pytest.mark.parametrize("backend", able(LATENT_PREFILL, PrefillCase(query_head_dim=192, value_head_dim=128)))
def test_the_naive_form_is_its_definition(backend: PrefillBackend) -> None:
    """At V3's head sizes: 128 + 64 of a key, 128 of a value."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 5, 192, generator=generator), torch.randn(2, 9, 192, generator=generator)
    values, seen = torch.randn(2, 9, 128, generator=generator), torch.ones(5, 9, dtype=torch.bool).tril(4)
    seen[:, 0] = False
    scores = (query.double() @ keys.double().mT * 0.1352).masked_fill(~seen, float("-inf"))
    found = backend.attend(query, keys, values, seen, 0.1352)
    assert torch.allclose(found.double(), scores.softmax(-1) @ values.double(), atol=1e-5)


# ---- grouped GEMM

GEMM = GemmCase(
    num_groups=4,
    num_inputs=64,
    num_outputs=96,
    numerics=replace(FAST, device=PLACE, product_dtype=DTYPE),
    dtype=DTYPE,
)


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 7, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("backend", able(GROUPED_GEMM, GEMM))
def test_a_grouped_product_is_each_rows_own(backend: GroupedGemm, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 64, generator=generator)
    weight = torch.randn(len(counts), 96, 64, generator=generator)
    group = [index for index, count in enumerate(counts) for _ in range(count)]
    expected = torch.stack([weight[g].double() @ row.double() for g, row in zip(group, rows, strict=True)])
    multiply = backend.product([(one[:40], one[40:]) for one in weight.to(DEVICE)], GEMM)
    found = multiply(rows.to(DEVICE, DTYPE), Groups(torch.tensor(counts).cumsum(0).to(DEVICE)))
    assert torch.allclose(found.double().cpu(), expected, atol=1e-4 if torch.float32 == DTYPE else 0.5)


def test_experts_are_the_same_with_either_product() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        expert: SwiGluWeights(
            gate_Fd=torch.randn(16, 24, generator=generator),
            up_Fd=torch.randn(16, 24, generator=generator),
            down_dF=torch.randn(24, 16, generator=generator),
        )
        for expert in (4, 5, 6, 7)  # a rank's share: ids do not begin at zero
    }
    rows = torch.randn(9, 24, generator=generator)
    experts = torch.tensor([7, 4, 4, 7, 5, 4, 7, 5, 5])  # none for expert 6
    grouped = Experts(weights, FAST)
    found, touched = grouped(rows, experts)
    expected, same = Experts(weights, replace(FAST, kernels=Kernels(experts="torch")))(rows, experts)
    one_by_one = torch.cat([SwiGlu(weights[e], FAST)(row[None]) for e, row in zip(experts.tolist(), rows, strict=True)])
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(expected, one_by_one, atol=1e-4)
    assert touched == same == 3
    assert grouped(rows[:0], experts[:0])[1] == 0


@pytest.mark.parametrize(
    ("numerics", "name"),
    [(FAST, "torch-grouped"), (INVARIANT, "torch"), (replace(FAST, int8_levels=63), "torch")],
    ids=["fast", "invariant", "int8"],
)
def test_the_grouped_product_follows_the_numerics(numerics: Numerics, name: str) -> None:
    assert choose_gemm(4, 24, 16, numerics)[0].name == name
    assert choose_gemm(0, 0, 0, numerics)[0].name == "torch", "a rank without experts"


# ---- dispatch


def test_dispatch_follows_ranks_and_device() -> None:
    one, many = (
        DispatchCase(world_size=1, num_experts=8, device="cpu"),
        DispatchCase(world_size=2, num_experts=8, device="cpu"),
    )
    assert isinstance(DISPATCH.choose(one).make(one), LocalDispatcher)
    assert DISPATCH.choose(many).name == "all-to-all-gloo"
    nccl = next(one for one in DISPATCH.backends if one.name == "all-to-all-nccl")
    assert nccl.refuses(replace(many, device="cuda")) == ""
    assert "cpu" in nccl.refuses(many)


def test_the_command_lists_every_backend_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argparse.Namespace(ranks=2, numerics="fast", json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    registries: list[Registry[Any]] = [LATENT_ATTENTION, LATENT_PREFILL, GROUPED_GEMM, DISPATCH]
    assert len(lines) == 1 + sum(len(registry.backends) for registry in registries)
    assert any("local" in line and "2 ranks hold the experts" in line for line in lines)
