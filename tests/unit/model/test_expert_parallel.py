"""Groups of 1, 2 and 4 real processes compute a layer bit for bit as one process that holds every expert.

On GPUs, over NCCL, to within rounding: they have other kernels than the one process, which computes on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ep_scenarios import SCENARIOS, Scenario, whole_layer
from moe_fixture import SIZE
from safetensors.torch import load_file
from torch import Tensor

from seqmtp_serve.model.expert_placement import experts_of
from seqmtp_serve.model.moe_naive import naive_route

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ran:
    """What each rank of a group left."""

    device: str
    rows: list[dict[str, Tensor]]
    tallies: list[dict[str, dict[str, int]]]

    @property
    def world_size(self) -> int:
        return len(self.rows)


def on_gpus(count: int) -> Any:
    few = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"this machine has no {count} CUDA devices")
    return pytest.param(("cuda", count), marks=few)


@pytest.fixture(
    scope="module", params=[("cpu", 1), ("cpu", 2), ("cpu", 4), ("pretended", 2), on_gpus(1), on_gpus(2)], ids=str
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    (device, world_size), folder = request.param, tmp_path_factory.mktemp("group")
    path = os.pathsep.join((str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "ep_rank.py"), str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world_size), device], env=environment, stderr=subprocess.PIPE)
        for rank in range(world_size)
    ]
    said = [rank.communicate()[1].decode() for rank in ranks]
    ended = [rank.returncode for rank in ranks]
    if any(ended):
        each = zip(ended, said, strict=True)
        pytest.fail("\n".join(f"rank {rank} ended with {code}: {text}" for rank, (code, text) in enumerate(each)))
    return Ran(
        device=device,
        rows=[load_file(folder / f"rows-{rank}.safetensors") for rank in range(world_size)],
        tallies=[json.loads((folder / f"tallies-{rank}.json").read_text()) for rank in range(world_size)],
    )


@pytest.mark.covers(101)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_group_has_the_bits_of_one_process(ran: Ran, name: str):
    found = torch.cat([rows[name] for rows in only_with(ran, name).rows])
    if name == "one token" and ran.world_size > 1:
        assert [len(rows[name]) for rows in ran.rows] == [1] + [0] * (ran.world_size - 1)
    expected = whole_layer(SCENARIOS[name])[: len(found)]
    assert torch.equal(found, expected) if ran.device != "cuda" else torch.allclose(found, expected, atol=1e-4)
    busy = [rank for rank in range(ran.world_size) if rank not in SCENARIOS[name].idle]
    assert len(found) == (SCENARIOS[name].num_tokens if busy else 0)


@pytest.mark.covers(100)
@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_counts_its_own_work_and_the_bytes_it_sent(ran: Ran, name: str):
    for rank in range(only_with(ran, name).world_size):
        assert ran.tallies[rank][name] == expected_tally(SCENARIOS[name], rank, ran.world_size)


def only_with(ran: Ran, name: str) -> Ran:
    if ran.device != "cpu" and SCENARIOS[name].numerics.int8_levels:
        pytest.skip("int8 products are a CPU's")
    return ran


def expected_tally(scenario: Scenario, rank: int, world_size: int) -> dict[str, int]:
    """By the equations, token by token."""
    weights, config = scenario.weights(), scenario.config
    chosen = [
        [list(naive_route(token.double(), weights, config)) for token in scenario.share(each, world_size)]
        for each in range(world_size)
    ]
    parts = [experts_of(each, world_size, config.num_experts) for each in range(world_size)]
    here = [(source, expert) for source, own in enumerate(chosen) for token in own for expert in token]
    here = [(source, expert) for source, expert in here if expert in parts[rank]]
    others = [each for each in range(world_size) if each != rank]
    rows_out = sum(any(expert in parts[other] for expert in token) for token in chosen[rank] for other in others)
    pairs_back = sum(source != rank for source, _ in here)
    return {
        "num_passes": 1,
        "num_pairs": len(here),
        "num_touched": len({expert for _, expert in here}),
        "sent_bytes": 16 * len(others) + rows_out * 4 * (SIZE + config.top_k) + pairs_back * 4 * SIZE,
    }


def test_the_scenarios_have_ranks_without_rows_and_experts_without_tokens(ran: Ran):
    if ran.world_size == 1:
        return
    assert len(ran.rows[0]["rank 0 idle"]) == 0 < len(ran.rows[1]["rank 0 idle"])
    everything = [tallies["four experts get everything"]["num_pairs"] for tallies in ran.tallies]
    assert everything == [37 * 4] + [0] * (ran.world_size - 1)
    assert ran.tallies[0]["fewer experts than ranks"]["num_pairs"] == 0 or ran.world_size == 2
