"""The dense target: embedding, decoder blocks, final norm and head, over paged keys and values.

Shapes: N rows, d hidden, V vocabulary, L layers, S pool slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.model.layers import DecoderBlock, RmsNorm, plan_pass
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rope import rotations


def head_weight(tensors: Mapping[str, Tensor], config: LlamaConfig) -> Tensor:
    """`[V, d]` weight of the output head: the embedding itself when the two are tied."""
    return tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]


class LlamaTrunk:
    """Stateless apart from weights: keys and values live in the pool `[L, S, 2 * G * D]` that a call is given."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: LlamaConfig, page_size: int, max_len: int, numerics: Numerics
    ) -> None:
        self.config, self.numerics, self._page_size = config, numerics, page_size
        self.embed_Vd = tensors["model.embed_tokens.weight"].float()
        self._blocks = [
            DecoderBlock(tensors, f"model.layers.{layer}.", config, page_size, numerics)
            for layer in range(config.num_layers)
        ]
        self._norm = RmsNorm(tensors["model.norm.weight"], config.rms_eps)
        self._head = make_linear((head_weight(tensors, config),), numerics)
        self._rotations = rotations(config.head_dim, config.rope_theta, max_len)

    def forward(self, token_ids: Sequence[int], spans: list[Span], pool_LSE: Tensor) -> Tensor:
        """Run the rows of `spans` (slot = position). Returns their hidden rows `[N, d]` before the final norm."""
        positions_N = torch.cat([torch.arange(span.start, span.start + span.num_rows) for span in spans])
        shared = plan_pass(spans, positions_N, self._rotations, self.config, self._page_size, self.numerics)
        hidden_Nd = self.embed_Vd.index_select(0, torch.tensor(token_ids))
        for block, pool_SE in zip(self._blocks, pool_LSE.unbind(0), strict=True):
            hidden_Nd = block(hidden_Nd, pool_SE, shared)
        return hidden_Nd

    def logits(self, hidden_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head: `[N, V]`."""
        return self._head(self._norm(hidden_Nd))
