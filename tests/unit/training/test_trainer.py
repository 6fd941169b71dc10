"""A stopped and resumed run ends with the very weights of one that never stopped; the schedule; the sub-vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import SHAPE, random_document, random_tensors

from seqmtp_serve.training.compute_dtype import faster_dtype
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import module_from_last_layer
from seqmtp_serve.training.shards import read_shard, write_shard
from seqmtp_serve.training.trainer import FitSettings, Trainer, is_held_out
from seqmtp_serve.training.vocabulary import count_reply_tokens, coverage, rank_tokens

SETTINGS = FitSettings(steps=9, seed=3, lr=1e-2, warmup_steps=2, batch_rows=60, num_chains=3, compute_dtype="float32")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        documents = [random_document(12 + i, 5, seed=10 * shard + i) for i in range(8)]
        write_shard(folder / f"s-{shard}.safetensors", documents)
    return folder


def trainer(shards: Path, folder: Path, frozen: Frozen, settings: FitSettings = SETTINGS) -> Trainer:
    module = module_from_last_layer(SHAPE, random_tensors(SHAPE, seed=0))
    return Trainer(module, frozen, settings, shards=shards, folder=folder)


def step_lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_resume_is_exact(shards: Path, tmp_path: Path, frozen: Frozen) -> None:
    """Stopped twice, once inside an epoch; a shard that arrives meanwhile waits for the next epoch."""
    settings = replace(SETTINGS, decay_start=SETTINGS.steps)  # a constant rate: stopping early changes nothing else
    whole = trainer(shards, tmp_path / "whole", frozen, settings)
    whole.run(save_every_s=1e9)
    assert whole.state.epoch >= 1
    for stop in (2, 5, settings.steps):
        part = trainer(shards, tmp_path / "parts", frozen, replace(settings, steps=stop))
        part.run(save_every_s=1e9)
        assert part.state.step == stop
    assert replace(part.state, seconds=0.0) == replace(whole.state, seconds=0.0)
    expected = whole.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in part.module.state_dict().items())
    lines = step_lines(tmp_path / "parts")
    assert [line["step"] for line in lines] == list(range(1, settings.steps + 1))
    assert all(len(line["loss"]) == settings.depth for line in lines)


def test_new_shards_join_at_the_next_epoch(shards: Path, tmp_path: Path, frozen: Frozen) -> None:
    first = trainer(shards, tmp_path / "run", frozen, replace(SETTINGS, steps=1))
    first.run(save_every_s=1e9)
    assert first.state.files == ("s-0.safetensors", "s-1.safetensors")
    write_shard(shards / "s-2.safetensors", [random_document(15, 5, seed=99)])
    second = trainer(shards, tmp_path / "run", frozen, replace(SETTINGS, steps=2))
    second.run(save_every_s=1e9)
    assert second.state.files == ("s-0.safetensors", "s-1.safetensors")
    last = trainer(shards, tmp_path / "run", frozen)
    last.run(save_every_s=1e9)
    assert "s-2.safetensors" in last.state.files


def test_training_lowers_the_loss_at_every_depth(shards: Path, tmp_path: Path, frozen: Frozen) -> None:
    run = trainer(shards, tmp_path / "run", frozen, replace(SETTINGS, steps=60))
    run.run(save_every_s=1e9)
    lines = [line["loss"] for line in step_lines(tmp_path / "run")]
    for depth in range(SETTINGS.depth):
        assert sum(line[depth] for line in lines[-10:]) < 0.8 * sum(line[depth] for line in lines[:10])


def test_total_variation_falls_too_and_stays_below_one(shards: Path, tmp_path: Path, frozen: Frozen) -> None:
    run = trainer(shards, tmp_path / "run", frozen, replace(SETTINGS, steps=60, divergence="tv"))
    run.run(save_every_s=1e9)
    lines = [line["loss"] for line in step_lines(tmp_path / "run")]
    assert all(0 <= loss <= 1 for line in lines for loss in line)
    for depth in range(SETTINGS.depth):
        assert sum(line[depth] for line in lines[-10:]) < sum(line[depth] for line in lines[:10])


def test_rate_warms_up_holds_and_falls() -> None:
    settings = FitSettings(steps=100, seed=0, lr=1.0, warmup_steps=10, decay_start=50, final_lr_share=0.1)
    assert settings.lr_at(0) == pytest.approx(0.1)
    assert settings.lr_at(10) == settings.lr_at(49) == 1.0
    assert settings.lr_at(75) == pytest.approx(0.55)
    assert settings.lr_at(100) == pytest.approx(0.1)


def test_shards_keep_documents(tmp_path: Path) -> None:
    documents = [random_document(9, 4, seed=1), random_document(5, 2, seed=2)]
    write_shard(tmp_path / "a.safetensors", documents)
    for read, written in zip(read_shard(tmp_path / "a.safetensors"), documents, strict=True):
        assert torch.equal(read.tokens, written.tokens)
        assert torch.equal(read.hidden, written.hidden)
        assert (read.prompt_len, read.greedy) == (written.prompt_len, written.greedy)


def test_held_out_documents_are_a_small_share_that_stays_the_same() -> None:
    documents = [random_document(20, 5, seed=i) for i in range(600)]
    held_out = [is_held_out(doc) for doc in documents]
    assert 5 <= sum(held_out) <= 40
    assert held_out == [is_held_out(random_document(20, 5, seed=i)) for i in range(600)]


def test_sub_vocabulary_counts_replies_only_and_ranks_by_frequency() -> None:
    document = replace(random_document(8, 3, seed=0), tokens=torch.tensor([9, 9, 9, 4, 4, 7, 4, 7]))
    counts = count_reply_tokens([document], SHAPE.vocab_size)
    ids = rank_tokens(counts, 4)
    assert ids.tolist() == [4, 7, 0, 1]
    assert ids.dtype == torch.int32
    assert coverage(counts, ids) == 1.0
    assert coverage(counts, ids[:1]) == pytest.approx(3 / 5)


def test_products_run_in_one_of_two_dtypes() -> None:
    assert faster_dtype() in (torch.bfloat16, torch.float32)
