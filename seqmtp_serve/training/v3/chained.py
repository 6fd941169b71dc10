"""The first MTP layer of a model as a module of its own, drafting as it is served: recurrently, fed with itself.

It shares the layer's submodules, so training it moves the model's layer in place, and nothing but that layer: the
embedding, the final norm and the head are not among its parameters.

Shapes: B documents, T bases, Q wanted bases, M chains, X = B * T or B * Q rows, H heads, C rotated pairs, d hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqmtp_serve.errors import TrainingError
from seqmtp_serve.training.draft_module import DraftModule, Rows, attend_chain, attend_first
from seqmtp_serve.training.v3.model import V3Model


def can_chain(model: V3Model) -> bool:
    """Whether `ChainedLayer` drafts as the model is served: one module, run again and again, under the main norm."""
    mtp = model.mtp
    return (mtp.num_modules, mtp.rollout, mtp.final_norm_owner) == (1, "recurrent", "main")


class ChainedLayer(DraftModule):
    """Parameters carry the released names below `model.layers.<id>.`. Raises TrainingError unless `can_chain`."""

    def __init__(self, model: V3Model) -> None:
        super().__init__()
        if not can_chain(model):
            raise TrainingError("chains are computed for one MTP module, recurrent, under the main model's final norm")
        layer = model.mtp_layer(1)
        self.enorm, self.hnorm, self.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self._outside = (layer, model.model.norm)  # in a tuple: not parameters of this module
        self._mtp, self._rotations = model.mtp, model.rotations

    def first_step(self, hidden_BTd: Tensor, embed_BTd: Tensor, wanted_BQ: Tensor) -> tuple[Tensor, Rows]:
        """See `DraftModule`. Rows that are only attended to skip queries, attention and experts."""
        docs_B1, bases_T = torch.arange(len(hidden_BTd))[:, None], torch.arange(hidden_BTd.shape[1])
        fed_BTd = self._normed(hidden_BTd) if self._mtp.fed_hidden == "post" else hidden_BTd
        fused_BTd, inner_BTd = self._fused(fed_BTd, embed_BTd, bases_T.expand(len(hidden_BTd), -1))
        rows = self._rows(inner_BTd, bases_T.expand(len(hidden_BTd), -1))
        q_BHQD = self._queries(inner_BTd[docs_B1, wanted_BQ], wanted_BQ)
        mixed_BHQV = attend_first(q_BHQD, rows, wanted_BQ, self.self_attn.scale)
        return self._finished(fused_BTd[docs_B1, wanted_BQ], mixed_BHQV), rows

    def next_step(self, hidden_BMd: Tensor, embed_BMd: Tensor, starts_BM: Tensor, rows: Rows) -> Tensor:
        """See `DraftModule`; `hidden_BMd` is before the norm that a recycled row may get."""
        fed_BMd = self._normed(hidden_BMd) if self._mtp.recycled_hidden == "post" else hidden_BMd
        bases_BM = starts_BM + len(rows.chain) + 1
        fused_BMd, inner_BMd = self._fused(fed_BMd, embed_BMd, bases_BM)
        own = self._rows(inner_BMd, bases_BM)
        rows.chain.append((own.keys, own.values))
        mixed_BHMV = attend_chain(self._queries(inner_BMd, bases_BM), rows, starts_BM, self.self_attn.scale)
        return self._finished(fused_BMd, mixed_BHMV)

    def _normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self._outside[1](hidden.float())
        return normed

    def _fused(self, fed: Tensor, embed: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
        """The block's input and its normed form, shaped as `fed`."""
        if self._mtp.zero_position0:
            embed = embed.masked_fill((bases == 0)[..., None], 0.0)
        fused_Xd = self._outside[0].fused(fed.float().flatten(0, 1), embed.flatten(0, 1))
        fused = torch.unflatten(fused_Xd, 0, fed.shape[:2])
        return fused, self.input_layernorm(fused)

    def _rows(self, inner: Tensor, bases: Tensor) -> Rows:
        keys, values = self.self_attn.keys_values(inner.flatten(0, 1), self._rotations[bases.flatten()])
        keys, values = (torch.unflatten(x_XHD, 0, inner.shape[:2]).transpose(1, 2) for x_XHD in (keys, values))
        return Rows(keys=keys, values=values)

    def _queries(self, inner: Tensor, bases: Tensor) -> Tensor:
        q_XHD = self.self_attn.queries(inner.flatten(0, 1), self._rotations[bases.flatten()])
        return torch.unflatten(q_XHD, 0, inner.shape[:2]).transpose(1, 2)

    def _finished(self, fused: Tensor, mixed_BHQV: Tensor) -> Tensor:
        attended_Xd = self.self_attn.o_proj(mixed_BHQV.transpose(1, 2).flatten(2).flatten(0, 1))
        hidden_Xd = fused.flatten(0, 1) + attended_Xd
        out_Xd = hidden_Xd + self.mlp(self.post_attention_layernorm(hidden_Xd))
        return torch.unflatten(out_Xd, 0, fused.shape[:2])
