"""The commands of `seqmtp fit`: every option reaches the run, and an interrupted rollout keeps what has finished."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_llama import SHAPE, random_document, random_tensors

from seqmtp_serve.training import commands
from seqmtp_serve.training.cli import add_arguments
from seqmtp_serve.training.collect import collect
from seqmtp_serve.training.rollout import Task
from seqmtp_serve.training.shards import read_shard, write_shard

OPENINGS = {"prefix": [5, 9], "opens": [0, 3]}


def tiny_checkpoint() -> Any:
    tensors = random_tensors(SHAPE, seed=0)
    return SimpleNamespace(dense_config=SHAPE, target_tensors=lambda: tensors, eos_token_ids=(0,))


def test_settings_of_a_fit_are_those_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "open_checkpoint", lambda *names: tiny_checkpoint())
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shard(shards / "s-0.safetensors", [random_document(12 + i, 5, seed=i) for i in range(8)])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = "--steps 1 --vocab 16 --divergence tv --sharpness 2 --depth-weights 1 0.5 --chains 3 --batch-rows 60"
    commands.train(parser.parse_args(f"train --shards {shards} --out {tmp_path / 'run'} {asked}".split()))
    settings = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])["settings"]
    assert (settings["divergence"], settings["sharpness"], settings["depth_weights"]) == ("tv", 2.0, [1.0, 0.5])
    assert (settings["steps"], settings["num_chains"], settings["batch_rows"]) == (1, 3, 60)


def test_an_interrupted_rollout_keeps_what_has_finished(tmp_path: Path) -> None:
    def until_interrupted() -> Iterator[Task]:
        for _ in range(12):
            yield Task(prompt=[7], temperature=0.0, max_reply=6)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(
            tiny_checkpoint(),
            lambda text: OPENINGS["prefix" if "system" in text else "opens"],
            until_interrupted(),
            tmp_path,
            name="grid-1",
            num_slots=4,
            max_len=40,
            seed=1,
            max_tokens=1000,
            shard_tokens=60,
        )
    found = [doc for path in sorted(tmp_path.glob("grid-1-*.safetensors")) for doc in read_shard(path)]
    assert 4 <= len(found) <= 12
    assert len(list(tmp_path.iterdir())) >= 2  # a whole shard, and what waited
