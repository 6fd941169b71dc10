"""MTP modules of DeepSeek-V3 (arXiv 2412.19437, section 2.2) around one decoder block of the target's own family.

A row of base i of the module of depth k joins the state of depth k-1 at position i with the token at i+k and predicts
the token at i+k+1 (depth 0 is the target):

    u = eh_proj [enorm(E(x_{i+k})) ; hnorm(h^{k-1}_i)]    h^k_i = block(u), at RoPE position i
    logits = head(norm(h^k_i))

The embedding, the head and, if declared so, the final norm are the main model's own. What else differs from family to
family is in `MtpConfig`. How modules are put together to draft further is the proposer engine's business.

Shapes: N rows, d hidden, Vd draft vocabulary, S pool slots, E values of a cached row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmtp_serve.errors import InternalError, MtpIncomplete
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.device import on_device
from seqmtp_serve.model.family import ModelConfig, build_layers
from seqmtp_serve.model.layers import RmsNorm, head_weight
from seqmtp_serve.model.linear import Linear, make_linear
from seqmtp_serve.model.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPool:
    """The cached rows of the module of one depth. Modules of other depths, and the target, have other rows."""

    depth: int
    rows_SE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MainParts:
    """What all modules of a model share with it: the same objects, not copies."""

    embed_Vd: Tensor
    norm: RmsNorm
    head: Linear  # over the draft vocabulary
    draft_token_ids: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: ModelConfig, numerics: Numerics) -> MainParts:
        """`tensors` holds the main model's `model.embed_tokens`, `model.norm` and, if untied, `lm_head`."""
        head_Vd = head_weight(tensors, tied=config.tie_word_embeddings)
        ids = tensors.get(f"model.layers.{config.num_layers}.draft_token_ids")
        ids = torch.arange(config.vocab_size, device=numerics.device) if ids is None else ids.long()
        return cls(
            embed_Vd=tensors["model.embed_tokens.weight"].float(),
            norm=RmsNorm(tensors["model.norm.weight"], config.rms_eps),
            head=make_linear((head_Vd if len(ids) == len(head_Vd) else head_Vd.index_select(0, ids),), numerics),
            draft_token_ids=ids,
        )


class MtpModule:
    """The module of depth `depth`, stateless apart from weights. `tensors` holds it under
    `model.layers.<num_layers + depth - 1>.` (the released layout), and what `main` is made of when that is None.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: ModelConfig,
        mtp: MtpConfig,
        page_size: int,
        max_len: int,
        numerics: Numerics,
        *,
        depth: int = 1,
        main: MainParts | None = None,
    ) -> None:
        layer = config.num_layers + depth - 1
        prefix, plus_one = f"model.layers.{layer}.", mtp.norm_flavour == "1+w"
        self.config, self.mtp, self.depth = config, mtp, depth
        self._main = main or MainParts.of(tensors, config, numerics)
        self.draft_token_ids = self._main.draft_token_ids
        self._enorm = RmsNorm(tensors[f"{prefix}enorm.weight"], config.rms_eps, plus_one=plus_one)
        self._hnorm = RmsNorm(tensors[f"{prefix}hnorm.weight"], config.rms_eps, plus_one=plus_one)
        self._fuse = make_linear((_embedding_first(tensors[f"{prefix}eh_proj.weight"], mtp.fusion_order),), numerics)
        self._layers = build_layers(config, page_size, max_len, numerics)
        self._block = self._layers.block(tensors, layer)
        self.kernels = self._layers.kernels
        self.tally = self._layers.tally  # what its own experts did, which are not the target's
        self._final_norm = self._choose_final_norm(tensors, prefix)

    def _choose_final_norm(self, tensors: Mapping[str, Tensor], prefix: str) -> RmsNorm | None:
        if self.mtp.final_norm_owner == "none":
            return None
        if self.mtp.final_norm_owner == "main":
            return self._main.norm
        plus_one = self.mtp.norm_flavour == "1+w"
        return RmsNorm(tensors[f"{prefix}shared_head.norm.weight"], self.config.rms_eps, plus_one=plus_one)

    def forward(
        self, hidden_Nd: Tensor, next_ids_N: Tensor, bases_N: Tensor, spans: list[Span], pool: DepthPool
    ) -> Tensor:
        """Run the rows of `spans`, whose RoPE positions are `bases_N`. Returns pre-final-norm rows `[N, d]`.

        A row of base i lies at slot i + depth. `hidden_Nd` is what the configuration says a row consumes: see `fed` and
        `recycled`. Raises InternalError for the pool of another depth.
        """
        if pool.depth != self.depth:
            raise InternalError(f"cached rows of depth {pool.depth} were given to the module of depth {self.depth}")
        shared = self._layers.plan(spans, bases_N)
        embedded_Nd = self._main.embed_Vd.index_select(0, next_ids_N)
        if self.mtp.zero_position0:
            embedded_Nd = embedded_Nd.masked_fill((bases_N == 0).unsqueeze(1), 0.0)
        fused_Nd = self._fuse(torch.cat((self._enorm(embedded_Nd), self._hnorm(hidden_Nd)), -1))
        return self._block(fused_Nd, pool.rows_SE, shared)

    def fed(self, hidden_Nd: Tensor) -> Tensor:
        """A target row (pre-final-norm) as the module wants it at step one."""
        return hidden_Nd if self.mtp.fed_hidden == "pre" else self._main.norm(hidden_Nd)

    def recycled(self, output_Nd: Tensor) -> Tensor:
        """This module's row as the next step, or the module of the next depth, wants it."""
        norm = self._final_norm if self.mtp.recycled_hidden == "post" else None
        return output_Nd if norm is None else norm(output_Nd)

    def draft_logits(self, output_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head over the draft vocabulary: `[N, Vd]`."""
        return self._main.head(output_Nd if self._final_norm is None else self._final_norm(output_Nd))


def build_modules(
    tensors: Mapping[str, Tensor], config: ModelConfig, mtp: MtpConfig, page_size: int, max_len: int, numerics: Numerics
) -> tuple[MtpModule, ...]:
    """The modules of depth 1 to `mtp.num_modules`, which share the main model's parts."""
    tensors = on_device(tensors, numerics.device)
    main = MainParts.of(tensors, config, numerics)
    return tuple(
        MtpModule(tensors, config, mtp, page_size, max_len, numerics, depth=depth, main=main)
        for depth in range(1, mtp.num_modules + 1)
    )


def _embedding_first(weight_d2d: Tensor, fusion_order: str) -> Tensor:
    """The fusion weight with its embedding half first, whatever order the checkpoint stores."""
    size = weight_d2d.shape[0]
    if weight_d2d.shape[1] != 2 * size:
        raise MtpIncomplete(f"eh_proj must be [d, 2d], not {tuple(weight_d2d.shape)}")
    if fusion_order == "eh":
        return weight_d2d
    if fusion_order == "he":
        return torch.cat((weight_d2d[:, size:], weight_d2d[:, :size]), 1)
    raise MtpIncomplete(f"declare the fusion order of eh_proj, he or eh; not {fusion_order!r}")
