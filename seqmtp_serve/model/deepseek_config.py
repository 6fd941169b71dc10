"""What a DeepSeek-V3-layout model is, as numbers: MLA, a mixture of experts, YaRN. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """The YaRN contract of a checkpoint (arXiv 2309.00071; `rope_scaling` of the released config.json).

    `original_max_position` is the context, in tokens, before scaling by `factor`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The routed and shared experts of a layer, and its `noaux_tc` gate (arXiv 2412.19437, section 2.1.2).

    `intermediate_size` is one expert's; the shared experts are one SwiGLU of `num_shared * intermediate_size`.
    """

    num_experts: int
    num_shared: int
    top_k: int
    intermediate_size: int
    num_groups: int = 1
    top_k_groups: int = 1
    normalise_weights: bool = True
    routed_scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """A DeepSeek-V3-layout decoder: multi-head latent attention, `num_dense_layers` dense layers, then MoE layers.

    `q_lora_rank` 0 means one full query projection. `max_position` is the longest context of the weights, in tokens.
    `yarn` None means plain rotary positions. Rotary pairs are interleaved: (x0, x1), (x2, x3), …
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    num_dense_layers: int
    moe: MoeConfig
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position: int = 4096
    yarn: YarnConfig | None = None
    tie_word_embeddings: bool = False

    @property
    def query_head_dim(self) -> int:
        """Width of one head's query and key: the part without positions and the rotary part."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def query_size(self) -> int:
        """Width of the query projection: `num_heads * query_head_dim`."""
        return self.num_heads * self.query_head_dim

    @property
    def latent_size(self) -> int:
        """Values cached a token and layer: the normalised latent and the rotated shared key."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def cache_row_size(self) -> int:
        """Values cached a token and layer, under the name every family has for it."""
        return self.latent_size

    def is_moe(self, layer: int) -> bool:
        """Whether main layer `layer`, or any MTP layer (`layer >= num_layers`), has routed experts."""
        return layer >= self.num_dense_layers
