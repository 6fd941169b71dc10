"""The ranks of `seqmtp bench engine --ep n`: this process is rank 0, the others are child processes on loopback.

Each holds its share of the experts and of every batch, and takes the same steps; a rank without sequences in a small
batch takes them without rows. The others' counts and ledgers come back as JSON on their standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from seqmtp_serve import rank_group
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig, Kernels
from seqmtp_serve.errors import InternalError, InvalidField
from seqmtp_serve.model.backends.dispatch import DISPATCH, DispatchCase
from seqmtp_serve.model.deepseek import ExpertShare
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.model.device import usable_device
from seqmtp_serve.model.expert_placement import experts_of
from services.bench.engine import Cell, EngineRun, EngineWorkload
from services.target.process_group import form, join_rendezvous, open_rendezvous

HOST = "127.0.0.1"
END_WITHIN_S = 60.0


def run_ranks(
    checkpoint: Checkpoint, mtp: str | None, workload: EngineWorkload, config: EngineConfig, num_ranks: int
) -> tuple[dict[tuple[int, int], Cell], list[dict[str, Any]], Mapping[str, str]]:
    """Cells as rank 0 timed them, with what the others did, each rank's ledger, and rank 0's kernels.

    Raises InvalidField for a model without experts, InternalError when a rank ended without an answer.
    """
    if not isinstance(checkpoint.config, DeepseekConfig):
        raise InvalidField(f"{checkpoint.name} has no experts to spread over {num_ranks} ranks", param="ep")
    store, address = open_rendezvous(HOST, num_ranks)
    task = {"model": str(checkpoint.path), "mtp": mtp, "workload": asdict(workload), "config": asdict(config)}
    with _children(task | {"address": address, "num_ranks": num_ranks}, num_ranks) as children:
        _form(store, config, checkpoint, 0, num_ranks)
        try:
            cells, memory, kernels = _run(checkpoint, workload, config, 0, num_ranks)
        finally:
            rank_group.end()
        answers = [json.loads(_answer(child)) for child in children]
    for answer in answers:
        for batch, depth, *counts in answer["cells"]:
            cells[batch, depth].elsewhere.append((counts[0], counts[1], counts[2]))
    return cells, [memory, *(answer["memory"] for answer in answers)], kernels


def _case(config: EngineConfig, checkpoint: Checkpoint, num_ranks: int) -> DispatchCase:
    assert isinstance(checkpoint.config, DeepseekConfig)
    kind = config.device.partition(":")[0]
    return DispatchCase(world_size=num_ranks, num_experts=checkpoint.config.moe.num_experts, device=kind)


def _device(config: EngineConfig, rank: int) -> str:
    return f"cuda:{rank}" if config.device == "cuda" else config.device


def _form(store: dist.Store, config: EngineConfig, checkpoint: Checkpoint, rank: int, num_ranks: int) -> None:
    library = DISPATCH.choose(_case(config, checkpoint, num_ranks), named=config.kernels.dispatch).library
    form(store, rank, num_ranks, HOST, library, usable_device(_device(config, rank)))


def _run(
    checkpoint: Checkpoint, workload: EngineWorkload, config: EngineConfig, rank: int, num_ranks: int
) -> tuple[dict[tuple[int, int], Cell], dict[str, Any], Mapping[str, str]]:
    case = _case(config, checkpoint, num_ranks)
    backend, own = DISPATCH.choose(case, named=config.kernels.dispatch), experts_of(rank, num_ranks, case.num_experts)
    dispatcher = backend.make(case)
    share = ExpertShare(dispatcher=dispatcher, experts=own, dispatch=backend.name)
    config = replace(config, device=_device(config, rank))
    run = EngineRun.open(checkpoint, workload, config, rank=rank, num_ranks=num_ranks, share=share)
    cells = run.cells()
    memory = run.memory()
    return cells, memory | {"experts": len(own), "sent": dispatcher.tally.sent_bytes}, run.engine.info().kernels


@contextmanager
def _children(task: dict[str, Any], num_ranks: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks 1 and above. On leaving, none is left."""
    children = []
    try:
        for rank in range(1, num_ranks):
            child = subprocess.Popen(
                [sys.executable, "-m", "services.bench.engine_ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(child)
            assert child.stdin is not None
            child.stdin.write(json.dumps(task | {"rank": rank}))
            child.stdin.close()
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    text = child.stdout.read()
    if child.wait(END_WITHIN_S) != 0:
        raise InternalError(f"a rank of the bench ended with code {child.returncode}")
    return text


def _config(fields: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**fields | {"kernels": Kernels(**fields["kernels"])})


def main() -> None:
    """A rank above 0: its task on standard input, its answer on standard output."""
    task = json.load(sys.stdin)
    rank, num_ranks = task["rank"], task["num_ranks"]
    names = ("batches", "depths")
    workload = EngineWorkload(**task["workload"] | {name: tuple(task["workload"][name]) for name in names})
    checkpoint, config = open_checkpoint(task["model"], task["mtp"]), _config(task["config"])
    _form(join_rendezvous(task["address"], num_ranks), config, checkpoint, rank, num_ranks)
    try:
        cells, memory, _ = _run(checkpoint, workload, config, rank, num_ranks)
    finally:
        rank_group.end()
    counts = [(cell.batch, cell.depth, *cell.counts) for cell in cells.values()]
    print(json.dumps({"cells": counts, "memory": memory}))


if __name__ == "__main__":
    main()
