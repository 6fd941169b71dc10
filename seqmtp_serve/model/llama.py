"""The dense target: embedding, decoder blocks, final norm and head, over paged keys and values.

Shapes: N rows, d hidden, V vocabulary, L layers, S pool slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.layers import DecoderBlock, LlamaLayers, RmsNorm, block_weights, head_weight
from seqmtp_serve.model.linear import Linear, make_linear
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rotate import random_rotation, rotated_block, rotated_head


class LlamaTrunk:
    """Stateless apart from weights: keys and values live in the pool `[L, S, 2 * G * D]` that a call is given.

    With int8 layers the residual stream is kept rotated (see `rotate.py`). That is nobody else's business: `forward`
    returns rows that only `logits` and `features` read.
    """

    tally = None  # no experts

    def __init__(
        self, tensors: Mapping[str, Tensor], config: LlamaConfig, page_size: int, max_len: int, numerics: Numerics
    ) -> None:
        self._device = numerics.device
        self._layers = LlamaLayers(config, page_size, max_len, numerics)
        self.kernels = self._layers.kernels
        self._embed_Vd = tensors["model.embed_tokens.weight"].float()
        head_Vd, norm_d = head_weight(tensors, tied=config.tie_word_embeddings), tensors["model.norm.weight"]
        blocks = [block_weights(tensors, f"model.layers.{layer}.") for layer in range(config.num_layers)]
        self._into: Linear | None = None
        self._out_of: Linear | None = None
        if numerics.int8_levels:
            rotation_dd = random_rotation(config.hidden_size)
            plain = replace(numerics, int8_levels=0)
            self._into, self._out_of = make_linear((rotation_dd.T,), plain), make_linear((rotation_dd,), plain)
            head_Vd, norm_d = rotated_head(head_Vd, norm_d, rotation_dd), torch.ones(config.hidden_size)
            blocks = [rotated_block(weight, config, rotation_dd).__getitem__ for weight in blocks]
        self._blocks = [DecoderBlock(weight, config, page_size, numerics) for weight in blocks]
        self._norm = RmsNorm(norm_d, config.rms_eps)
        self._head = make_linear((head_Vd,), numerics)

    def forward(self, token_ids: Sequence[int], spans: list[Span], pool_LSE: Tensor) -> Tensor:
        """Run the rows of `spans` (slot = position). Returns their states `[N, d]` before the final norm."""
        positions_N = torch.cat([torch.arange(span.start, span.start + span.num_rows) for span in spans])
        shared = self._layers.plan(spans, positions_N.to(self._device))
        state_Nd = self._embed_Vd.index_select(0, torch.tensor(token_ids, device=self._device))
        if self._into is not None:
            state_Nd = self._into(state_Nd)
        for block, pool_SE in zip(self._blocks, pool_LSE.unbind(0), strict=True):
            state_Nd = block(state_Nd, pool_SE, shared)
        return state_Nd

    def features(self, state_Nd: Tensor) -> Tensor:
        """The model's own hidden rows `[N, d]` before the final norm: what an MTP module is fed."""
        return state_Nd if self._out_of is None else self._out_of(state_Nd)

    def logits(self, state_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head: `[N, V]`."""
        return self._head(self._norm(state_Nd))
