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

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.model.backends.dispatch import DISPATCH, DispatchCase
from seqmtp_serve.model.backends.grouped_gemm import GROUPED_GEMM, GemmCase, GroupedGemm
from seqmtp_serve.model.backends.latent_attention import (
    LATENT_ATTENTION,
    FlashInfer,
    LatentAttentionBackend,
    LatentBatch,
    LatentCase,
)
from seqmtp_serve.model.backends.registry import Registry
from seqmtp_serve.model.dispatch import LocalDispatcher
from seqmtp_serve.model.experts import Experts, GroupedExperts, SwiGluWeights, make_experts
from seqmtp_serve.model.mla_forms import UpProjections, attend_absorbed
from seqmtp_serve.model.numerics import Numerics
from services.backends import run

LATENT, ROPE, HEADS, NOPE, VALUE = 512, 64, 4, 8, 8
PAGE = 64
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
    for name, reason in (("a", "no device"), ("b", "too large"), ("z", "not one of a, b, c")):
        with pytest.raises(InvalidField, match=reason):
            registry.choose(None, named=name)


# ---- latent attention

V3 = LatentCase(latent_size=LATENT, rope_size=ROPE, num_heads=HEADS, page_size=PAGE, dtype=DTYPE, device=DEVICE)


def random_batch(num_queries: int) -> tuple[LatentBatch, Tensor]:
    """Three sequences over shuffled pages, and the oracle's answer in float64. Unused rows and pages hold NaN."""
    generator = torch.Generator().manual_seed(num_queries)
    lens = torch.tensor([num_queries, PAGE + 1, 3 * PAGE])
    pages = torch.randperm(12, generator=generator)[:9].view(3, 3)
    cached = torch.full((12, PAGE, LATENT + ROPE), float("nan"))
    latent = torch.randn(3, num_queries, HEADS, LATENT, generator=generator) / 4
    rope = torch.randn(3, num_queries, HEADS, ROPE, generator=generator)
    expected = torch.empty(3, num_queries, HEADS, LATENT, dtype=torch.float64)
    identity = UpProjections(
        keys_HnC=torch.eye(LATENT, dtype=torch.float64).expand(HEADS, -1, -1),
        values_HvC=torch.eye(LATENT, dtype=torch.float64).expand(HEADS, -1, -1),
    )
    for b, length in enumerate(lens.tolist()):
        rows = torch.randn(length, LATENT + ROPE, generator=generator)
        for position in range(length):
            cached[pages[b, position // PAGE], position % PAGE] = rows[position]
        seen = torch.arange(length) <= torch.arange(length - num_queries, length)[:, None]
        expected[b] = attend_absorbed(latent[b].double(), rope[b].double(), rows.double(), identity, 0.1352, seen)
    batch = LatentBatch(
        latent_BQHC=latent.to(DEVICE, DTYPE),
        rope_BQHr=rope.to(DEVICE, DTYPE),
        cached_PpE=cached.to(DEVICE, DTYPE),
        pages_BM=pages.int().to(DEVICE),
        lens_B=lens.int().to(DEVICE),
        scale=0.1352,
    )
    return batch, expected


@pytest.mark.parametrize("num_queries", [1, 2, 4])
@pytest.mark.parametrize("backend", able(LATENT_ATTENTION, V3))
def test_latent_attention_equals_the_oracle(backend: LatentAttentionBackend, num_queries: int) -> None:
    batch, expected = random_batch(num_queries)
    assert backend.refuses(batch.case) == ""
    found = backend.attend(batch).double().cpu()
    assert torch.allclose(found, expected, atol=1e-5 if torch.float32 == DTYPE else 2e-2)


def test_a_kernel_for_v3_sizes_refuses_others() -> None:
    kernel = FlashInfer()
    half = replace(V3, dtype=torch.bfloat16, device="cuda")
    assert kernel.refuses(half) == ""
    assert "512" in kernel.refuses(replace(half, latent_size=64))
    assert "64" in kernel.refuses(replace(half, rope_size=16))
    assert "half precision" in kernel.refuses(replace(half, dtype=torch.float32))
    assert "cpu" in kernel.refuses(replace(half, device="cpu"))


# ---- grouped GEMM

GEMM = GemmCase(num_inputs=64, num_outputs=96, dtype=DTYPE, device=DEVICE)


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 7, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("backend", able(GROUPED_GEMM, GEMM))
def test_a_grouped_product_is_each_rows_own(backend: GroupedGemm, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 64, generator=generator)
    weight = torch.randn(len(counts), 96, 64, generator=generator)
    group = [index for index, count in enumerate(counts) for _ in range(count)]
    expected = torch.stack([weight[g].double() @ row.double() for g, row in zip(group, rows, strict=True)])
    found = backend.multiply(rows.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE), torch.tensor(counts).to(DEVICE))
    assert torch.allclose(found.double().cpu(), expected, atol=1e-4 if torch.float32 == DTYPE else 0.5)


def test_grouped_experts_equal_one_expert_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    fast = Numerics(invariant=False, int8_levels=0, fixed_tiles=False)
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
    grouped = make_experts(weights, fast)
    assert isinstance(grouped, GroupedExperts)
    found, touched = grouped(rows, experts)
    expected, same = Experts(weights, fast)(rows, experts)
    assert torch.allclose(found, expected, atol=1e-4)
    assert touched == same == 3
    assert grouped(rows[:0], experts[:0])[1] == 0
    assert isinstance(make_experts(weights, replace(fast, invariant=True)), Experts)
    assert isinstance(make_experts(weights, replace(fast, int8_levels=63)), Experts)


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
    assert run(argparse.Namespace(ranks=2, json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + sum(len(r.backends) for r in (LATENT_ATTENTION, GROUPED_GEMM, DISPATCH))
    assert any("local" in line and "2 ranks hold the experts" in line for line in lines)
