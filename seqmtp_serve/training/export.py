"""A training run as an MTP part: released-layout names, bf16, and a manifest with the run's own record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.export import write_mtp_part
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.mtp_module import MtpModule
from seqmtp_serve.training.objective import Kind
from seqmtp_serve.training.run_state import RunState, load_run
from seqmtp_serve.training.trainer import load_documents
from seqmtp_serve.training.vocabulary import count_reply_tokens, coverage, rank_tokens

START_RECORD = "start.json"
_OBJECTIVES: dict[Kind, str] = {"kl": "KL(target || draft)", "tv": "total variation"}


def keep_start_record(folder: Path, checkpoint: Checkpoint) -> None:
    """Leave the training record of the part a new run starts from beside the run, for :func:`export_run`."""
    assert checkpoint.manifest.mtp is not None
    (folder / START_RECORD).write_text(checkpoint.manifest.mtp.training_json)


def export_run(args: argparse.Namespace) -> dict[str, Any]:
    """Write ``--out`` from the latest checkpoint of ``--run``; returns the training record that its manifest keeps.

    The sub-vocabulary limits only the draft head, not the module: with ``--shards`` it is ranked anew.
    """
    checkpoint = open_checkpoint(args.target)
    module = MtpModule(checkpoint.dense_config)
    state = load_run(args.run / "latest.safetensors", module)
    draft_ids = torch.tensor(json.loads((args.run / "draft_token_ids.json").read_text()), dtype=torch.int32)
    record = run_record(args.run / "log.jsonl", state)
    if args.shards is not None:
        names = tuple(sorted(shard.name for shard in args.shards.glob("*.safetensors")))
        counts = count_reply_tokens(load_documents(args.shards, names), checkpoint.dense_config.vocab_size)
        draft_ids = rank_tokens(counts, args.vocab)
        record["sub_vocabulary"] = {
            "size": args.vocab,
            "reply_tokens_ranked": int(counts.sum()),
            "coverage": round(coverage(counts, draft_ids), 4),
        }
    if args.acceptance is not None:
        record["acceptance"] = json.loads(args.acceptance.read_text())
    if (start := args.run / START_RECORD).exists():
        record["started_from"] = json.loads(start.read_text())
    layer = checkpoint.dense_config.num_layers
    layers = {f"model.layers.{layer}.{name}": value for name, value in module.state_dict().items()}
    layers[f"model.layers.{layer}.draft_token_ids"] = draft_ids
    write_mtp_part(
        args.out,
        checkpoint,
        layers,
        MtpConfig(draft_vocab_size=len(draft_ids)),
        training=record,
    )
    return record


def run_record(log: Path, state: RunState) -> dict[str, Any]:
    """What a run was made of, read off its log: settings of each leg, last losses by depth, held-out acceptance."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and line["step"] <= state.step]
    recent = steps[-50:]
    depths = range(len(recent[-1]["loss"]))
    held_out = [line for line in lines if "held_out" in line]
    legs = [line for line in lines if "settings" in line]
    measure = _OBJECTIVES[legs[-1]["settings"].get("divergence", "kl")]
    return {
        "objective": f"mean over depths (weighted) of {measure} over the sub-vocabulary, mean over reply rows",
        "steps": state.step,
        "reply_rows": state.rows,
        "hours": round(state.seconds / 3600, 2),
        "shards": list(state.files),
        "legs": legs,
        "loss_by_depth_last_50_steps": [round(sum(s["loss"][k] for s in recent) / len(recent), 4) for k in depths],
        "held_out": held_out[-1] if held_out else None,
    }
