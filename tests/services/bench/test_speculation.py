"""The whole bench on a fake target group: order of passes, the report's shape, both backends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import pytest

from seqmtp_serve.config import SchedulerConfig
from seqmtp_serve.errors import InternalError, InvalidField, NotReady
from seqmtp_serve.fake import FakeTargetGroup, fake_piece
from seqmtp_serve.frontier.memory_store import MemoryFrontierStore
from seqmtp_serve.rounds import RoundDriver
from services.bench.backend import Depth
from services.bench.driver_backend import DriverBackend
from services.bench.prompts import KINDS, OWN_PROMPTS, Kind, read_kinds, read_prompts
from services.bench.speculation import Pass, Workload, measure
from services.bench.url_backend import UrlBackend, parse_counters
from tests.services.gateway.live import serving
from tests.services.gateway.world import fake

DEPTHS: tuple[Depth, ...] = (0, 1, 2, 3, "auto")
RUN_FIELDS = {
    "depth", "concurrency", "tps", "e_r", "acceptance_by_position", "ledger_ms", "speedup", "speedup_ledger",
    "speedup_bound", "hidden_share", "kind", "text_equal",
    "turns", "of_best_fixed", "of_best_fixed_interval", "of_best_fixed_cpu", "of_best_fixed_cpu_interval",
}  # fmt: skip


def encode(prompt: str) -> list[int]:
    return [ord(char) % 26 for char in prompt[:20]]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(fake_piece, tokens))


@asynccontextmanager
async def fake_backend() -> AsyncIterator[DriverBackend]:
    config = SchedulerConfig(max_batch=8, step_tokens=64)
    target, auto = FakeTargetGroup(), replace(config, depth_policy="auto")
    drivers = [RoundDriver(target, MemoryFrontierStore(), each, lambda _: fake_piece) for each in (config, auto)]
    for driver in drivers:
        await driver.start()
        while not driver.status().target_ready:
            await asyncio.sleep(0.001)
    yield DriverBackend(
        drivers[0],
        auto=drivers[1],
        model="fake",
        numerics="invariant",
        encode=encode,
        decode=decode,
        eos_token_ids=(),
    )
    for driver in drivers:
        await driver.close()


@pytest.mark.covers(102, 106, 110)
async def test_the_report_of_a_run() -> None:
    kinds = (Kind(name="chat", prompts=("one", "two", "three")),)
    workload = Workload(kinds=kinds, depths=DEPTHS, repeats=2, max_tokens=24, concurrencies=(1, 2))
    async with asyncio.timeout(60), fake_backend() as backend:
        report = await measure(backend, workload, perf_counter())
    assert report.keys() == {"model", "numerics", "machine", "date", "workload", "turns", "runs"}
    assert report["turns"] == {"asked": 10, "measured": 10}
    assert [(run["concurrency"], run["depth"]) for run in report["runs"]] == [(c, d) for c in (1, 2) for d in DEPTHS]
    for run in report["runs"]:
        assert run.keys() == RUN_FIELDS
        assert run["text_equal"]
        assert (run["of_best_fixed"] is None) == (run["depth"] != "auto")
        assert run["turns"] == ({1: 6, 2: 4}[run["concurrency"]] if run["depth"] == "auto" else None)
        if run["depth"] == "auto":
            continue
        assert len(run["acceptance_by_position"]) == run["depth"]
        assert run["e_r"] <= 1 + run["depth"]
        # E[R] = 1 + the sum of unconditional rates, but for last rounds whose depth the budget cut
        assert run["e_r"] == pytest.approx(1 + sum(run["acceptance_by_position"]), abs=0.15)
        assert run["ledger_ms"]["c_main"] == pytest.approx(1.0)
    assert json.loads(json.dumps(report)) == report


async def test_its_time_counts_from_when_the_caller_began() -> None:
    """What went by before, as a model that was slow to load, is part of it; each cell is measured once all the same."""
    kinds = (Kind(name="chat", prompts=("one", "two", "three")),)
    workload = Workload(kinds=kinds, depths=(0, 1), repeats=2, max_tokens=4, concurrencies=(1, 2), seconds=1000)
    async with asyncio.timeout(60), fake_backend() as backend:
        late = await measure(backend, workload, perf_counter() - 1000)
        early = await measure(backend, workload, perf_counter())
    assert late["turns"] == {"asked": 10, "measured": 2}
    assert early["turns"] == {"asked": 10, "measured": 10}


def passes(workload: Workload) -> list[Pass]:
    return [one for turn in workload.turns() for one in turn.passes]


def test_every_repeat_measures_every_pair_and_the_first_depth_changes() -> None:
    kind = Kind(name="chat", prompts=tuple("abcdefghijklmnopqrst"))
    workload = Workload(kinds=(kind,), depths=(0, 1, 2), concurrencies=(1, 8), repeats=3, prompts_a_stream=2)
    assert {one.concurrency: len(one.prompts) for one in passes(workload)} == {1: 4, 8: 16}
    order = [(one.depth, one.concurrency) for one in passes(workload)]
    pairs = {(depth, concurrency) for depth in (0, 1, 2) for concurrency in (1, 8)}
    assert [set(order[start : start + 6]) for start in (0, 6, 12)] == [pairs] * 3
    assert [order[start][0] for start in (0, 6, 12)] == [0, 1, 2]


def test_the_controller_takes_short_turns_with_the_fixed_depths() -> None:
    kind = Kind(name="chat", prompts=tuple("abcdefghij"))
    workload = Workload(kinds=(kind,), depths=(0, 1, "auto"), concurrencies=(4,), repeats=2)
    assert [(one.repeat, one.turn, "".join(one.prompts), one.depth) for one in passes(workload)][:12] == [
        (0, 0, "abcd", 0), (0, 0, "abcd", 1), (0, 0, "abcd", "auto"),
        (0, 1, "efgh", 1), (0, 1, "efgh", "auto"), (0, 1, "efgh", 0),
        (0, 2, "ij", "auto"), (0, 2, "ij", 0), (0, 2, "ij", 1),
        (1, 0, "abcd", 1), (1, 0, "abcd", "auto"), (1, 0, "abcd", 0),
    ]  # fmt: skip


# ---- a server that answers as ours does ------------------------------------------------------------------------

METRICS = """# TYPE seqmtp_rounds counter
seqmtp_rounds_total{engine="c1",model_name="m"} 10.0
seqmtp_rounds_total{engine="c2",model_name="m"} 5.0
vllm:spec_decode_num_drafts_total{engine="c1",model_name="m"} 10.0
seqmtp_progress_verified_total{engine="c1",model_name="m"} 24.0
seqmtp_cost_ms_verify_total{engine="c1",model_name="m"} 1.5e+02
seqmtp_steps_depth2_total{engine="c1",model_name="m"} 9.0
seqmtp_drafted_per_pos_total{engine="c1",model_name="m",position="0"} 10.0
seqmtp_accepted_per_pos_total{engine="c1",model_name="m",position="0"} 7.0
seqmtp_unknown_total{engine="c1"} 3.0
"""


class Answers(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []
    events: ClassVar[list[Any]] = []
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        texts = {"/v1/models": json.dumps({"data": [{"id": "m"}]}), "/metrics": METRICS, "/ready": "{}"}
        self._answer(texts[self.path].encode())

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        lines = [b"id: r:1\ndata: " + json.dumps(event).encode() + b"\n\n" for event in self.events]
        self._answer(b": hello\n\n" + b"".join(lines) + b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(events: list[Any], status: int = 200) -> Iterator[str]:
    handler = type("Handler", (Answers,), {"asked": [], "events": events, "status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


async def test_a_stream_over_http() -> None:
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "system_fingerprint": "seqmtp-0.1.0-invariant"},
        chunk("Hel"),
        chunk("lo ö"),
        {"choices": [], "usage": {"completion_tokens": 5}},
    ]
    with server(events) as url:
        backend = UrlBackend(url)
        await backend.connect()
        await backend.ready()
        reply = await backend.generate("hi", depth=2, max_tokens=7)
        counters = await backend.counters()
    assert (reply.text, reply.num_tokens) == ("Hello ö", 5)
    assert reply.first_token_s > 0
    assert not backend.is_local
    assert (backend.model, backend.numerics) == ("m", "invariant")
    assert counters["rounds"] == 15.0


async def test_counters_are_those_of_now_whoever_has_just_asked() -> None:
    coordinator = fake()
    (status,) = coordinator.statuses
    async with serving(coordinator) as url:
        backend = UrlBackend(url)
        for rounds in (1.0, 2.0, 3.0):
            coordinator.statuses = (replace(status, counters={"rounds": rounds}),)
            assert (await backend.counters())["rounds"] == rounds


async def test_errors_over_http_are_typed() -> None:
    events = [chunk("a"), {"error": {"code": "store_error"}}]
    with server(events) as url, pytest.raises(InternalError, match="store_error"):
        await UrlBackend(url).generate("hi", depth=0, max_tokens=4)
    with server([], status=503) as url:
        with pytest.raises(InternalError, match="503"):
            await UrlBackend(url).generate("hi", depth=0, max_tokens=4)
        with pytest.raises(NotReady, match="503"):
            await UrlBackend(url).ready()
    with pytest.raises(NotReady):
        await UrlBackend(url).ready()


def test_counters_out_of_prometheus_text() -> None:
    assert parse_counters(METRICS) == {
        "rounds": 15.0,
        "progress.verified": 24.0,
        "cost_ms.verify": 150.0,
        "steps.depth2": 9.0,
        "drafted.pos0": 10.0,
        "accepted.pos0": 7.0,
    }


# ---- prompts ---------------------------------------------------------------------------------------------------


def test_prompts_are_spread_over_the_file_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"{i}" * 5000, "x"]}) for i in range(8)) + "\n")
    assert [prompt[0] for prompt in read_prompts(path, 4)] == ["0", "2", "4", "6"]
    assert {len(prompt) for prompt in read_prompts(path, 4)} == {4000}
    assert len(set(read_prompts(OWN_PROMPTS, 100))) == 16


def test_kinds_of_prompts_have_their_own_prompts_or_their_own_sampling() -> None:
    chat, predictable, random = read_kinds(KINDS, OWN_PROMPTS, 16)
    assert [len(kind.prompts) for kind in (chat, predictable, random)] == [16, 16, 16]
    assert not set(chat.prompts) & set(predictable.prompts)
    assert (chat.sampling, random.sampling) == ("greedy", "temperature 2, seeded")
    with pytest.raises(InvalidField, match="there are chat, predictable, random"):
        read_kinds(["prose"], OWN_PROMPTS, 1)


@pytest.mark.parametrize("line", ["{", "{}", '{"turns": []}', '{"prompt": 3}', "[]", '{"prompt": ""}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(InvalidField, match=r"some\.jsonl line 2"):
        read_prompts(path, 2)
