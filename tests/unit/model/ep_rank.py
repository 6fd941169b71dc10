"""One process of a group that computes a mixture-of-experts layer: `python ep_rank.py FOLDER RANK WORLD_SIZE DEVICE`.

DEVICE is cpu, pretended (gloo carries what it says lies on a GPU) or cuda, over NCCL. It reads the scenarios of
`ep_scenarios.py`, keeps its own experts only, and leaves its rows and counters in FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from ep_scenarios import SCENARIOS, Scenario
from safetensors.torch import save_file

from seqmtp_serve import rank_group
from seqmtp_serve.model.all_to_all import AllToAllDispatcher
from seqmtp_serve.model.expert_placement import experts_of
from seqmtp_serve.model.experts import SwiGluWeights
from seqmtp_serve.model.moe import MoeLayer, MoeWeights
from tests.unit.pretend_device import pretending


def main(folder: Path, rank: int, world_size: int, device: str) -> None:
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank if device == "cuda" else 0)
    is_nccl = device == "cuda"
    rank_group.begin(
        "nccl" if is_nccl else "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        device_id=place if is_nccl else None,
    )
    rows, tallies = {}, {}
    for name, scenario in SCENARIOS.items():
        if scenario.numerics.int8_levels and device != "cpu":
            continue
        with pretending() if device == "pretended" else nullcontext():
            rows[name], tallies[name] = run(scenario, rank, world_size, place)
    save_file(rows, folder / f"rows-{rank}.safetensors")
    (folder / f"tallies-{rank}.json").write_text(json.dumps(tallies))
    rank_group.end()


def run(scenario: Scenario, rank: int, world_size: int, place: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
    config = scenario.config
    own = moved(scenario.weights(), experts_of(rank, world_size, config.num_experts), place)
    dispatcher = AllToAllDispatcher(config.num_experts)
    layer = MoeLayer(own, config, dispatcher, replace(scenario.numerics, device=place))
    rows = layer(scenario.share(rank, world_size).to(place))
    counted = asdict(dispatcher.tally.settle())
    del counted["outstanding"]
    return rows.cpu(), counted


def moved(weights: MoeWeights, experts: Iterable[int], place: torch.device) -> MoeWeights:
    """The layer on a device, with these experts alone."""

    def swiglu(one: SwiGluWeights) -> SwiGluWeights:
        parts = (one.gate_Fd.to(place), one.up_Fd.to(place), one.down_dF.to(place))
        return SwiGluWeights(gate_Fd=parts[0], up_Fd=parts[1], down_dF=parts[2])

    return MoeWeights(
        gate_Ed=weights.gate_Ed.to(place),
        bias_E=weights.bias_E.to(place),
        experts={expert: swiglu(weights.experts[expert]) for expert in experts},
        shared=None if weights.shared is None else swiglu(weights.shared),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
