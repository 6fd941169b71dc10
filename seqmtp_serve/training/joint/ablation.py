"""Does the main model gain from extra targets, or from the chain that predicts them? Four arms at equal compute.

    next token        no MTP loss
    one target        one module: x(i+2)
    two, sequential   two modules in a chain: x(i+2), x(i+3)
    two, independent  the same two blocks, each fed with the trunk alone: the same targets, no chain

The last two differ in nothing but the chain: same blocks, labels and compute. Against the first two, an arm pays for
its modules with fewer steps. What is compared is the main model alone, on held-out documents, over several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.training.joint.corpus import read_corpus
from seqmtp_serve.training.joint.evaluate import evaluate
from seqmtp_serve.training.joint.recipe import Recipe
from seqmtp_serve.training.joint.trainer import JointTrainer
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import Wiring
from seqmtp_serve.training.ranks import Alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`targets` beyond the next token; 0 trains without an MTP loss (its one module is idle and costs nothing)."""

    name: str
    targets: int
    wiring: Wiring = Wiring.SEQUENTIAL


ARMS = (
    Arm(name="next token", targets=0),
    Arm(name="one target", targets=1),
    Arm(name="two, sequential", targets=2),
    Arm(name="two, independent", targets=2, wiring=Wiring.INDEPENDENT),
)


def cost_of_token(config: DeepseekConfig, targets: int) -> int:
    """Multiply-adds of one token's forward pass, the scores of attention left out. Norms and gates count as nothing."""
    d, heads, moe = config.hidden_size, config.num_heads, config.moe
    query = heads * config.query_head_dim
    queries = d * config.q_lora_rank + config.q_lora_rank * query if config.q_lora_rank else d * query
    values = config.kv_lora_rank * heads * (config.nope_head_dim + config.v_head_dim)
    attention = queries + d * config.latent_size + values + heads * config.v_head_dim * d
    experts = 3 * d * moe.intermediate_size * (moe.top_k + moe.num_shared)
    dense = 3 * d * config.intermediate_size
    head = d * config.vocab_size
    main = sum(attention + (experts if config.is_moe(n) else dense) for n in range(config.num_layers)) + head
    return main + targets * (2 * d * d + attention + experts + head)


def arm_recipe(base: Recipe, arm: Arm, seed: int, weight: float) -> Recipe:
    """The arm without modules reads `base.optimization.tokens`; the others read what the same compute buys."""
    plain, paid = (cost_of_token(base.model, targets) for targets in (0, arm.targets))
    plan = replace(base.optimization, seed=seed, tokens=base.optimization.tokens * plain // paid)
    schedule = LossWeightSchedule(phases=((0, weight if arm.targets else 0.0),))
    return replace(
        base,
        name=f"{base.name} / {arm.name}",
        mtp=replace(base.mtp, num_modules=max(1, arm.targets)),
        objective=replace(base.objective, schedule=schedule, wiring=arm.wiring),
        optimization=plan,
    )


def ablate(
    base: Recipe, corpus: Path, out: Path, *, seeds: Sequence[int], weight: float, most_tokens: int
) -> list[dict[str, Any]]:
    """Train every arm with every seed; one entry an arm: held-out main NLL by seed, its mean and standard error."""
    train, held_out = (read_corpus(corpus, split, base.model.vocab_size) for split in ("train", "held_out"))
    found = []
    for arm in ARMS:
        losses, recipe = [], arm_recipe(base, arm, seeds[0], weight)
        for seed in seeds:
            recipe = arm_recipe(base, arm, seed, weight)
            folder = out / f"{arm.name.replace(', ', '-').replace(' ', '-')}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            trainer = JointTrainer(recipe, train, folder, Alone())
            for _ in trainer.run(save_every_s=600):
                pass
            window = recipe.optimization.window
            result = evaluate(trainer.model.eval(), held_out, window=window, most_tokens=most_tokens)
            losses.append(result["main_only"]["nll"])
        found.append(
            {
                "arm": arm.name,
                "targets": arm.targets,
                "wiring": str(arm.wiring),
                "tokens": recipe.optimization.steps * recipe.optimization.tokens_per_step,
                "main_nll": losses,
                "mean": statistics.mean(losses),
                "standard_error": statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
            }
        )
    return found
