"""One decoder block, and the MTP layer built around one (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).

    u = eh_proj [enorm(E(x_{i+k})) ; hnorm(h_i^{k-1})]        h_i^k = block(u)

No norm follows the projection and no residual passes around it. The block's output is residual-completed and before
any final norm.

Shapes: N rows, d hidden, C rotated pairs, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.training.v3.attention import LatentAttention, Spans
from seqmtp_serve.training.v3.exchange import Exchange
from seqmtp_serve.training.v3.experts import MixtureOfExperts, SwiGlu
from seqmtp_serve.training.v3.products import Arithmetic, RmsNorm, RowLinear


class Block(nn.Module):
    """h += attention(norm(h)); h += feed_forward(norm(h))."""

    def __init__(self, config: DeepseekConfig, layer: int, arithmetic: Arithmetic, exchange: Exchange) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_eps)
        self.self_attn = LatentAttention(config, arithmetic)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(config, arithmetic, exchange)
            if config.is_moe(layer)
            else SwiGlu(config.hidden_size, config.intermediate_size, arithmetic)
        )

    def forward(self, hidden_Nd: Tensor, rotation_NC: Tensor, spans: Spans) -> Tensor:
        hidden_Nd = hidden_Nd + self.self_attn(self.input_layernorm(hidden_Nd), rotation_NC, spans)
        out_Nd: Tensor = hidden_Nd + self.mlp(self.post_attention_layernorm(hidden_Nd))
        return out_Nd


class SharedHead(nn.Module):
    """The final norm and the vocabulary product an MTP layer uses: by default the main model's own objects."""

    def __init__(self, norm: RmsNorm, head: RowLinear) -> None:
        super().__init__()
        self.norm, self.head = norm, head


class MtpLayer(Block):
    """A block with a fusion before it. `embed_tokens` and `shared_head` are handed in, not made."""

    def __init__(
        self,
        config: DeepseekConfig,
        layer: int,
        arithmetic: Arithmetic,
        exchange: Exchange,
        mtp: MtpConfig,
        embed_tokens: nn.Embedding,
        shared_head: SharedHead,
    ) -> None:
        super().__init__(config, layer, arithmetic, exchange)
        d = config.hidden_size
        self.embed_tokens, self.shared_head = embed_tokens, shared_head
        self.enorm, self.hnorm = RmsNorm(d, config.rms_eps), RmsNorm(d, config.rms_eps)
        self.eh_proj = RowLinear(2 * d, d, arithmetic)
        self._mtp = mtp

    def fused(self, fed_Nd: Tensor, embedded_Nd: Tensor) -> Tensor:
        """The block's input, `[N, d]`, from the state that is fed and the embedding of the shifted token."""
        parts = (self.enorm(embedded_Nd), self.hnorm(fed_Nd))
        out_Nd: Tensor = self.eh_proj(torch.cat(parts if self._mtp.fusion_order == "eh" else parts[::-1], -1))
        return out_Nd
