"""The DeepSeek-V3 target (arXiv 2412.19437, section 2.1): latent attention, dense layers, then experts.

Attention is data-parallel: a process attends for its own sequences alone. The experts may be spread over the ranks of a
group; a `Dispatcher` carries rows to them. Every rank then runs every layer in step with the others, also when it has
no rows itself.

Shapes: N rows, d hidden, V vocabulary, L layers, S pool slots, E values of a cached row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.dispatch import Dispatcher, LocalDispatcher, Tally
from seqmtp_serve.model.experts import SwiGlu, SwiGluWeights, choose_gemm
from seqmtp_serve.model.layers import RmsNorm, block_weights, head_weight
from seqmtp_serve.model.linear import make_linear
from seqmtp_serve.model.mla import LatentAttention, LatentKernels, MlaPass, plan_mla
from seqmtp_serve.model.moe import MoeLayer, MoeWeights
from seqmtp_serve.model.numerics import Numerics
from seqmtp_serve.model.rope import rotation_table
from seqmtp_serve.model.yarn import inverse_frequencies, rotation_multiplier


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare:
    """The experts this process holds (None: all), and what carries rows to the others."""

    dispatcher: Dispatcher = field(default_factory=LocalDispatcher)
    experts: Sequence[int] | None = None
    dispatch: str = "local"  # the dispatcher's name in `backends/dispatch.py`


class DeepseekBlock:
    """h += attention(norm(h)); h += mlp(norm(h)), where the mlp is a dense SwiGLU or a mixture of experts."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layer: int,
        config: DeepseekConfig,
        kernels: LatentKernels,
        numerics: Numerics,
        share: ExpertShare,
    ) -> None:
        prefix = f"model.layers.{layer}."
        weight = block_weights(tensors, prefix)
        self._attention_norm = RmsNorm(weight("input_layernorm"), config.rms_eps)
        self._attention = LatentAttention(weight, config, kernels, numerics)
        self._mlp_norm = RmsNorm(weight("post_attention_layernorm"), config.rms_eps)
        self._mlp: MoeLayer | SwiGlu
        if config.is_moe(layer):
            weights = MoeWeights.read(tensors, f"{prefix}mlp.", config.moe, share.experts)
            self._mlp = MoeLayer(weights, config.moe, share.dispatcher, numerics)
        else:
            self._mlp = SwiGlu(SwiGluWeights.read(tensors, f"{prefix}mlp."), numerics)

    def __call__(self, hidden_Nd: Tensor, pool_SE: Tensor, shared: MlaPass | None) -> Tensor:
        """Returns the block's residual-completed output; writes the rows' latents to `pool_SE`.

        `shared` None: no rows. Such a rank has nothing to attend to, but its experts may have rows of other ranks.
        """
        if shared is not None:
            hidden_Nd = self._attention(self._attention_norm(hidden_Nd), pool_SE, shared).add_(hidden_Nd)
        elif isinstance(self._mlp, SwiGlu):
            return hidden_Nd
        return self._mlp(self._mlp_norm(hidden_Nd)).add_(hidden_Nd)


class DeepseekLayers:
    """Builds the family's blocks and plans their passes; see `family.Layers`. `skips_slots` as in `LatentKernels`."""

    def __init__(
        self,
        config: DeepseekConfig,
        page_size: int,
        max_len: int,
        numerics: Numerics,
        share: ExpertShare,
        *,
        skips_slots: bool = False,
    ) -> None:
        self._config, self._numerics, self._share = config, numerics, share
        self._kernels = LatentKernels.choose(config, page_size, numerics, skips_slots=skips_slots)
        frequency_C = inverse_frequencies(config.rope_head_dim, config.rope_theta, config.yarn)
        self._rotations = rotation_table(frequency_C, max_len, rotation_multiplier(config.yarn)).to(numerics.device)

    @property
    def tally(self) -> Tally:
        """What the experts of these layers did."""
        return self._share.dispatcher.tally

    @property
    def kernels(self) -> dict[str, str]:
        """The backends that compute these layers, by their words in `config.Kernels`."""
        moe, share = self._config.moe, self._share
        num_held = moe.num_experts if share.experts is None else len(share.experts)
        gemm, _ = choose_gemm(num_held, self._config.hidden_size, moe.intermediate_size, self._numerics)
        return {**self._kernels.names, "experts": gemm.name, "dispatch": share.dispatch}

    def plan(self, spans: list[Span], positions_N: Tensor) -> MlaPass | None:
        """What the layers of one pass share. None for a pass without rows."""
        if not spans:
            return None
        return plan_mla(spans, positions_N, self._rotations, self._kernels)

    def block(self, tensors: Mapping[str, Tensor], layer: int) -> DeepseekBlock:
        """The block stored under `model.layers.{layer}.`; one beyond the main layers is an MTP module's."""
        return DeepseekBlock(tensors, layer, self._config, self._kernels, self._numerics, self._share)


class DeepseekTrunk:
    """Stateless apart from weights: latents live in the pool `[L, S, E]` that a call is given."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: DeepseekConfig,
        page_size: int,
        max_len: int,
        numerics: Numerics,
        share: ExpertShare | None = None,
    ) -> None:
        self._device = numerics.device
        self._layers = DeepseekLayers(config, page_size, max_len, numerics, share or ExpertShare())
        self.tally, self.kernels = self._layers.tally, self._layers.kernels
        self._embed_Vd = tensors["model.embed_tokens.weight"].float()
        self._blocks = [self._layers.block(tensors, layer) for layer in range(config.num_layers)]
        self._norm = RmsNorm(tensors["model.norm.weight"], config.rms_eps)
        self._head = make_linear((head_weight(tensors, tied=config.tie_word_embeddings),), numerics, fine=True)

    def forward(self, token_ids: Sequence[int], spans: list[Span], pool_LSE: Tensor) -> Tensor:
        """Run the rows of `spans` (slot = position). Returns their states `[N, d]` before the final norm.

        Without spans it only takes part in the dispatch, for a rank that has no rows while others do.
        """
        positions = [torch.arange(span.start, span.start + span.num_rows) for span in spans]
        shared = self._layers.plan(spans, torch.cat(positions).to(self._device)) if spans else None
        state_Nd = self._embed_Vd.index_select(0, torch.tensor(token_ids, dtype=torch.int64, device=self._device))
        for block, pool_SE in zip(self._blocks, pool_LSE.unbind(0), strict=True):
            state_Nd = block(state_Nd, pool_SE, shared)
        return state_Nd

    def features(self, state_Nd: Tensor) -> Tensor:
        """The hidden rows `[N, d]` before the final norm: what an MTP module is fed."""
        return state_Nd

    def logits(self, state_Nd: Tensor) -> Tensor:
        """Final norm, exactly once, then the head: `[N, V]`."""
        return self._head(self._norm(state_Nd))
