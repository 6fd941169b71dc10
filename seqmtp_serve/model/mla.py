"""Multi-head latent attention over pages. A cached row is a token's latent and its rotated shared key: `[C + r]`.

Which form runs is declared, never a matter of load. `invariant` numerics: always the absorbed one, page by page
(`attention.py`), so a row has the same bits alone, in a batch, as prefill and as a draft under verification. `fast`
numerics: the naive one for spans of at least `naive_rows` rows, where making keys and values once costs less than
attending in the latent space with every row. `mla_forms.py` is both, plainly. What computes either is chosen at start
among `backends/latent_attention.py` and `backends/latent_prefill.py`.

The rotary part keeps interleaved pairs, in queries, keys and cache alike (transformers stores de-interleaved halves:
the same scores, other bytes).

Shapes: N rows, d hidden, H heads, n/r/v sizes of a head's plain, rotary and value part, e = n + r, C latent rank,
E = C + r, S pool slots or cached rows, R rows of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.config import AUTO
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.backends.latent_attention import LATENT_ATTENTION, LatentCase, LatentKernel, LatentPlan
from seqmtp_serve.model.backends.latent_prefill import LATENT_PREFILL, PrefillBackend, PrefillCase
from seqmtp_serve.model.backends.latent_torch import slots_of
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.layers import RmsNorm
from seqmtp_serve.model.linear import PerHeadLinear, make_linear
from seqmtp_serve.model.mla_forms import UpProjections
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rope import rotate_
from seqmtp_serve.model.yarn import softmax_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveSpan:
    """A span that makes its keys and values: where its rows and its cached rows are, and which see which."""

    rows: slice
    slots_S: Tensor
    seen_RS: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaPass:
    """What the layers of one forward pass share."""

    rotation_N1C: Tensor
    write_slot_N: Tensor
    absorbed_rows_N: Tensor  # rows of the pass, in order, that `absorbed` attends for
    absorbed: LatentPlan | None
    naive: tuple[NaiveSpan, ...]


def naive_rows(config: DeepseekConfig) -> int:
    """From how many rows on a span is cheaper in the naive form, whatever the context.

    A cached row costs C(n + v) multiplications a head to expand, and saves every query row 2C + r - (n + r + v).
    """
    saved = 2 * config.kv_lora_rank - config.nope_head_dim - config.v_head_dim
    expanding = config.kv_lora_rank * (config.nope_head_dim + config.v_head_dim)
    return expanding // saved + 1 if saved > 0 else 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKernels:
    """The kernels of a model's layers, and from how many rows on a span takes the naive form."""

    absorbed: LatentKernel
    naive: PrefillBackend
    naive_rows: int
    page_size: int
    names: Mapping[str, str]  # by their words in `config.Kernels`; those that are used

    @classmethod
    def choose(
        cls, config: DeepseekConfig, page_size: int, numerics: Numerics, *, skips_slots: bool = False
    ) -> LatentKernels:
        """Raises InvalidField when a backend that is asked for by name cannot run here.

        `skips_slots` as in `LatentCase`: an MTP module takes the best backend where the target's cannot do that.
        """
        absorbed_case = LatentCase(
            latent_size=config.kv_lora_rank,
            rope_size=config.rope_head_dim,
            num_heads=config.num_heads,
            page_size=page_size,
            softmax_scale=softmax_scale(config),
            numerics=numerics,
            skips_slots=skips_slots,
        )
        naive_case = PrefillCase(
            query_head_dim=config.query_head_dim, value_head_dim=config.v_head_dim, device=numerics.device.type
        )
        asked = numerics.kernels
        if numerics.invariant and asked.prefill != AUTO:
            message = f"latent prefill backend {asked.prefill}: invariant numerics take the absorbed form for every row"
            raise InvalidField(message, param="kernels.prefill")
        choose = LATENT_ATTENTION.choose_or_best if skips_slots else LATENT_ATTENTION.choose
        absorbed = choose(absorbed_case, named=asked.attention)
        naive = LATENT_PREFILL.choose(naive_case, named=asked.prefill)
        names = {"attention": absorbed.name} | ({} if numerics.invariant else {"prefill": naive.name})
        return cls(
            absorbed=absorbed.make(absorbed_case),
            naive=naive,
            naive_rows=1 << 62 if numerics.invariant else naive_rows(config),
            page_size=page_size,
            names=names,
        )


def plan_mla(spans: Sequence[Span], positions_N: Tensor, rotations: Tensor, kernels: LatentKernels) -> MlaPass:
    """`positions_N` are RoPE positions (not slots) of the rows, in span order; `rotations` the table of `rope.py`."""
    absorbed, absorbed_rows, naive, write = [], [], [], []
    first_row, device = 0, rotations.device
    for span in spans:
        rows = slice(first_row, first_row + span.num_rows)
        first_row = rows.stop
        slots_S = slots_of(span, kernels.page_size)
        write.append(slots_S[span.start :])
        if span.num_rows < kernels.naive_rows:
            absorbed.append(span)
            absorbed_rows.append(torch.arange(rows.start, rows.stop))
        else:
            slot_S = torch.arange(len(slots_S), device=device)
            seen_RS = (slot_S <= slot_S[span.start :, None]) & (slot_S >= span.first_slot)
            naive.append(NaiveSpan(rows=rows, slots_S=slots_S.to(device), seen_RS=seen_RS))
    return MlaPass(
        rotation_N1C=rotations.index_select(0, positions_N).unsqueeze(1),
        write_slot_N=torch.cat(write).to(device),
        absorbed_rows_N=(torch.cat(absorbed_rows) if absorbed else torch.empty(0, dtype=torch.int64)).to(device),
        absorbed=kernels.absorbed.plan(absorbed) if absorbed else None,
        naive=tuple(naive),
    )


class LatentAttention:
    """`[N, d]` to `[N, d]`, over a pool of latents. Queries and the cached row come out of one product."""

    def __init__(
        self, weight: Callable[[str], Tensor], config: DeepseekConfig, kernels: LatentKernels, numerics: Numerics
    ) -> None:
        """`weight` gives a tensor by its short name, as `layers.block_weights` does."""
        self._config, self._prefill, self._scale = config, kernels.naive, softmax_scale(config)
        has_query_latent = config.q_lora_rank > 0
        query = "self_attn.q_a_proj" if has_query_latent else "self_attn.q_proj"
        self._into = make_linear((weight(query), weight("self_attn.kv_a_proj_with_mqa")), numerics, fine=True)
        self._query_norm = RmsNorm(weight("self_attn.q_a_layernorm"), config.rms_eps) if has_query_latent else None
        self._query_up = make_linear((weight("self_attn.q_b_proj"),), numerics, fine=True) if has_query_latent else None
        self._latent_norm = RmsNorm(weight("self_attn.kv_a_layernorm"), config.rms_eps)
        up = UpProjections.split(weight("self_attn.kv_b_proj"), config.num_heads, config.nope_head_dim)
        self._up = up
        self._absorb_keys = PerHeadLinear(up.keys_HnC.transpose(1, 2), numerics)
        self._expand_values = PerHeadLinear(up.values_HvC, numerics)
        self._out = make_linear((weight("self_attn.o_proj"),), numerics, fine=True)

    def __call__(self, x_Nd: Tensor, pool_SE: Tensor, shared: MlaPass) -> Tensor:
        """Writes the rows' latents to `pool_SE`, then attends. The residual is the caller's."""
        query_NHe, cached_NE = self._project(x_Nd)
        config = self._config
        rotate_(query_NHe[..., config.nope_head_dim :], shared.rotation_N1C)
        rotate_(cached_NE[:, None, config.kv_lora_rank :], shared.rotation_N1C)
        pool_SE.index_copy_(0, shared.write_slot_N, cached_NE)
        if shared.absorbed is None or shared.naive:
            mixed_NHv = query_NHe.new_empty(len(query_NHe), config.num_heads, config.v_head_dim)
            for span in shared.naive:
                mixed_NHv[span.rows] = self._naive(query_NHe[span.rows], pool_SE, span)
            if shared.absorbed is not None:
                rows_N = shared.absorbed_rows_N
                mixed_NHv[rows_N] = self._absorbed(query_NHe[rows_N], pool_SE, shared.absorbed)
        else:
            mixed_NHv = self._absorbed(query_NHe, pool_SE, shared.absorbed)
        return self._out(mixed_NHv.flatten(1))

    def _project(self, x_Nd: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[N, H, e]` and cached rows `[N, E]`, not yet rotated. The shared key part has no norm."""
        config = self._config
        sizes = [config.q_lora_rank or config.query_size, config.latent_size]
        query, cached_NE = torch.split(self._into(x_Nd), sizes, -1)
        if self._query_norm is not None and self._query_up is not None:
            query = self._query_up(self._query_norm(query))
        latent, key = torch.split(cached_NE, [config.kv_lora_rank, config.rope_head_dim], -1)
        return (
            query.reshape(-1, config.num_heads, config.query_head_dim),
            torch.cat((self._latent_norm(latent), key), -1),
        )

    def _absorbed(self, query_NHe: Tensor, pool_SE: Tensor, plan: LatentPlan) -> Tensor:
        config = self._config
        q_nope, q_rope = torch.split(query_NHe, [config.nope_head_dim, config.rope_head_dim], -1)
        rows_NHE = torch.cat((self._absorb_keys(q_nope), q_rope), -1)
        return self._expand_values(plan.attend(rows_NHE, pool_SE))

    def _naive(self, query_RHe: Tensor, pool_SE: Tensor, span: NaiveSpan) -> Tensor:
        sizes = [self._config.kv_lora_rank, self._config.rope_head_dim]
        latent_SC, key_Sr = torch.split(pool_SE.index_select(0, span.slots_S), sizes, -1)
        keys_HSn = latent_SC @ self._up.keys_HnC.transpose(1, 2)
        keys_HSe = torch.cat((keys_HSn, key_Sr.expand(len(keys_HSn), -1, -1)), -1)
        values_HSv = latent_SC @ self._up.values_HvC.transpose(1, 2)
        query_HRe = query_RHe.transpose(0, 1)
        mixed_HRv = self._prefill.attend(query_HRe, keys_HSe, values_HSv, span.seen_RS, self._scale)
        return mixed_HRv.transpose(0, 1)
