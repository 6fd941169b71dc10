"""YaRN (Peng et al., arXiv 2309.00071) as released DeepSeek-V3 checkpoints use it: rotary positions of a model trained
on `original_max_position` tokens, stretched by `factor`.

Fast pairs keep their frequency, slow ones are divided by the factor, and a ramp joins the two. The entropy that longer
contexts add is taken back in two places that must not be mixed up: cos and sin are multiplied by
m(mscale) / m(mscale_all_dim), which is 1 for the released values, and scores by m(mscale_all_dim) squared.

Shapes: C = rope_head_dim / 2 rotated pairs.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor

from seqmtp_serve.model.deepseek_config import DeepseekConfig, YarnConfig


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """Radians a position for each of the `dim / 2` rotated pairs: `[C]`, float64."""
    base_C = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return base_C
    low, high = ramp_ends(dim, theta, yarn)
    ramp_C = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp_(0, 1)
    return base_C / yarn.factor * ramp_C + base_C * (1 - ramp_C)


def ramp_ends(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """The last pair that keeps its frequency, and the first that is divided by the whole factor."""
    low = floor(pair_of_turns(dim, theta, yarn.beta_fast, yarn.original_max_position))
    high = ceil(pair_of_turns(dim, theta, yarn.beta_slow, yarn.original_max_position))
    return max(low, 0), min(high, dim - 1)


def pair_of_turns(dim: int, theta: float, turns: float, max_position: int) -> float:
    """The (fractional) pair that makes `turns` full turns over `max_position` tokens."""
    return dim * log(max_position / (turns * 2 * pi)) / (2 * log(theta))


def magnitude(factor: float, mscale: float) -> float:
    """m = 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def rotation_multiplier(yarn: YarnConfig | None) -> float:
    """What cos and sin are multiplied by."""
    if yarn is None:
        return 1.0
    return magnitude(yarn.factor, yarn.mscale) / magnitude(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: DeepseekConfig) -> float:
    """What a score is multiplied by before the softmax: 1 / sqrt(query_head_dim), times m squared under YaRN.

    Forgetting m leaves fluent text behind, so no look at outputs shows it.
    """
    scale = 1.0 / sqrt(config.query_head_dim)
    if config.yarn is None:
        return scale
    return scale * magnitude(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
