"""A trainable model of the released DeepSeek-V3 layout: its state_dict is a checkpoint, MTP layers included.

Every part is a function of packed rows: the main model's once, then each MTP depth's, fed with the state of the depth
before. States are before the final norm; `logits` applies it, exactly once.

Shapes: N rows, d hidden, V vocabulary, C rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.rope import rotation_table
from seqmtp_serve.model.yarn import inverse_frequencies, rotation_multiplier
from seqmtp_serve.training.packing import RowTensors
from seqmtp_serve.training.v3.block import Block, MtpLayer, SharedHead
from seqmtp_serve.training.v3.exchange import Everywhere, Exchange
from seqmtp_serve.training.v3.products import FAST, Arithmetic, RmsNorm, RowLinear, normalised, product


class Trunk(nn.Module):
    """What the released names call `model`: embedding, main and MTP layers, final norm."""

    def __init__(
        self, config: DeepseekConfig, mtp: MtpConfig, arithmetic: Arithmetic, exchange: Exchange, lm_head: RowLinear
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = RmsNorm(config.hidden_size, config.rms_eps)
        layers: list[Block] = [Block(config, n, arithmetic, exchange) for n in range(config.num_layers)]
        for n in range(config.num_layers, config.num_layers + mtp.num_modules):
            norm = self.norm if mtp.final_norm_owner == "main" else RmsNorm(config.hidden_size, config.rms_eps)
            head = SharedHead(norm, lm_head)
            layers.append(MtpLayer(config, n, arithmetic, exchange, mtp, self.embed_tokens, head))
        self.layers = nn.ModuleList(layers)


class V3Model(nn.Module):
    """The main model and its `mtp.num_modules` sequential MTP layers. Raises ValueError for what training cannot do."""

    def __init__(
        self,
        config: DeepseekConfig,
        mtp: MtpConfig,
        *,
        arithmetic: Arithmetic = FAST,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__()
        if config.tie_word_embeddings:
            raise ValueError("training supports no head tied to the embedding: the released layout unties them")
        if mtp.norm_flavour != "w" or mtp.final_norm_owner == "none" or mtp.draft_vocab_size:
            raise ValueError("training supports plain gains, a final norm and the whole vocabulary only")
        self.config, self.mtp, self.arithmetic = config, mtp, arithmetic
        self.lm_head = RowLinear(config.hidden_size, config.vocab_size, arithmetic)
        self.model = Trunk(config, mtp, arithmetic, exchange or Everywhere(), self.lm_head)
        self.rotations = rotation_table(
            inverse_frequencies(config.rope_head_dim, config.rope_theta, config.yarn),
            config.max_position,
            rotation_multiplier(config.yarn),
        )

    def mtp_layer(self, depth: int) -> MtpLayer:
        """The module of `depth`, from 1."""
        layer = self.model.layers[self.config.num_layers + depth - 1]
        assert isinstance(layer, MtpLayer)
        return layer

    def main_states(self, rows: RowTensors) -> Tensor:
        """h^0 of the main model's rows: `[N, d]`, before the final norm."""
        hidden_Nd: Tensor = self.model.embed_tokens(rows.tokens_N)
        rotation_NC = self.rotations[rows.positions_N]
        for layer in self.model.layers[: self.config.num_layers]:
            hidden_Nd = layer(hidden_Nd, rotation_NC, rows.spans)
        return hidden_Nd

    def mtp_states(self, depth: int, previous_Nd: Tensor, rows: RowTensors, embed_Vd: Tensor | None = None) -> Tensor:
        """h^k of the rows of `depth` from the states one depth up (all of them: the rows gather their own).

        `embed_Vd` stands in for the layer's embedding (a view of it, to observe its gradient).
        """
        layer = self.mtp_layer(depth)
        embed_Vd = layer.embed_tokens.weight if embed_Vd is None else embed_Vd
        embedded_Nd = embed_Vd[rows.tokens_N]
        if self.mtp.zero_position0:
            embedded_Nd = embedded_Nd.masked_fill((rows.positions_N == 0)[:, None], 0.0)
        fed_Nd = previous_Nd[rows.previous_N]
        if self.mtp.fed_hidden == "post":
            norm = self.model.norm if depth == 1 else self.mtp_layer(depth - 1).shared_head.norm
            fed_Nd = norm(fed_Nd)
        out_Nd: Tensor = layer(layer.fused(fed_Nd, embedded_Nd), self.rotations[rows.positions_N], rows.spans)
        return out_Nd

    def logits(self, hidden_Nd: Tensor, depth: int = 0, head_Vd: Tensor | None = None) -> Tensor:
        """Final norm, once, then the head: `[N, V]`. `depth` says whose states they are."""
        norm = self.mtp_layer(depth).shared_head.norm if depth else self.model.norm
        head = self.mtp_layer(depth).shared_head.head if depth else self.lm_head
        normed_Nd = normalised(hidden_Nd, norm.weight, norm.eps)
        return product(normed_Nd, head.weight if head_Vd is None else head_Vd, self.arithmetic)


def initialise(model: V3Model, *, seed: int, std: float = 0.02) -> None:
    """Normal weights for every matrix, in order of name: the same values however the experts are shared out.

    Each matrix draws from a generator of its own, keyed by the seed and its name; gains stay 1 and biases 0.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=_generator(seed, name)) * std)


def _generator(seed: int, name: str) -> torch.Generator:
    key = sum((at + 1) * byte for at, byte in enumerate(name.encode())) + seed * 1_000_003
    return torch.Generator().manual_seed(key)
