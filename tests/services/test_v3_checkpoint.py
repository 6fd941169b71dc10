"""A checkpoint in the released DeepSeek-V3 layout, opened and served: with its module, and at depth 0 whatever is wrong
with that module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.convert import Conversion, convert
from seqmtp_serve.checkpoint.fp8 import BlockFormat
from seqmtp_serve.checkpoint.fusion import swapped_halves
from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE, write_mtp_manifest
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.checkpoint.seal import sealed
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.local import LocalService
from seqmtp_serve.model.synthetic import TINY_V3
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.detokenizer import Detokenizer
from tests.unit.checkpoint.tiny_deepseek import DeepseekFiles
from tests.unit.released_files import LAYER, write_tiny_v3

PROMPTS = ((5, 9, 3), (17, 2, 2, 40, 8), tuple(range(3, 90, 2)))
ENGINE = EngineConfig(weights="fp32", num_pages=32, page_size=16, max_model_len=128)
EH_PROJ = LAYER + names.EH_PROJ


async def texts(folder: Path, *, depth: int) -> tuple[list[tuple[int, ...]], list[CommittedRow]]:
    """Greedy tokens of each prompt, and all rows."""
    async with LocalService.open(str(folder), decoder=Detokenizer, engine=ENGINE) as service:
        replies = await asyncio.gather(*(service.generate(request(i, p, depth)) for i, p in enumerate(PROMPTS)))
    return [tokens_of(rows) for rows in replies], [row for rows in replies for row in rows]


def request(index: int, prompt: Sequence[int], depth: int) -> Request:
    params = SamplingParams(temperature=0.0, seed=index, seeded=True, max_tokens=24, max_depth=depth, ignore_eos=True)
    return Request(request_id=f"r{index}", prompt_ids=tuple(prompt), params=params)


def tokens_of(rows: Sequence[CommittedRow]) -> tuple[int, ...]:
    return tuple(token for row in rows for token in row.tokens)


@pytest.mark.covers(57, 62, 72)
@pytest.mark.parametrize("blocks", [None, BlockFormat(rows=16, columns=16)])
async def test_speculation_from_a_released_layout_changes_no_token(tmp_path: Path, blocks: BlockFormat | None) -> None:
    write_tiny_v3(tmp_path, blocks=blocks)
    plain, rows = await texts(tmp_path, depth=0)
    assert sum(row.drafted for row in rows) == 0
    assert len(set(plain)) == len(PROMPTS)
    for depth in (1, 3):
        spoken, rows = await texts(tmp_path, depth=depth)
        assert spoken == plain
        accepted, drafted = sum(row.accepted for row in rows), sum(row.drafted for row in rows)
        assert 0 < accepted < drafted, "some drafts are right and some are wrong"


@pytest.mark.covers(59, 60)
async def test_both_fusion_orders_are_one_module(tmp_path: Path) -> None:
    write_tiny_v3(tmp_path / "eh")
    convert(tmp_path / "eh", tmp_path / "he", Conversion(fusion_order="he"))
    _, stored_eh = await texts(tmp_path / "eh", depth=3)
    _, stored_he = await texts(tmp_path / "he", depth=3)
    accepted = [(row.tokens, row.drafted, row.accepted) for row in stored_eh]
    assert [(row.tokens, row.drafted, row.accepted) for row in stored_he] == accepted
    assert any(row.accepted for row in stored_eh)


def drop(files: DeepseekFiles) -> None:
    files.edit(**{LAYER + names.HNORM: None})


def misshape(files: DeepseekFiles) -> None:
    files.edit(**{LAYER + "self_attn.kv_b_proj.weight": torch.zeros(3, 3)})


def corrupt(files: DeepseekFiles) -> None:
    files.edit(**{LAYER + "mlp.experts.5.up_proj.weight": files.tensors[LAYER + "mlp.experts.5.up_proj.weight"] * 1.01})


def swap(files: DeepseekFiles) -> None:
    files.edit(**{EH_PROJ: swapped_halves(files.tensors[EH_PROJ])})


def declare_the_other_order(files: DeepseekFiles) -> None:
    files.edit_json(MANIFEST_FILE, fusion_order="he")


def declare_another_vocabulary(files: DeepseekFiles) -> None:
    files.edit_json(MANIFEST_FILE, vocab_size=TINY_V3.vocab_size + 1)


def copy_of_another_embedding(files: DeepseekFiles) -> None:
    files.edit(**{LAYER + "embed_tokens.weight": files.tensors[LAYER + "embed_tokens.weight"] + 1})


@pytest.mark.covers(61, 62, 112, 121, 136, 155)
@pytest.mark.parametrize(
    "fault",
    [drop, misshape, corrupt, swap, declare_the_other_order, declare_another_vocabulary, copy_of_another_embedding],
)
async def test_whatever_is_wrong_with_the_module_the_target_serves(
    tmp_path: Path, fault: Callable[[DeepseekFiles], None]
) -> None:
    files = write_tiny_v3(tmp_path)
    plain, _ = await texts(tmp_path, depth=0)
    write_mtp_manifest(tmp_path, sealed(open_checkpoint(str(tmp_path))))
    spoken, rows = await texts(tmp_path, depth=2)
    by_module = sum(row.drafted for row in rows if not row.copied)
    assert (spoken, by_module > 0) == (plain, True), "sealed and sound: it drafts"
    fault(files)
    spoken, rows = await texts(tmp_path, depth=2)
    assert spoken == plain
    assert sum(row.drafted for row in rows if not row.copied) == 0  # copies of the text need no module


@pytest.mark.covers(112)
async def test_without_a_seal_a_wrong_order_shows_in_acceptance_alone(tmp_path: Path) -> None:
    files = write_tiny_v3(tmp_path)
    plain, rows = await texts(tmp_path, depth=1)
    right = sum(row.accepted for row in rows)
    swap(files)
    spoken, rows = await texts(tmp_path, depth=1)
    assert spoken == plain
    assert sum(row.accepted for row in rows) < right / 2
