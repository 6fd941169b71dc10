"""Shards of the main model's own continuations of training text, to train its MTP layer on.

Batch n draws its prompts and its randomness from (seed, n) alone and becomes shard n, so that what was interrupted goes
on with the very next batch.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from seqmtp_serve.errors import BadCorpus
from seqmtp_serve.training.joint.continuations import ChooseNext, continued, prompt_at
from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.rollout import draw
from seqmtp_serve.training.shards import Document, write_shard
from seqmtp_serve.training.v3.model import V3Model


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """`tokens` counts reply tokens before any is cut. Prompts of one batch are equally long, of a length drawn evenly
    between the two of `prompt_lens`. Of each batch, `hot_share` is sampled at `temperature`."""

    tokens: int
    seed: int
    prompt_lens: tuple[int, int]
    reply_len: int
    hot_share: float = 0.3
    temperature: float = 0.7
    batch: int = 64

    @property
    def batches(self) -> int:
        return max(1, -(-self.tokens // (self.batch * self.reply_len)))


def collect_samples(model: V3Model, corpus: Corpus, plan: SamplePlan, folder: Path) -> list[Path]:
    """Write what is missing of the plan's shards; returns all, in order. Raises BadCorpus for short documents."""
    if int(corpus.starts.diff().max()) <= plan.prompt_lens[1]:
        raise BadCorpus(f"no document of the corpus is longer than a prompt of {plan.prompt_lens[1]} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"own-{plan.seed}-{number:05d}.safetensors" for number in range(plan.batches)]
    with tqdm(total=plan.batches * plan.batch * plan.reply_len, unit="tok", desc="own text", mininterval=2) as bar:
        for number, path in enumerate(paths):
            if not path.exists():
                write_shard(path, _batch(model, corpus, plan, number))
            bar.update(plan.batch * plan.reply_len)
    return paths


def _batch(model: V3Model, corpus: Corpus, plan: SamplePlan, number: int) -> list[Document]:
    """One batch: its first sequences are hot."""
    rng = random.Random(f"own text/{plan.seed}/{number}")
    prompt_len = rng.randint(*plan.prompt_lens)
    room_of = [max(0, size - prompt_len) for size in corpus.starts.diff().tolist()]
    documents = rng.choices(range(len(corpus)), room_of, k=plan.batch)
    prompts = [prompt_at(corpus, (index, rng.randrange(room_of[index])), prompt_len) for index in documents]
    num_hot = round(plan.batch * plan.hot_share)
    choose = _mixed(num_hot, plan, torch.Generator().manual_seed(rng.getrandbits(62)))
    texts = continued(model, prompts, choose, reply_len=plan.reply_len, stop_loops=True)
    return [
        Document(tokens=tokens, hidden=states.bfloat16(), prompt_len=prompt_len, greedy=row >= num_hot)
        for row, (tokens, states) in enumerate(texts)
    ]


def _mixed(num_hot: int, plan: SamplePlan, generator: torch.Generator) -> ChooseNext:
    heat_B = torch.zeros(plan.batch)
    heat_B[:num_hot] = plan.temperature

    def choose(logits_BV: Tensor, position: int) -> Tensor:
        return torch.tensor(draw(logits_BV, heat_B, generator))

    return choose
