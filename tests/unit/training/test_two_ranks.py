"""Two gloo ranks give the gradients of one process, data-parallel and expert-parallel, with unequal numbers of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pair import CONTRACT, STREAMS, accumulate, gradients
from safetensors.torch import load_file
from tiny_v3 import CONFIG, tiny_v3
from torch import Tensor

from seqmtp_serve.training.packing import compile_stream
from seqmtp_serve.training.ranks import Alone
from seqmtp_serve.training.v3.model import V3Model

pytestmark = pytest.mark.timeout(900)  # processes start slowly on a busy machine
PROGRAM = Path(__file__).with_name("gloo_pair.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    pair = [subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(folder)]) for rank in range(2)]
    assert [process.wait(timeout=600) for process in pair] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> tuple[V3Model, float]:
    """Both ranks' streams in one process."""
    model = tiny_v3(2)
    return model, accumulate(model, STREAMS, Alone())


@pytest.mark.covers(42, 118, 143)
def test_sums_are_reduced_before_dividing(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["sums"] == [8.0, 4.0]
        assert rank["valid_mean"] == 2.0
        assert rank["mean_of_means"] == 3.0  # the fault, and what tells it


@pytest.mark.covers(42, 47, 118)
@pytest.mark.parametrize("layout", ["data", "expert"])
def test_the_objective_of_two_ranks_is_that_of_one(
    layout: str, found: list[dict[str, Any]], alone: tuple[V3Model, float]
) -> None:
    assert found[0][f"objective_{layout}"] == pytest.approx(alone[1], rel=1e-5)
    parts = [accumulate(tiny_v3(2), [stream], Alone()) for stream in STREAMS]
    assert abs(sum(parts) / 2 - alone[1]) > 0.01 * alone[1]  # averaging per-rank losses is another objective


@pytest.mark.covers(42, 47, 52, 56)
@pytest.mark.parametrize("layout", ["data", "expert"])
def test_gradients_of_two_ranks_are_those_of_one(layout: str, folder: Path, alone: tuple[V3Model, float]) -> None:
    """Rank 1 has no row at depth two, and all of its collectives all the same."""
    assert compile_stream(STREAMS[1], 2).depths[1].bases == []
    expected = gradients(alone[0])
    held = [load_file(folder / f"{layout}-{rank}.safetensors") for rank in range(2)]
    assert held[0].keys() | held[1].keys() == expected.keys()
    for rank in held:
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)
    shared = held[0].keys() & held[1].keys()
    assert all(torch.equal(held[0][name], held[1][name]) for name in shared)
    split = [name for name in expected if ".mlp.experts." in name]
    assert len(shared) == len(expected) - (len(split) if layout == "expert" else 0)


@pytest.mark.covers(99, 100, 108)
def test_load_and_traffic_are_counted(found: list[dict[str, Any]], alone: tuple[V3Model, float]) -> None:
    layers = [layer.mlp.gate.load_E for layer in alone[0].model.layers[CONFIG.num_dense_layers :]]
    for layout in ("data", "expert"):
        loads = [torch.tensor(rank[f"load_{layout}"]) for rank in found]
        assert torch.equal(loads[0] + loads[1], torch.stack(layers))
    rows_sent = [rank["sent_bytes"] / (CONFIG.hidden_size * 4) for rank in found]
    assert all(rows > 0 and rows == int(rows) for rows in rows_sent)


@pytest.mark.covers(56)
def test_a_chain_whose_depths_are_all_empty_still_has_its_graph() -> None:
    """A rank whose stream has no row of any depth: every module takes part, with gradients of exactly zero."""
    model = tiny_v3(2)
    stream = STREAMS[1].__class__(tokens=(3,), segment_ids=(0,), valid=(True,), position_ids=(0,), counted=(True,))
    assert accumulate(model, [stream], Alone()) == 0.0
    for depth in (1, 2):
        weight: Tensor = model.mtp_layer(depth).eh_proj.weight
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert CONTRACT.reduction == "valid_row_mean"
