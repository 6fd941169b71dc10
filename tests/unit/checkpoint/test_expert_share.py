"""A rank of an expert-parallel group reads its own experts and what all ranks hold, and not a byte more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny_deepseek as tiny
import torch
from tiny_deepseek import BLOCKS, DeepseekFiles
from torch import Tensor

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.block_scaled_source import BlockScaledSource
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.fp8 import SCALE_SUFFIX, BlockFormat
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.safetensors_reader import ReadCount, SafetensorsSource

NUM_EXPERTS = tiny.CONFIG.moe.num_experts


def expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def read_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in tensors}


def count_of(checkpoint: Checkpoint) -> ReadCount:
    source = checkpoint.target_source
    stored = source.stored if isinstance(source, BlockScaledSource) else source
    assert isinstance(stored, SafetensorsSource)
    return stored.count


def stored_bytes(files: DeepseekFiles, wanted: Mapping[str, Tensor]) -> int:
    kept = [name for name in files.tensors if name.removesuffix(SCALE_SUFFIX) in wanted]
    return sum(files.tensors[name].numel() * files.tensors[name].element_size() for name in kept)


@pytest.mark.covers(57, 101)
@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_tile_the_experts_and_read_no_others(tmp_path: Path, blocks: BlockFormat | None, num_ranks: int) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=blocks)
    whole = read_all(open_checkpoint(str(tmp_path)).target_tensors())
    seen: dict[str, int] = {}
    for rank in range(num_ranks):
        own = range(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
        checkpoint = open_checkpoint(str(tmp_path))
        tensors = checkpoint.target_tensors(own)
        opened = count_of(checkpoint).num_bytes  # opening compares the two norms before a head
        assert opened < 1000
        share = read_all(tensors)
        assert {expert_of(name) for name in share} == {None, *own}
        assert count_of(checkpoint).num_bytes - opened == stored_bytes(files, share)
        for name, tensor in share.items():
            assert torch.equal(tensor, whole[name])
            seen[name] = seen.get(name, 0) + 1
    assert seen.keys() == whole.keys()
    assert all(times == (1 if expert_of(name) is not None else num_ranks) for name, times in seen.items())


def test_another_ranks_expert_cannot_be_asked_for(tmp_path: Path) -> None:
    DeepseekFiles(folder=tmp_path)
    tensors = open_checkpoint(str(tmp_path)).target_tensors(range(2))
    foreign = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert foreign not in tensors
    with pytest.raises(KeyError):
        tensors[foreign]


@pytest.fixture
def names_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every tensor whose values were read, by anybody."""
    seen: set[str] = set()
    read = SafetensorsSource.read_stored

    def spy(self: SafetensorsSource, name: str, rows: slice | None = None) -> Tensor:
        seen.add(name)
        return read(self, name, rows)

    monkeypatch.setattr(SafetensorsSource, "read_stored", spy)
    return seen


@pytest.mark.covers(49, 65)
def test_a_proposer_reads_the_module_and_what_it_shares(tmp_path: Path, names_read: set[str]) -> None:
    DeepseekFiles(folder=tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    module = read_all(checkpoint.mtp_tensors(range(NUM_EXPERTS // 2)))
    shared = {names.EMBEDDING, names.FINAL_NORM, names.HEAD}
    own = {name for name in tiny.mtp_tensors() if expert_of(name) in (None, 0, 1)}
    assert module.keys() == own | shared
    copies = {tiny.LAYER + copy for copy in names.MTP_DUPLICATES}
    assert checkpoint.manifest.target.num_main_layers == 2, "the handshake's fingerprints are of shared tensors alone"
    assert names_read == own | shared | copies, "the copies to compare them with their owners"


@pytest.mark.covers(65)
def test_a_target_reads_no_tensor_of_the_module(tmp_path: Path, names_read: set[str]) -> None:
    DeepseekFiles(folder=tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert read_all(checkpoint.target_tensors()).keys() == tiny.target_tensors().keys()
    assert names_read == tiny.target_tensors().keys() | {tiny.LAYER + names.SHARED_NORM}, "one norm, to compare"
