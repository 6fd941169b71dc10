"""Safetensors folders: one file, shards by index, slices, and what a broken folder says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_checkpoint as tiny
import torch
from safetensors.torch import save_file
from tiny_checkpoint import TinyFiles

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.safetensors_reader import INDEX_FILE, SafetensorsSource
from seqmtp_serve.errors import CheckpointError, TargetIncomplete


def shard(folder: Path) -> dict[str, str]:
    """Store the tiny target as two shards and an index; returns the weight map."""
    tensors = tiny.target_tensors()
    weight_map = {name: f"shard-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.covers(57)
def test_shards_read_as_one(files: TinyFiles) -> None:
    weight_map = shard(files.target)
    (files.target / "model.safetensors").unlink()
    source = SafetensorsSource(files.target)
    for name, tensor in tiny.target_tensors().items():
        assert source.specs[name].file.name == weight_map[name]
        assert torch.equal(source.read(name), tensor)
        assert torch.equal(source.read(name, slice(2, 7)), tensor[2:7])
    assert open_checkpoint(str(files.target)).gates().target.ok


@pytest.mark.covers(57)
def test_storage_dtypes_come_out_as_float32_and_integers_as_they_are(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    stored = {"half": values.half(), "brain": values.bfloat16(), "ids": torch.arange(4, dtype=torch.int32)}
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert {name: spec.dtype for name, spec in source.specs.items()} == {"half": "F16", "brain": "BF16", "ids": "I32"}
    assert torch.equal(source.read("brain"), values.bfloat16().float())
    assert source.read("half").dtype == torch.float32
    assert source.read("ids").dtype == torch.int32


def test_an_index_that_is_wrong(files: TinyFiles) -> None:
    weight_map = shard(files.target)
    name = next(iter(weight_map))
    weight_map[name] = "shard-1.safetensors"
    (files.target / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(TargetIncomplete, match=f"{name}.*places it in shard-1"):
        open_checkpoint(str(files.target))
    (files.target / INDEX_FILE).write_text("{}")
    with pytest.raises(TargetIncomplete, match="weight_map"):
        open_checkpoint(str(files.target))


def test_a_shard_that_is_missing_or_cut_short(files: TinyFiles) -> None:
    path = files.target / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(TargetIncomplete, match=r"model\.safetensors"):
        open_checkpoint(str(files.target))
    path.unlink()
    with pytest.raises(TargetIncomplete, match=r"model\.safetensors"):
        open_checkpoint(str(files.target))


def test_an_unknown_name(files: TinyFiles) -> None:
    with pytest.raises(CheckpointError, match=r"no\.such\.tensor"):
        SafetensorsSource(files.target).read("no.such.tensor")
