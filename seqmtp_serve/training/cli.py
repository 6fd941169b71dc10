"""``seqmtp fit``: rollout, keep, recompute, train, export, acceptance."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of ``seqmtp fit``."""
    parser.add_argument(
        "--target", default="smollm2-135m-instruct", help="built-in name, folder or .gguf of the target"
    )
    commands = parser.add_subparsers(dest="fit_command", metavar="COMMAND", required=True)

    rollout = commands.add_parser("rollout", help="sample the target's own replies into shards")
    rollout.add_argument("--out", type=Path, required=True, help="folder for the shards")
    rollout.add_argument(
        "--kind",
        choices=("self", "grid", "article", "long"),
        required=True,
        help="what is asked: its own turns, a grid of short ones, its own articles, or passages of --passages",
    )
    rollout.add_argument("--passages", type=Path, default=None, help="shards whose replies --kind long builds on")
    rollout.add_argument("--slots", type=int, default=96, help="sequences sampled at a time (default: %(default)s)")
    rollout.add_argument("--max-len", type=int, default=352, help="positions of a slot, prompt and reply")
    rollout.add_argument("--max-reply", type=int, default=256, help="tokens of a reply at most (default: %(default)s)")
    rollout.add_argument("--tokens", type=int, default=1_000_000, help="stop after so many sampled tokens")
    rollout.add_argument(
        "--shard-tokens", type=int, default=100_000, help="sampled tokens a shard (default: %(default)s)"
    )
    rollout.add_argument("--seed", type=int, required=True, help="the same seed samples the same replies")

    keep = commands.add_parser("keep", help="the texts of shards without their hidden rows: two bytes a token")
    keep.add_argument("--shards", type=Path, required=True, help="folder of `fit rollout`")
    keep.add_argument("--out", type=Path, required=True, help="file for the texts")

    recompute = commands.add_parser("recompute", help="shards from kept texts: the target's pass, nothing sampled")
    recompute.add_argument("--texts", type=Path, required=True, help="file of `fit keep`")
    recompute.add_argument("--out", type=Path, required=True, help="folder for the shards")
    recompute.add_argument("--shard-tokens", type=int, default=100_000, help="tokens a shard (default: %(default)s)")

    train = commands.add_parser("train", help="fit the module to the shards; continues a run found in --out")
    train.add_argument("--shards", type=Path, required=True, help="folder of `fit rollout`")
    train.add_argument("--out", type=Path, required=True, help="folder of the run")
    train.add_argument(
        "--start", default=None, help="folder of an MTP part whose weights and vocabulary a new run takes"
    )
    train.add_argument("--steps", type=int, required=True, help="optimizer steps of the whole run")
    train.add_argument(
        "--decay-start", type=int, default=0, help="step from which the learning rate falls (default: %(default)s)"
    )
    train.add_argument("--lr", type=float, default=1e-3, help="learning rate before it falls (default: %(default)s)")
    train.add_argument("--seed", type=int, default=1, help="order of the batches (default: %(default)s)")
    train.add_argument("--batch-rows", type=int, default=8192, help="rows of a step, about (default: %(default)s)")
    train.add_argument("--chains", type=int, default=48, help="self-fed chains a document and step")
    train.add_argument(
        "--depth-weights", type=float, nargs="+", default=[1.0, 0.7, 0.5], help="loss weight of each self-fed depth"
    )
    train.add_argument(
        "--divergence",
        choices=("kl", "tv"),
        default="kl",
        help="of the draft from the target: Kullback-Leibler or total variation (default: %(default)s)",
    )
    train.add_argument(
        "--sharpness", type=float, default=1.0, help="multiplies the target's logits in the loss (default: %(default)s)"
    )
    train.add_argument("--vocab", type=int, default=8192, help="size of the draft sub-vocabulary")
    train.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")

    export = commands.add_parser("export", help="write a run's module as an MTP part that can be served")
    export.add_argument("--run", type=Path, required=True, help="folder of a training run")
    export.add_argument("--out", type=Path, required=True, help="folder for the MTP part")
    export.add_argument("--shards", type=Path, default=None, help="rank the sub-vocabulary anew over these shards")
    export.add_argument("--vocab", type=int, default=8192, help="its size, with --shards")
    export.add_argument("--acceptance", type=Path, default=None, help="output of `fit acceptance`, kept in the record")

    accept = commands.add_parser("acceptance", help="acceptance by position on prompts never trained on")
    accept.add_argument("--prompts", type=Path, required=True, help='JSONL with {"category", "turns": [..]}')
    accept.add_argument("--mtp", default=None, help="folder of an MTP part (default: the target's own)")
    accept.add_argument("--cache", type=Path, required=True, help="where the target's replies are kept")
    accept.add_argument(
        "--temperature", type=float, default=0.0, help="of replies and drafts; 0: greedy (default: %(default)s)"
    )
    accept.add_argument("--max-reply", type=int, default=192, help="tokens of a reply at most (default: %(default)s)")
    accept.add_argument("--depth", type=int, default=3, help="drafts of a round (default: %(default)s)")
    accept.add_argument("--vocab", type=int, default=None, help="draft over the most frequent so many tokens only")
    accept.add_argument(
        "--prompt-lookup", action="store_true", help="drafts may be copied from the request's own text, as served"
    )
    accept.add_argument("--every", type=int, default=1, help="use only every so-many-th prompt")


def run(args: argparse.Namespace) -> int:
    """Run one sub-command on one thread; prints JSON where there is a result. A signal to stop keeps what is done."""
    import torch

    from seqmtp_serve.training import commands
    from seqmtp_serve.training.export import export_run

    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs start with the first one ignored
        signal.signal(number, signal.default_int_handler)
    work: dict[str, Any] = {
        "rollout": commands.rollout,
        "keep": commands.keep,
        "recompute": commands.recompute,
        "train": commands.train,
        "acceptance": commands.acceptance,
        "export": export_run,
    }
    result = work[args.fit_command](args)
    if result is not None:
        print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="seqmtp fit")
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
