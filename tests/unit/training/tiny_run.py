"""A recipe, a corpus and a folder in which a run takes a second."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_v3 import CONFIG

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.joint.cli import begin
from seqmtp_serve.training.joint.corpus import read_corpus, write_corpus
from seqmtp_serve.training.joint.recipe import Optimization, Recipe
from seqmtp_serve.training.joint.trainer import JointTrainer
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import ObjectiveContract
from seqmtp_serve.training.ranks import Alone

PLAN = Optimization(
    tokens=128 * 40, seed=3, lr=1e-2, warmup_steps=4, streams_per_step=2, stream_len=64, window=24, init_std=0.1
)
RECIPE = Recipe(
    name="test",
    model=CONFIG,
    mtp=MtpConfig(num_modules=2, fed_hidden="post", recycled_hidden="post"),
    objective=ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3), (128 * 3, 0.1)))),
    optimization=PLAN,
)


def counting_documents(num: int, seed: int) -> list[list[int]]:
    """Runs of rising numbers with a step of their own: easy to learn, also two tokens ahead."""
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        start, step = rng.randrange(CONFIG.vocab_size), rng.choice((1, 2, 3))
        found.append([(start + step * i) % CONFIG.vocab_size for i in range(rng.randrange(5, 60))])
    return found


def make_corpus(folder: Path) -> Path:
    splits = {"train": counting_documents(60, 1), "held_out": counting_documents(8, 2)}
    write_corpus(folder, splits, CONFIG.vocab_size, {"source": "numbers", "licence": "none"})
    return folder


def trainer_in(folder: Path, corpus: Path, recipe: Recipe = RECIPE) -> JointTrainer:
    begin(folder, recipe)
    return JointTrainer(recipe, read_corpus(corpus, "train", CONFIG.vocab_size), folder, Alone())


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def longer(recipe: Recipe, steps: int) -> Recipe:
    plan = recipe.optimization
    return replace(recipe, optimization=replace(plan, tokens=steps * plan.tokens_per_step))
