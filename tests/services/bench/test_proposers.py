"""`seqmtp bench proposers`: services take turns, and each figure is beside its counterparts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

import pytest

from seqmtp_serve.errors import InvalidField, NotReady
from services.bench import proposers
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


@pytest.mark.parametrize("broken", [(), ("colocated",)], ids=["all come up", "one does not"])
async def test_services_start_at_once_and_all_are_stopped(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    """Slow starts overlap; one that fails is told as it is, after the others were stopped."""
    log: list[str] = []

    @asynccontextmanager
    async def pretended(model: str, serve_args: Sequence[str]) -> AsyncIterator[tuple[Scripted, str, None]]:
        name = serve_args[serve_args.index("--proposer") + 1]
        log.append(f"{name} starts")
        try:
            await asyncio.sleep(0)
            if name in broken:
                raise NotReady("no weights here")
            log.append(f"{name} is up")
            yield Scripted(name, []), "", None
        finally:
            log.append(f"{name} stops")

    monkeypatch.setattr(proposers, "running", pretended)
    systems = [System(name=name, mtp=None, max_batch=1, max_depth=1) for name in ("remote", "colocated")]
    workload = Workload(
        kinds=(Kind(name="chat", prompts=("a",)),), depths=(0, 1), concurrencies=(1,), repeats=1, max_tokens=4
    )
    if broken:
        with pytest.raises(NotReady, match="no weights here"):
            await proposers.measure_proposers("m", systems, workload, perf_counter())
    else:
        report = await proposers.measure_proposers("m", systems, workload, perf_counter())
        assert [run["system"] for run in report["proposers"]] == ["remote", "remote", "colocated", "colocated"]
    assert log[:2] == ["remote starts", "colocated starts"]
    assert sorted(log[-2:]) == ["colocated stops", "remote stops"]


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
