"""`seqmtp inspect`: exit codes, the JSON, and the text."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles

from seqmtp_serve.checkpoint import names
from services import inspect


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args(argv))


@pytest.mark.covers(62)
def test_both_parts_sound(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(files.target), "--mtp", str(files.mtp), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"]["ok"]
    assert found["mtp"]["ok"]
    assert found["aliases"][names.HEAD] == names.EMBEDDING
    assert found["mtp_config"]["fusion_order"] == "eh"
    assert {"name": MTP_LAYER + names.EH_PROJ, "shape": [16, 32], "dtype": "F32", "file": "model.safetensors"} in found[
        "mtp"
    ]["tensors"]
    assert len(found["fingerprint"]) == 64


@pytest.mark.covers(62, 134)
def test_each_gate_has_its_own_exit_code(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(files.target)) == 0
    assert "no MTP part: serves at depth 0" in capsys.readouterr().out
    files.edit_tensors(files.mtp, **{MTP_LAYER + names.HNORM: None})
    assert run(str(files.target), "--mtp", str(files.mtp)) == 3
    text = capsys.readouterr().out
    assert "target gate   passed" in text
    assert "MTP gate      FAILED (1)" in text
    assert f"{MTP_LAYER}hnorm.weight: is missing" in text
    files.edit_tensors(files.target, **{names.FINAL_NORM: None})
    assert run(str(files.target), "--mtp", str(files.mtp), "--headers-only") == 4
    assert "target gate   FAILED (1)" in capsys.readouterr().out


def test_files_that_cannot_be_opened(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    (files.target / "model.safetensors").unlink()
    assert run(str(files.target), "--json") == 4
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["target"]["error"]
    assert run("no/such/model") == 2
    assert "no/such/model" in capsys.readouterr().err


def test_equal_layers_are_folded_into_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = TinyFiles(tmp_path, replace(CONFIG, num_layers=12))
    run(str(files.target), "--headers-only")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "mlp.up_proj" in line]
    assert lines == [["model.layers.{0..11}.mlp.up_proj.weight", "[24,", "16]", "F32"]]
