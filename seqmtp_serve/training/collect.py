"""Run the sampler over a stream of tasks and leave shards behind, until enough tokens or no tasks are left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.training.compute_dtype import faster_dtype
from seqmtp_serve.training.rollout import Encode, Sampler, Task
from seqmtp_serve.training.shards import Document, write_shards
from seqmtp_serve.training.target import FrozenTarget


def collect(
    checkpoint: Checkpoint,
    encode: Encode,
    tasks: Iterator[Task],
    folder: Path,
    *,
    name: str,
    num_slots: int,
    max_len: int,
    seed: int,
    max_tokens: int,
    shard_tokens: int,
) -> None:
    """Write ``folder/NAME-00000.safetensors`` and on; ``max_tokens`` counts sampled tokens.

    What has finished is kept when the keyboard interrupts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = FrozenTarget(checkpoint.dense_config, checkpoint.target_tensors(), numerics="rotated")
    sampler = Sampler(
        target,
        encode,
        eos_id=checkpoint.eos_token_ids[0],
        num_slots=num_slots,
        max_len=max_len,
        seed=seed,
        cache_dtype=faster_dtype(),
    )
    started = time.time()
    with torch.inference_mode(), tqdm(total=max_tokens, unit="tok", desc=name, mininterval=10) as progress:

        def documents() -> Iterator[Document]:
            for _, document in sampler.run(tasks):
                progress.update(sampler.num_sampled - progress.n)
                yield document
                if sampler.num_sampled >= max_tokens:
                    return

        written = write_shards(folder, name, documents(), shard_tokens=shard_tokens)
    print(f"{name}: {sampler.num_sampled} tokens sampled in {time.time() - started:.0f} s, {written} shards")
