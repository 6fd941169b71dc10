"""Checkpoints written anew: transformers is the judge of a target-only one, the gates of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_deepseek as tiny
import torch
from tiny_deepseek import BLOCKS, LAYER, DeepseekFiles
from torch import Tensor
from transformers import AutoModelForCausalLM

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.convert import Conversion, convert
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, BlockFormat, quantise
from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.safetensors_reader import INDEX_FILE, SafetensorsSource
from seqmtp_serve.errors import InvalidField, MtpIncomplete, TargetIncomplete
from services.cli import main as seqmtp

EH_PROJ = LAYER + names.EH_PROJ
PROMPT = torch.tensor([[3, 1, 4, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3]])
WIDE = BlockFormat(rows=8, columns=8)  # 24 columns a half: no block holds columns of both


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(PROMPT).logits
    return found


@pytest.mark.covers(14, 65, 66, 148)
def test_a_target_only_export_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path / "whole")
    (files.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit) as done:
        seqmtp(["export", "--target-only", str(files.folder), str(tmp_path / "target")])
    assert done.value.code == 0
    stored = SafetensorsSource(tmp_path / "target")
    assert stored.specs.keys() == tiny.target_tensors().keys()
    assert json.loads((tmp_path / "target" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "target" / MANIFEST_FILE).exists()
    size = sum(file.stat().st_size for file in (tmp_path / "target").glob("*.safetensors"))
    index = json.loads((tmp_path / "target" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tiny.target_tensors().values()) < size

    checkpoint = open_checkpoint(str(tmp_path / "target"))
    assert checkpoint.gates().target.ok
    assert checkpoint.gates().mtp is None
    with pytest.raises(MtpIncomplete, match="no MTP part"):
        checkpoint.mtp_tensors()
    whole = open_checkpoint(str(files.folder)).target_tensors()
    assert all(torch.equal(checkpoint.target_tensors()[name], whole[name]) for name in whole)
    assert torch.equal(logits(tmp_path / "target"), logits(files.folder))


@pytest.mark.covers(57, 66)
def test_block_scaled_weights_made_plain(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path / "fp8", blocks=BLOCKS)
    convert(files.folder, tmp_path / "plain", Conversion(plain=torch.float32))
    checkpoint = open_checkpoint(str(tmp_path / "plain"))
    assert checkpoint.gates().target.problems == ()
    assert checkpoint.gates().mtp is not None
    stored = SafetensorsSource(tmp_path / "plain")
    assert {spec.dtype for spec in stored.specs.values()} == {"F32"}
    assert not [name for name in stored.specs if name.endswith(SCALE_SUFFIX)]
    before = open_checkpoint(str(files.folder))
    for tensors, expected in (
        (checkpoint.target_tensors(), before.target_tensors()),
        (checkpoint.mtp_tensors(), before.mtp_tensors()),
    ):
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert checkpoint.manifest.mtp is not None
    assert (checkpoint.manifest.mtp.quantization, checkpoint.manifest.mtp.storage_dtype) == ("none", "F32")
    convert(files.folder, tmp_path / "half", Conversion(plain=torch.bfloat16, target_only=True))
    half, exact = open_checkpoint(str(tmp_path / "half")).target_tensors(), before.target_tensors()
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(half[name], exact[name].bfloat16().float())
    assert torch.equal(half[names.EMBEDDING], exact[names.EMBEDDING]), "what was plain stays as it was"
    assert logits(tmp_path / "plain").isfinite().all()


@pytest.mark.covers(59, 60)
def test_the_fusion_in_the_other_order_and_back(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path / "eh", blocks=WIDE)
    fp8, scale = scaled_fusion(files)
    convert(files.folder, tmp_path / "he", Conversion(fusion_order="he"))
    convert(tmp_path / "he", tmp_path / "back", Conversion(fusion_order="eh"))
    turned, back = SafetensorsSource(tmp_path / "he"), SafetensorsSource(tmp_path / "back")
    d = tiny.CONFIG.hidden_size
    assert torch.equal(turned.read(EH_PROJ), torch.cat((fp8[:, d:].float(), fp8[:, :d].float()), 1))
    assert torch.equal(turned.read(EH_PROJ + SCALE_SUFFIX), torch.cat((scale[:, 3:], scale[:, :3]), 1))
    assert not torch.equal(scale[:, 3:], scale[:, :3])
    for name, tensor in files.tensors.items():
        assert torch.equal(back.read(name), tensor.float())
    he, eh = (open_checkpoint(str(tmp_path / name)) for name in ("he", "eh"))
    assert he.mtp_config is not None
    assert he.mtp_config.fusion_order == "he"
    assert he.gates().mtp is not None
    dense = eh.mtp_tensors()[EH_PROJ]
    assert torch.equal(he.mtp_tensors()[EH_PROJ], torch.cat((dense[:, d:], dense[:, :d]), 1))


@pytest.mark.covers(59)
def test_a_scale_that_covers_both_halves_cannot_be_moved(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path / "eh", blocks=BLOCKS)
    scaled_fusion(files)
    with pytest.raises(InvalidField, match="16 does not divide 24"):
        convert(files.folder, tmp_path / "he", Conversion(fusion_order="he"))


def scaled_fusion(files: DeepseekFiles) -> tuple[Tensor, Tensor]:
    """Store eh_proj block-scaled, as some vendors do (LongCat); released DeepSeek files keep it in bfloat16."""
    assert files.blocks is not None
    fp8, scale = quantise(files.tensors[EH_PROJ], files.blocks)
    files.edit(**{EH_PROJ: fp8, EH_PROJ + SCALE_SUFFIX: scale})
    return fp8, scale


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path / "whole")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(InvalidField, match="not empty"):
        convert(files.folder, tmp_path / "taken", Conversion())
    with pytest.raises(InvalidField, match="folder of safetensors"):
        convert(tmp_path / "taken" / "file", tmp_path / "out", Conversion())
    files.edit(**{LAYER + names.ENORM: None})
    with pytest.raises(MtpIncomplete, match=names.ENORM):
        convert(files.folder, tmp_path / "out", Conversion())
    convert(files.folder, tmp_path / "target", Conversion(target_only=True))
    files.edit(**{names.FINAL_NORM: None})
    with pytest.raises(TargetIncomplete, match=names.FINAL_NORM):
        convert(files.folder, tmp_path / "out", Conversion(target_only=True))
    assert not (tmp_path / "out").exists()


def test_seal_records_every_tensor_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = DeepseekFiles(folder=tmp_path / "model", blocks=BLOCKS)
    with pytest.raises(SystemExit) as done:
        seqmtp(["seal", str(files.folder)])
    assert done.value.code == 0
    checkpoint = open_checkpoint(str(files.folder))
    assert checkpoint.manifest.mtp is not None
    recorded = dict(checkpoint.manifest.mtp.tensor_fingerprints)
    assert recorded.keys() == tiny.as_stored(tiny.mtp_tensors(), BLOCKS).keys()
    assert f"{len(recorded)} tensors" in capsys.readouterr().out
    convert(files.folder, tmp_path / "target", Conversion(target_only=True))
    with pytest.raises(SystemExit) as refused:
        seqmtp(["seal", str(tmp_path / "target")])
    assert refused.value.code == 1
    assert "no MTP part" in capsys.readouterr().err
