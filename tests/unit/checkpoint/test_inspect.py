"""`seqmtp inspect`: exit codes, the JSON, and the text."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles
from tiny_deepseek import BLOCKS, DeepseekFiles

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


@pytest.mark.covers(10)
def test_the_released_layout_shows_its_contract_and_folds_its_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = DeepseekFiles(folder=tmp_path / "tiny", blocks=BLOCKS)
    assert run(str(files.folder)) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["model", "tiny", "(deepseek_v3)"] in lines
    assert ["quantization", "fp8-e4m3-block[16,16]"] in lines
    assert ["rope.layout", "interleaved"] in lines
    assert ["rope.yarn.factor", "4.0"] in lines
    assert ["fed_hidden", "post"] in lines
    assert ["final_norm_owner", "mtp"] in lines
    expert = "mlp.experts.{0..3}.down_proj.weight"
    assert [f"model.layers.1.{expert}", "[24,", "16]", "F8_E4M3"] in lines, "under the target"
    assert [f"model.layers.2.{expert}", "[24,", "16]", "F8_E4M3"] in lines, "under the MTP part"
    assert run(str(files.folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for part, layer in (("target", False), ("mtp", True)):
        own = [tensor["name"] for tensor in found[part]["tensors"]]
        assert {name.startswith("model.layers.2.") for name in own} == {layer}
    own = sum(tensor.numel() for name, tensor in files.tensors.items() if name.startswith("model.layers.2."))
    scales = sum(t.numel() for n, t in files.tensors.items() if n.startswith("model.layers.2.") and "_scale_inv" in n)
    assert found["mtp"]["parameters"] == own - scales


def test_a_broken_mtp_layer_of_the_released_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = DeepseekFiles(folder=tmp_path / "tiny")
    files.edit(**{"model.layers.2.hnorm.weight": None})
    assert run(str(files.folder)) == 3
    assert "model.layers.2.hnorm.weight: is missing" in capsys.readouterr().out
