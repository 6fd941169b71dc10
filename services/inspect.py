"""`seqmtp inspect MODEL`: what a checkpoint holds, what is missing, and which of the two gates fails.

Exit code: 0 both gates passed (or there is no MTP part), 3 the MTP gate failed, 4 the target gate failed, 2 no such
model.
"""

from __future__ import annotations

import argparse
import json
import sys

PASSED, NO_SUCH_MODEL, MTP_FAILED, TARGET_FAILED = 0, 2, 3, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder, a .gguf file, or a built-in name")
    parser.add_argument("--mtp", metavar="PATH", help="folder of the MTP module (manifest.json, model.safetensors)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--headers-only", action="store_true", help="do not read the tensors' values")


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    from seqmtp_serve.checkpoint.open import open_checkpoint
    from seqmtp_serve.checkpoint.report import as_text, describe
    from seqmtp_serve.errors import ModelNotFound, TargetIncomplete

    try:
        found = describe(open_checkpoint(args.model, args.mtp), deep=not args.headers_only)
    except ModelNotFound as fault:
        print(fault, file=sys.stderr)
        return NO_SUCH_MODEL
    except TargetIncomplete as fault:  # not even its headers can be read
        print(json.dumps({"model": args.model, "target": {"ok": False, "error": str(fault)}}) if args.json else fault)
        return TARGET_FAILED
    print(json.dumps(found, indent=2) if args.json else as_text(found), end="\n" if args.json else "")
    if not found["target"]["ok"]:
        return TARGET_FAILED
    return MTP_FAILED if found["mtp"] and not found["mtp"]["ok"] else PASSED
