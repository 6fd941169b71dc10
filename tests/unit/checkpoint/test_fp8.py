"""Block scales: the fast form against the definition, edge blocks, shards, slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_deepseek as tiny
import torch
from safetensors.torch import save_file
from tiny_deepseek import BLOCKS, DeepseekFiles

from seqmtp_serve.checkpoint.block_scaled_source import BlockScaledSource
from seqmtp_serve.checkpoint.fp8 import (
    SCALE_SUFFIX,
    BlockFormat,
    dequantise,
    dequantise_by_block,
    format_of_record,
    quantise,
)
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.safetensors_reader import SafetensorsSource
from seqmtp_serve.errors import CheckpointError, MtpIncomplete

KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.covers(57)
@pytest.mark.parametrize(
    ("shape", "blocks", "scales"),
    [
        ((576, 7168), (128, 128), (5, 56)),  # kv_a_proj_with_mqa: the only released matrix with a cut block
        ((36, 448), (8, 8), (5, 56)),
        ((8, 8), (8, 8), (1, 1)),
        ((3, 5), (8, 8), (1, 1)),
        ((17, 40), (8, 16), (3, 3)),
        ((16, 33), (16, 16), (1, 3)),
    ],
)
def test_the_fast_form_is_the_definition(
    shape: tuple[int, int], blocks: tuple[int, int], scales: tuple[int, int]
) -> None:
    sizes = BlockFormat(rows=blocks[0], columns=blocks[1])
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(shape, generator=generator).mul_(50).to(torch.float8_e4m3fn)
    scale = torch.rand(scales, generator=generator) + 0.01  # every block's own: a shifted block shows
    assert sizes.scale_shape(shape) == scales
    assert torch.equal(dequantise(stored, scale, sizes), dequantise_by_block(stored, scale, sizes))


def test_stored_values_are_left_as_they_are() -> None:
    stored, scale = torch.ones(4, 4), torch.full((1, 1), 3.0)
    assert torch.equal(dequantise(stored, scale, BlockFormat(rows=8, columns=8)), torch.full((4, 4), 3.0))
    assert torch.equal(stored, torch.ones(4, 4))


def test_quantising_loses_at_most_half_a_step() -> None:
    value = torch.randn(20, 37, generator=torch.Generator().manual_seed(1))
    value[:16, :16] = 0.0
    stored, scale = quantise(value, BLOCKS)
    restored = dequantise(stored, scale, BLOCKS)
    assert torch.equal(restored[:16, :16], torch.zeros(16, 16))
    assert torch.allclose(restored, value, rtol=2**-4, atol=float(scale.max()) * 2**-10)
    assert not torch.equal(restored, value)


@pytest.mark.covers(57)
def test_a_weight_and_its_scales_in_different_shards(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=BLOCKS)
    stored = SafetensorsSource(tmp_path)
    scaled = [name.removesuffix(SCALE_SUFFIX) for name in stored.specs if name.endswith(SCALE_SUFFIX)]
    assert KV_A in scaled
    source = BlockScaledSource(stored, BLOCKS)
    tensors = open_checkpoint(str(tmp_path)).target_tensors()
    for name in scaled:
        assert stored.specs[name].file != stored.specs[name + SCALE_SUFFIX].file
        expected = dequantise_by_block(files.tensors[name], files.tensors[name + SCALE_SUFFIX], BLOCKS)
        assert torch.equal(source.read(name), expected)
        if name in tensors:
            assert torch.equal(tensors[name], expected)


@pytest.mark.covers(57)
@pytest.mark.parametrize(("start", "stop"), [(0, 20), (0, 1), (3, 17), (15, 16), (16, 20), (19, 20), (5, 5)])
def test_some_rows_of_a_block_scaled_weight(tmp_path: Path, start: int, stop: int) -> None:
    DeepseekFiles(folder=tmp_path, blocks=BLOCKS)
    whole = BlockScaledSource(SafetensorsSource(tmp_path), BLOCKS).read(KV_A)
    stored = SafetensorsSource(tmp_path)
    assert torch.equal(BlockScaledSource(stored, BLOCKS).read(KV_A, slice(start, stop)), whole[start:stop])
    aligned = start // BLOCKS.rows * BLOCKS.rows
    scale_rows = -(-stop // BLOCKS.rows) - start // BLOCKS.rows
    assert stored.count.num_bytes == (stop - aligned) * whole.shape[1] + scale_rows * 2 * 4, "24 columns: two blocks"


def test_scales_that_are_gone_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=BLOCKS)
    files.edit(**{KV_A + SCALE_SUFFIX: None})
    with pytest.raises(CheckpointError, match=f"{KV_A}.*{SCALE_SUFFIX} are missing"):
        BlockScaledSource(SafetensorsSource(tmp_path), BLOCKS).read(KV_A)
    problems = open_checkpoint(str(tmp_path)).gates().target.problems
    assert [problem.subject for problem in problems] == [KV_A + SCALE_SUFFIX, KV_A], "missing, and so unreadable"
    raw = files.tensors[KV_A].view(torch.uint8).clone()
    raw[2, 3] = 0x7F  # e4m3 has no infinity; this is its NaN
    files.write(files.tensors | {KV_A: raw.view(torch.float8_e4m3fn), KV_A + SCALE_SUFFIX: torch.ones(2, 2)})
    assert [p.subject for p in open_checkpoint(str(tmp_path)).gates().target.problems] == [KV_A]


def test_fp8_without_a_declared_format_is_not_guessed(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=BLOCKS)
    files.edit_json("config.json", quantization_config=...)
    subjects = {problem.subject for problem in open_checkpoint(str(tmp_path)).gates().target.problems}
    assert {KV_A, KV_A + SCALE_SUFFIX} <= subjects


def test_a_scale_may_not_be_fp8_itself(tmp_path: Path) -> None:
    files = DeepseekFiles(folder=tmp_path, blocks=BLOCKS)
    files.edit(**{KV_A + SCALE_SUFFIX: files.tensors[KV_A + SCALE_SUFFIX].to(torch.float8_e4m3fn)})
    assert [p.subject for p in open_checkpoint(str(tmp_path)).gates().target.problems] == [KV_A + SCALE_SUFFIX]


def test_an_e5m2_weight_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 4).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    files = DeepseekFiles(folder=tmp_path / "model", blocks=BLOCKS)
    files.edit(**{KV_A: files.tensors[KV_A].float().to(torch.float8_e5m2)})
    assert KV_A in {p.subject for p in open_checkpoint(str(files.folder)).gates().target.problems}


@pytest.mark.covers(10)
def test_the_record_names_the_format() -> None:
    assert format_of_record("none") is None
    assert format_of_record(str(BLOCKS)) == BLOCKS
    for word in ("", "fp8", "fp8-e4m3-block[16]", "fp8-e4m3-block[0,16]", "awq"):
        with pytest.raises(MtpIncomplete, match="quantization"):
            format_of_record(word)


def test_the_tiny_files_have_cut_blocks() -> None:
    rows, columns = tiny.target_tensors()[KV_A].shape
    assert rows % BLOCKS.rows
    assert columns % BLOCKS.columns
