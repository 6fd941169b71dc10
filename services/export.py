"""`seqmtp export MODEL OUT`: a checkpoint written anew, as an ordinary one that other runtimes load."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a folder of safetensors")
    parser.add_argument("out", type=Path, help="a new or empty folder")
    parser.add_argument("--target-only", action="store_true", help="leave the MTP layers out")
    parser.add_argument("--dequantise", choices=("bfloat16", "float32"), help="what fp8 block-scaled weights become")
    parser.add_argument("--fusion-order", choices=("eh", "he"), default="", help="store eh_proj in this order")


def run(args: argparse.Namespace) -> int:
    """Write the folder. Raises InvalidField, TargetIncomplete or MtpIncomplete, with the reason."""
    import torch

    from seqmtp_serve.checkpoint.convert import Conversion, convert

    plain = getattr(torch, args.dequantise) if args.dequantise else None
    wanted = Conversion(target_only=args.target_only, plain=plain, fusion_order=args.fusion_order)
    convert(args.model, args.out, wanted)
    print(f"wrote {args.out}")
    return 0
