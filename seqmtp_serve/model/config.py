"""What a model is, as numbers: the dense llama trunk and the MTP module fitted to it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A dense decoder: grouped-query attention, SwiGLU, RMSNorm, `rotate_half` RoPE (as Hugging Face llama).

    `max_position` is the longest context the weights were trained for, in tokens.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position: int = 2048
    tie_word_embeddings: bool = True

    @property
    def num_query_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Width of the query projection: `num_heads * head_dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection: `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim

    @property
    def row_heads(self) -> int:
        """Heads side by side in a row of the fused projection: queries, keys, values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def cache_row_size(self) -> int:
        """Values cached a token and layer: keys, then values."""
        return 2 * self.kv_size

    @property
    def value_offset(self) -> int:
        """Where the values begin in a cached row."""
        return self.kv_size

    @property
    def softmax_scale(self) -> float:
        """What a score is multiplied by before the softmax."""
        return 1.0 / sqrt(self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """The seven things about an MTP module that no tensor shape reveals; they are declared, never guessed.

    `fusion_order` "eh" means eh_proj multiplies [enorm(E(x)) ; hnorm(h)], "he" the other order. `norm_flavour` "1+w" is
    the zero-centred RMSNorm. `fed_hidden` and `recycled_hidden` say whether the hidden row taken from the target, and
    the module's own row taken by the next recurrent step, are before or after the final norm. `zero_position0` zeroes
    E(x_1) in the row of base 0. `final_norm_owner` owns the norm before the head ("none": there is none).
    `draft_vocab_size` counts the frequency-ranked sub-vocabulary the module drafts over (0: the whole vocabulary).

    `rollout` names what makes drafts beyond the first. "recurrent": step s runs module s mod `num_modules` on the row
    of the step before, any number of steps. "chain": draft k comes from module k alone, as in training with depth D, so
    there are at most `num_modules` drafts.
    """

    num_modules: int = 1
    fusion_order: Literal["eh", "he"] = "eh"
    norm_flavour: Literal["w", "1+w"] = "w"
    fed_hidden: Literal["pre", "post"] = "pre"
    recycled_hidden: Literal["pre", "post"] = "pre"
    zero_position0: bool = False
    final_norm_owner: Literal["main", "mtp", "none"] = "main"
    draft_vocab_size: int = 0
    rollout: Literal["recurrent", "chain"] = "recurrent"
