"""The depth-one MTP module of DeepSeek-V3 (arXiv 2412.19437, section 2.2) with one llama block, used recurrently.

A row of base i joins the hidden state of position i with the token at i+1 and predicts the token at i+2:

    u = eh_proj [enorm(E(x_{i+1})) ; hnorm(h_i)]    m_i = block(u) at RoPE position i    logits = head(final_norm(m_i))

The embedding, the head and (by default) the final norm are the main model's own. Drafting further feeds m_i back in
place of h_{i+1} with the drafted token: the "recurrent" policy, not a depth-D chain of modules.

Shapes: N rows, d hidden, Vd draft vocabulary, S pool slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqmtp_serve.errors import MtpIncomplete
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.layers import DecoderBlock, RmsNorm, block_weights, plan_pass
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.llama import head_weight
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rope import rotations


class MtpModule:
    """Stateless apart from weights. `tensors` holds the module under `model.layers.<num_layers>.` (the released
    layout) and the main model's `model.embed_tokens`, `model.norm` and, if untied, `lm_head`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: LlamaConfig,
        mtp: MtpConfig,
        page_size: int,
        max_len: int,
        numerics: Numerics,
    ) -> None:
        prefix = f"model.layers.{config.num_layers}."
        plus_one = mtp.norm_flavour == "1+w"
        self.config, self.mtp, self.numerics, self._page_size = config, mtp, numerics, page_size
        self._embed_Vd = tensors["model.embed_tokens.weight"].float()
        self._enorm = RmsNorm(tensors[f"{prefix}enorm.weight"], config.rms_eps, plus_one=plus_one)
        self._hnorm = RmsNorm(tensors[f"{prefix}hnorm.weight"], config.rms_eps, plus_one=plus_one)
        self._fuse = make_linear((_embedding_first(tensors[f"{prefix}eh_proj.weight"], mtp.fusion_order),), numerics)
        self._block = DecoderBlock(block_weights(tensors, prefix), config, page_size, numerics)
        self._main_norm = RmsNorm(tensors["model.norm.weight"], config.rms_eps)
        self._final_norm = self._choose_final_norm(tensors, prefix)
        self._rotations = rotations(config.head_dim, config.rope_theta, max_len)
        head_Vd = head_weight(tensors, config)
        ids = tensors.get(f"{prefix}draft_token_ids")
        self.draft_token_ids = torch.arange(config.vocab_size) if ids is None else ids.long()
        self._head = make_linear((head_Vd if ids is None else head_Vd.index_select(0, self.draft_token_ids),), numerics)

    def _choose_final_norm(self, tensors: Mapping[str, Tensor], prefix: str) -> RmsNorm | None:
        if self.mtp.final_norm_owner == "none":
            return None
        if self.mtp.final_norm_owner == "main":
            return self._main_norm
        plus_one = self.mtp.norm_flavour == "1+w"
        return RmsNorm(tensors[f"{prefix}shared_head.norm.weight"], self.config.rms_eps, plus_one=plus_one)

    def forward(
        self, hidden_Nd: Tensor, next_ids_N: Tensor, bases_N: Tensor, spans: list[Span], pool_SE: Tensor
    ) -> Tensor:
        """Run the rows of `spans` (slot = base + 1, RoPE position = base). Returns pre-final-norm rows `[N, d]`.

        `hidden_Nd` is what the configuration says a row consumes: see `fed` and `recycled`.
        """
        shared = plan_pass(spans, bases_N, self._rotations, self.config, self._page_size, self.numerics)
        embedded_Nd = self._embed_Vd.index_select(0, next_ids_N)
        if self.mtp.zero_position0:
            embedded_Nd = embedded_Nd.masked_fill((bases_N == 0).unsqueeze(1), 0.0)
        fused_Nd = self._fuse(torch.cat((self._enorm(embedded_Nd), self._hnorm(hidden_Nd)), -1))
        return self._block(fused_Nd, pool_SE, shared)

    def fed(self, hidden_Nd: Tensor) -> Tensor:
        """A target row (pre-final-norm) as the module wants it at step one."""
        return hidden_Nd if self.mtp.fed_hidden == "pre" else self._main_norm(hidden_Nd)

    def recycled(self, output_Nd: Tensor) -> Tensor:
        """The module's own row as the next recurrent step wants it."""
        norm = self._final_norm if self.mtp.recycled_hidden == "post" else None
        return output_Nd if norm is None else norm(output_Nd)

    def draft_logits(self, output_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head over the draft vocabulary: `[N, Vd]`."""
        return self._head(output_Nd if self._final_norm is None else self._final_norm(output_Nd))


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
