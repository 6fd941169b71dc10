"""Run as `python gloo_pair.py RANK FOLDER`: one of two gloo ranks; leaves what it computed in the folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_v3 import random_documents, tiny_v3
from torch import Tensor

from seqmtp_serve.training.joint_terms import joint_terms
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import Counts, ObjectiveContract, Reduction, counts_of, mtp_loss, objective
from seqmtp_serve.training.packing import PackedStream, compile_stream, pack
from seqmtp_serve.training.ranks import Joined, Ranks
from seqmtp_serve.training.v3.exchange import Everywhere, Exchange, Sharded
from seqmtp_serve.training.v3.experts import MixtureOfExperts
from seqmtp_serve.training.v3.model import V3Model

CONTRACT = ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3),)), reduction=Reduction.VALID_ROW_MEAN)
# Rank 1 has far fewer rows, and at depth 2 none at all: what a mean of means would get wrong.
STREAMS = [pack(random_documents([9, 7], seed=1)), pack(random_documents([2, 1], seed=2))]


def accumulate(model: V3Model, streams: Sequence[PackedStream], ranks: Ranks) -> float:
    """Gradients of this rank's shares of the objective; returns their sum."""
    compiled = [compile_stream(stream, 2) for stream in streams]
    totals = counts_of(compiled, ranks)
    value = 0.0
    for stream in compiled:
        main, depths = joint_terms(model, stream, CONTRACT)
        share = objective(main, depths, totals, CONTRACT, 0.3)
        share.backward()
        value += float(share.detach())
    return value


def expert_parameters(model: V3Model) -> set[int]:
    """Identities of the parameters of routed experts."""
    moe = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return {id(parameter) for layer in moe for parameter in layer.experts.parameters()}


def gradients(model: V3Model) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Joined(rank, 2, folder / "rendezvous", timeout_s=60)
    nll, rows = [(3.0, 3), (5.0, 1)][rank]
    total_nll, total_rows = ranks.summed([nll, rows])
    share = mtp_loss([torch.tensor(nll)], Counts(length=8, main=4, depths=(int(total_rows),)), CONTRACT, 1.0)
    found: dict[str, object] = {
        "sums": [total_nll, total_rows],
        "valid_mean": ranks.summed([float(share)])[0],
        "mean_of_means": ranks.summed([nll / rows])[0] / 2,
    }
    layouts: list[tuple[str, Exchange]] = [("data", Everywhere()), ("expert", Sharded())]
    for name, exchange in layouts:
        model = tiny_v3(2, exchange=exchange)
        found[f"objective_{name}"] = ranks.summed([accumulate(model, STREAMS[rank : rank + 1], ranks)])[0]
        mine = expert_parameters(model) if name == "expert" else set()
        ranks.sum_gradients(p for p in model.parameters() if id(p) not in mine)
        save_file(gradients(model), folder / f"{name}-{rank}.safetensors")
        found[f"load_{name}"] = [
            layer.gate.load_E.tolist() for layer in model.modules() if isinstance(layer, MixtureOfExperts)
        ]
        if isinstance(exchange, Sharded):
            found["sent_bytes"] = exchange.sent_bytes
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
