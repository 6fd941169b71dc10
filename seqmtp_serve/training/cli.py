"""``seqmtp fit``: rollout."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of ``seqmtp fit``."""
    commands = parser.add_subparsers(dest="fit_command", required=True)
    rollout = commands.add_parser("rollout", help="sample the target's own replies into shards")
    rollout.add_argument("--target", type=Path, default=None, help="GGUF of the target (default: the packaged one)")
    rollout.add_argument("--out", type=Path, required=True)
    rollout.add_argument("--kind", choices=("self", "grid", "mixed"), required=True)
    rollout.add_argument("--slots", type=int, default=96)
    rollout.add_argument("--max-len", type=int, default=352)
    rollout.add_argument("--max-reply", type=int, default=256)
    rollout.add_argument("--tokens", type=int, default=1_000_000)
    rollout.add_argument("--shard-tokens", type=int, default=100_000)
    rollout.add_argument("--seed", type=int, required=True)


def run(args: argparse.Namespace) -> int:
    """Run one sub-command, on one thread."""
    torch.set_num_threads(1)
    from seqmtp_serve.training import collect, target_file, tasks

    file = target_file.read_target_file(args.target or target_file.default_target_path())
    streams = {"self": tasks.self_written, "grid": tasks.from_grid, "mixed": tasks.mixed}
    stream = streams[args.kind](args.seed, args.max_reply)
    collect.collect(
        file,
        stream,
        args.out,
        name=f"{args.kind}-{args.seed}",
        num_slots=args.slots,
        max_len=args.max_len,
        seed=args.seed,
        max_tokens=args.tokens,
        shard_tokens=args.shard_tokens,
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="seqmtp fit")
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
