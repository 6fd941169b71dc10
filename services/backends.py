"""`seqmtp backends`: which kernels this machine can run for V3's sizes, and why not the others."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a target group (default: 1)")
    parser.add_argument(
        "--numerics",
        choices=("invariant", "fast"),
        default="invariant",
        help="invariant: same bits for any batch (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Probe and print."""
    import torch

    from seqmtp_serve.model.backends.dispatch import DISPATCH, DispatchCase
    from seqmtp_serve.model.backends.grouped_gemm import GROUPED_GEMM, GemmCase
    from seqmtp_serve.model.backends.latent_attention import LATENT_ATTENTION, LatentCase
    from seqmtp_serve.model.backends.latent_prefill import LATENT_PREFILL, PrefillCase
    from seqmtp_serve.model.numerics import Numerics

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    numerics = Numerics(invariant=args.numerics == "invariant", device=place, product_dtype=dtype)
    latent = LatentCase(
        latent_size=512,
        rope_size=64,
        num_heads=128,
        page_size=64,
        softmax_scale=0.1352,
        numerics=numerics,
        dtype=dtype,
    )
    prefill = PrefillCase(query_head_dim=192, value_head_dim=128, dtype=dtype, device=device)
    gemm = GemmCase(num_groups=256, num_inputs=7168, num_outputs=4096, numerics=numerics, dtype=dtype)
    group = DispatchCase(world_size=args.ranks, num_experts=256, device=device)
    found = [
        *LATENT_ATTENTION.report(latent),
        *LATENT_PREFILL.report(prefill),
        *GROUPED_GEMM.report(gemm),
        *DISPATCH.report(group),
    ]
    if args.json:
        print(json.dumps({"device": device, "dtype": str(dtype), "backends": found}, indent=2))
        return 0
    print(f"on {device}, {dtype}, {args.numerics} numerics, for the sizes of DeepSeek-V3:")
    for one in found:
        print(f"  {one['kind']:<18}{one['name']:<18}{one['reason'] or 'can run'}")
    return 0
