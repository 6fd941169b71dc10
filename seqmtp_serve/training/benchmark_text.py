"""The target's own replies to benchmark prompts, made once and kept: for measuring only, never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.training.chat import REPLY_OPENS, USER_OPENS, encoder
from seqmtp_serve.training.compute_dtype import faster_dtype
from seqmtp_serve.training.rollout import Sampler, Task
from seqmtp_serve.training.shards import Document, read_shard, write_shard
from seqmtp_serve.training.target import FrozenTarget

_CONTEXT = 2048
_ROOMS = ((448, 96), (1152, 40), (_CONTEXT, 16))  # slot length, slots: short prompts do not pay for long ones


def own_replies(
    checkpoint: Checkpoint, prompts: Sequence[str], cache: Path, *, max_reply: int, temperature: float = 0.0
) -> list[Document]:
    """One document a prompt, in their order; a prompt too long for the context loses its end. Temperature 0: greedy."""
    if cache.exists():
        return read_shard(cache)

    encode = encoder(checkpoint)

    around = len(encode(USER_OPENS)) + len(encode(REPLY_OPENS))
    turns = [encode(text)[: _CONTEXT - max_reply - around] for text in prompts]
    target = FrozenTarget(checkpoint.dense_config, checkpoint.target_tensors(), numerics="rotated")
    found: dict[int, Document] = {}
    lower = 0
    for max_len, num_slots in _ROOMS:
        inside = [i for i, turn in enumerate(turns) if lower < len(turn) + around + max_reply <= max_len]
        lower = max_len
        if not inside:
            continue
        sampler = Sampler(
            target,
            encode,
            eos_id=checkpoint.eos_token_ids[0],
            num_slots=min(num_slots, len(inside)),
            max_len=max_len,
            seed=0,
            cache_dtype=faster_dtype(),
        )
        order = iter(inside)
        jobs = (
            Task(prompt=turns[i], temperature=temperature, max_reply=max_reply, stop_loops=False, label=i)
            for i in order
        )
        with torch.inference_mode(), tqdm(total=len(inside), desc=f"replies in {max_len}") as progress:
            for label, document in sampler.run(jobs):
                found[label] = document
                progress.update()
    documents = [found[i] for i in range(len(prompts))]
    write_shard(cache, documents)
    return documents
