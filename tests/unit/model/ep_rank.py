"""One process of a group that computes a mixture-of-experts layer: `python ep_rank.py FOLDER RANK WORLD_SIZE`.

It reads the scenarios of `ep_scenarios.py`, keeps its own experts only, and leaves its rows and counters in FOLDER.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from ep_scenarios import SCENARIOS, Scenario
from safetensors.torch import save_file

from seqmtp_serve.model.all_to_all import AllToAllDispatcher
from seqmtp_serve.model.expert_placement import experts_of
from seqmtp_serve.model.moe import MoeLayer


def main(folder: Path, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size)
    rows, tallies = {}, {}
    for name, scenario in SCENARIOS.items():
        rows[name], tallies[name] = run(scenario, rank, world_size)
    save_file(rows, folder / f"rows-{rank}.safetensors")
    (folder / f"tallies-{rank}.json").write_text(json.dumps(tallies))
    dist.destroy_process_group()


def run(scenario: Scenario, rank: int, world_size: int) -> tuple[torch.Tensor, dict[str, int]]:
    whole, config = scenario.weights(), scenario.config
    own = {expert: whole.experts[expert] for expert in experts_of(rank, world_size, config.num_experts)}
    dispatcher = AllToAllDispatcher(config.num_experts)
    layer = MoeLayer(replace(whole, experts=own), config, dispatcher, scenario.numerics)
    return layer(scenario.share(rank, world_size)), asdict(dispatcher.tally)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
