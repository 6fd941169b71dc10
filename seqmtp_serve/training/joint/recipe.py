"""What a joint run is made of: one frozen record, saved beside its checkpoints and inside what it exports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import EmptyDepth, ObjectiveContract, Reduction, Wiring


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """AdamW with warm-up and cosine decay. Lengths are in tokens of the whole batch, all ranks together.

    A step reads `streams_per_step` packed streams of `stream_len` tokens, shared out evenly over the ranks; a document
    is cut into windows of at most `window` tokens. `balance_speed` moves the gate biases until `balance_until`.
    `products`: "float32", or "bfloat16" for operands rounded to it (weights, sums and the gate stay float32).
    """

    tokens: int
    seed: int
    lr: float = 3e-3
    final_lr_share: float = 0.1
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    init_std: float = 0.02
    streams_per_step: int = 4
    stream_len: int = 1024
    window: int = 512
    balance_speed: float = 1e-3
    balance_until: int = 1 << 62
    products: str = "float32"

    def __post_init__(self) -> None:
        """Raises ValueError for a dtype that products cannot have."""
        if self.products not in ("float32", "bfloat16"):
            raise ValueError(f"products in {self.products!r}: float32 or bfloat16")

    @property
    def tokens_per_step(self) -> int:
        return self.streams_per_step * self.stream_len

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.tokens_per_step)

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (self.final_lr_share + (1 - self.final_lr_share) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`layout`: "expert" shares the routed experts out over the ranks, "data" keeps them all on each."""

    name: str
    model: DeepseekConfig
    mtp: MtpConfig
    objective: ObjectiveContract
    optimization: Optimization
    layout: str = "expert"

    def __post_init__(self) -> None:
        """Raises ValueError for a window that neither the stream nor the model's positions can hold."""
        most = min(self.optimization.stream_len, self.model.max_position)
        if self.optimization.window > most:
            raise ValueError(f"a window of {self.optimization.window} tokens: the stream and the model hold {most}")

    def record(self) -> dict[str, Any]:
        """As JSON; `recipe_from_record` reads it back."""
        return asdict(self) | {"objective_in_words": self.objective.record()}


def recipe_from_record(found: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.record`."""
    model, objective, optimization = dict(found["model"]), dict(found["objective"]), dict(found["optimization"])
    model["moe"] = MoeConfig(**model["moe"])
    model["yarn"] = YarnConfig(**model["yarn"]) if model["yarn"] else None
    phases = tuple((start, weight) for start, weight in objective.pop("schedule")["phases"])
    return Recipe(
        name=found["name"],
        model=DeepseekConfig(**model),
        mtp=MtpConfig(**found["mtp"]),
        objective=ObjectiveContract(
            schedule=LossWeightSchedule(phases=phases),
            reduction=Reduction(objective["reduction"]),
            empty_depth=EmptyDepth(objective["empty_depth"]),
            detach_trunk=objective["detach_trunk"],
            wiring=Wiring(objective["wiring"]),
        ),
        optimization=Optimization(**optimization | {"betas": tuple(optimization["betas"])}),
        layout=found["layout"],
    )
