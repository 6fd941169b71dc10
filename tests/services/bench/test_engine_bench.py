"""`seqmtp bench engine` on a tiny folder: one report whose figures fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.ports import Draft
from services.bench.engine import EngineRun, EngineWorkload
from services.bench.table import as_table
from services.bench.workspace import peak_growth
from services.cli import main as seqmtp
from tests.services.tiny_model import write_tiny_model
from tests.unit.released_files import LAYER, write_tiny_v3

ARGS = ["--rows", "1,3", "--depths", "0,2", "--steps", "2", "--repeats", "1", "--context", "20", "--weights", "fp32"]


@pytest.mark.slow
@pytest.mark.covers(99, 100, 105)
def test_two_ranks_share_experts_and_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_tiny_v3(tmp_path / "v3")
    reports = []
    for ranks in ("1", "2"):
        with pytest.raises(SystemExit) as done:
            seqmtp(["bench", "engine", str(files.folder), "--json", "--ep", ranks, *ARGS])
        assert done.value.code == 0
        reports.append(json.loads(capsys.readouterr().out))
    alone, group = reports
    assert group["ep_size"] == 2
    for one, two in zip(alone["cells"], group["cells"], strict=True):
        for name in ("batch", "depth", "rows", "tokens_per_round"):
            assert one[name] == two[name], "the same sequences, token for token, wherever they run"
    (whole,), (first, second) = alone["memory_bytes"], group["memory_bytes"]
    assert (first["batch"], second["batch"]) == (2, 1)
    assert (first["experts"], second["experts"]) == (4, 4)
    assert first["main_weights"] == second["main_weights"] < whole["main_weights"]
    assert first["sent"] > 0
    assert second["sent"] > 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--attention-backend", "flashinfer"), "latent attention backend flashinfer cannot run here: "),
        (("--attention-backend", "sdpa"), "which invariant numerics forbid"),
        (("--all2all-backend", "all-to-all-nccl", "--ep", "2"), "dispatch backend all-to-all-nccl cannot run here: "),
        (("--moe-backend", "triton"), "is not one of auto, torch-grouped, torch"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    files = write_tiny_v3(tmp_path / "v3")
    with pytest.raises(SystemExit) as done:
        seqmtp(["bench", "engine", str(files.folder), *flags, *ARGS])
    assert done.value.code == 1
    assert reason in capsys.readouterr().err


def test_a_named_backend_is_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, reports = write_tiny_v3(tmp_path / "v3"), []
    for flags in ((), ("--attention-backend", "torch", "--moe-backend", "torch")):
        with pytest.raises(SystemExit) as done:
            seqmtp(["bench", "engine", str(files.folder), "--json", *flags, *ARGS])
        assert done.value.code == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [one["kernels"]["attention"] for one in reports] == ["paged", "torch"]
    assert [one["kernels"]["experts"] for one in reports] == ["torch", "torch"]
    assert len({json.dumps([cell["tokens_per_round"] for cell in one["cells"]]) for one in reports}) == 1


def test_ranks_need_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as done:
        seqmtp(["bench", "engine", str(write_tiny_model(tmp_path)), "--ep", "2", "--depths", "0"])
    assert done.value.code in (1, 2)
    assert "has no experts" in capsys.readouterr().err


@pytest.mark.covers(5, 103, 105, 154)
def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_tiny_v3(tmp_path / "v3")
    with pytest.raises(SystemExit) as done:
        seqmtp(["bench", "engine", str(files.folder), "--json", *ARGS])
    assert done.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["family"], report["ep_size"], report["weights"]) == ("v3", "deepseek_v3", 1, "fp32")
    cells = {(cell["batch"], cell["depth"]): cell for cell in report["cells"]}
    assert cells.keys() == {(1, 0), (1, 2), (3, 0), (3, 2)}
    for (batch, depth), cell in cells.items():
        assert cell["rows"] == batch * (depth + 1)
        assert 1 <= cell["tokens_per_round"] <= depth + 1
        assert 0 < cell["forward_ms_best"] <= cell["forward_ms"]
        assert cell["forward_ms_best"] <= cell["ms_per_step"]
        assert cell["cpu_ms_per_step"] > 0
        assert (cell["c_verify_over_c_main"] is None) == (depth == 0)
    ratio = cells[3, 2]["forward_ms"] / cells[3, 0]["forward_ms"]
    assert cells[3, 2]["c_verify_over_c_main"] == pytest.approx(ratio, rel=0.01)
    (memory,) = report["memory_bytes"]
    assert memory["batch"] == 3
    assert memory["branch_rows"] == 3 * 3 * memory["target_row"]
    parts = ("main_weights", "mtp_own_weights", "target_rows", "hidden_rows", "mtp_rows")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert all(memory[part] > 0 for part in parts)
    assert len(as_table(report).splitlines()) == 3 + len(cells) + 1 + len(memory) - 1


def test_no_more_drafts_are_made_than_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    propose = ProposerEngine.propose

    def counting(self: ProposerEngine, *args: Any) -> Any:
        answers = propose(self, *args)
        made.extend(len(draft.tokens) for draft in answers if isinstance(draft, Draft))
        return answers

    monkeypatch.setattr(ProposerEngine, "propose", counting)
    workload = EngineWorkload(batches=(1,), depths=(0, 1, 3), context=8, steps=3, repeats=1)
    config = workload.engine(numerics="invariant", weights="fp32", num_threads=1)
    run = EngineRun.open(open_checkpoint(str(write_tiny_v3(tmp_path / "v3").folder)), workload, config)
    for depth in workload.depths:
        made.clear()
        run._steps(1, depth, workload.steps)
        assert set(made) == ({depth} if depth else set())


def test_depths_need_a_sound_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_tiny_v3(tmp_path / "v3")
    files.edit(**{LAYER + "enorm.weight": None})
    with pytest.raises(SystemExit) as done:
        seqmtp(["bench", "engine", str(files.folder), *ARGS])
    assert done.value.code == 1
    assert "enorm.weight: is missing" in capsys.readouterr().err


def test_a_peak_is_seen_where_the_kernel_keeps_one() -> None:
    grown = peak_growth(lambda: bytearray(b"x" * 64 * 2**20))
    if grown is None:
        pytest.skip("this system keeps no peak that can be reset")
    assert grown > 32 * 2**20
    assert (peak_growth(lambda: None) or 0) < 32 * 2**20
