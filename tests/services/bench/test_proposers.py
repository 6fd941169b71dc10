"""`seqmtp bench proposers`: services take turns, and each figure is beside its counterparts."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import pytest

from seqmtp_serve.errors import InvalidField
from services.bench.backend import Depth, Generation
from services.bench.figures import Cell
from services.bench.prompts import Kind
from services.bench.proposers import System, compared, take_turns
from services.bench.speculation import Workload


class Scripted:
    """A backend that notes who was asked."""

    model, numerics, is_local = "m", "invariant", False

    def __init__(self, name: str, log: list[tuple[str, Depth]]) -> None:
        self.name, self.log = name, log

    async def generate(self, prompt: str, *, depth: Depth, max_tokens: int, temperature: float = 0.0) -> Generation:
        self.log.append((self.name, depth))
        return Generation(text=prompt, num_tokens=max_tokens, first_token_s=0.01)

    async def counters(self) -> Mapping[str, float]:
        return {}


async def test_every_pass_visits_every_system_before_the_next_begins() -> None:
    log: list[tuple[str, Depth]] = []
    backends = {name: Scripted(name, log) for name in ("remote", "colocated")}
    workload = Workload(
        kinds=(Kind(name="chat", prompts=("a",)),), depths=(0, 1), concurrencies=(1,), repeats=2, max_tokens=4
    )
    cells = await take_turns(backends, workload, perf_counter())
    warm, measured = log[:4], log[4:]
    assert warm == [("remote", 0), ("remote", 1), ("colocated", 0), ("colocated", 1)]
    assert [depth for _, depth in measured] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert [name for name, _ in measured] == ["remote", "colocated", "colocated", "remote"] * 2
    assert {name: len(own) for name, own in cells.items()} == {"remote": 4, "colocated": 4}


def cells(*seconds: float, text: str = "t") -> list[Cell]:
    return [
        Cell(depth=depth, concurrency=1, seconds=each, num_tokens=100, texts=(text,), counters={})
        for depth, each in enumerate(seconds)
    ]


def test_each_system_is_beside_its_counterparts() -> None:
    runs = compared({"remote": cells(1.0, 0.5), "remote-2": cells(1.0, 0.4), "colocated": cells(0.8, 0.8)})
    found = {(run["system"], run["depth"]): run for run in runs}
    assert found["remote", 1]["speedup"] == 2.0, "against its own depth 0"
    assert found["remote", 1]["of_colocated"] == 1.6
    assert found["remote", 1]["of_plain"] == 1.6, "the colocated service decodes fastest"
    assert found["remote-2", 1]["of_one_cohort"] == 1.25
    assert found["colocated", 1]["of_colocated"] is None
    assert all(run["text_equal"] for run in runs)
    other = compared({"remote": cells(1.0), "colocated": cells(1.0, text="another")})
    assert [run["text_equal"] for run in other] == [True, False]


def test_how_a_system_is_started() -> None:
    args = System(name="remote-2", mtp=None, max_batch=4, max_depth=2).serve_args()
    assert args[args.index("--proposer") + 1] == "remote"
    assert args[args.index("--cohorts") + 1] == "2"
    assert args[args.index("--depth-policy") + 1] == "static"
    args = System(name="remote-auto", mtp=None, max_batch=4, max_depth=2).serve_args()
    assert args[args.index("--cohorts") + 1] == "1"
    assert args[args.index("--depth-policy") + 1] == "auto"
    with pytest.raises(InvalidField, match="is no system"):
        System(name="nearby", mtp=None, max_batch=4, max_depth=2).serve_args()
