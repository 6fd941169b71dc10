"""A run becomes an MTP part that passes the gate and reads back as the same module, rounded to bf16."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.training.commands import module_of_part
from seqmtp_serve.training.export import export_run, keep_start_record, run_record
from seqmtp_serve.training.mtp_module import MtpModule
from seqmtp_serve.training.run_state import RunState, save_run

TARGET = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of nothing: random weights, a log, a sub-vocabulary."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    module = MtpModule(open_checkpoint(TARGET).config)
    optimizer = torch.optim.AdamW(module.parameters())
    save_run(folder / "latest.safetensors", module, optimizer, RunState(step=2, rows=10, seconds=36.0, files=("a",)))
    log = [
        {"step": 0, "settings": {"lr": 0.1}},
        {"step": 1, "loss": [3.0, 4.0]},
        {"step": 2, "loss": [1.0, 2.0]},
        {"step": 2, "held_out": {"e_r": 1.5}},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (folder / "draft_token_ids.json").write_text(json.dumps([5, 3, 900]))
    return folder


@pytest.mark.covers(7, 61, 62)
def test_an_exported_run_passes_the_gate_and_reads_back(run_folder: Path, tmp_path: Path) -> None:
    export_run(argparse.Namespace(target=TARGET, run=run_folder, out=tmp_path, shards=None, acceptance=None))
    checkpoint = open_checkpoint(TARGET, str(tmp_path))
    assert checkpoint.gates().mtp.problems == ()
    assert (tmp_path / "model.safetensors").stat().st_size <= 12_000_000
    module, draft_ids = module_of_part(checkpoint)
    assert draft_ids.tolist() == [5, 3, 900]
    torch.manual_seed(0)
    for name, value in MtpModule(checkpoint.config).state_dict().items():
        assert torch.equal(module.state_dict()[name], value.bfloat16().float()), name


def test_a_continued_run_names_what_it_started_from(run_folder: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    export_run(argparse.Namespace(target=TARGET, run=run_folder, out=first, shards=None, acceptance=None))
    second = tmp_path / "run"
    shutil.copytree(run_folder, second)
    keep_start_record(second, open_checkpoint(TARGET, str(first)))
    record = export_run(
        argparse.Namespace(target=TARGET, run=second, out=tmp_path / "second", shards=None, acceptance=None)
    )
    assert record["started_from"]["legs"] == [{"step": 0, "settings": {"lr": 0.1}}]


def test_the_record_is_read_off_the_log(run_folder: Path) -> None:
    record = run_record(run_folder / "log.jsonl", RunState(step=2, rows=10, seconds=36.0, files=("a",)))
    assert record["loss_by_depth_last_50_steps"] == [2.0, 3.0]
    assert (record["steps"], record["reply_rows"], record["hours"], record["shards"]) == (2, 10, 0.01, ["a"])
    assert record["held_out"]["held_out"] == {"e_r": 1.5}
    assert record["legs"][0]["settings"] == {"lr": 0.1}
    assert "KL(target || draft)" in record["objective"]


def test_the_record_names_the_divergence_of_the_last_leg(tmp_path: Path) -> None:
    lines = [{"step": 0, "settings": {"divergence": "tv"}}, {"step": 1, "loss": [1.0]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "total variation" in run_record(tmp_path / "log.jsonl", RunState(step=1))["objective"]
