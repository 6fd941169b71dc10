"""`seqmtp seal MODEL`: record the values of an MTP part in its `manifest.json`, so that any later change is named."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder of safetensors with MTP layers")


def run(args: argparse.Namespace) -> int:
    """Write the manifest. Raises MtpIncomplete when the part does not pass its gate as it is."""
    from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE, write_mtp_manifest
    from seqmtp_serve.checkpoint.open import open_checkpoint
    from seqmtp_serve.checkpoint.seal import sealed
    from seqmtp_serve.errors import InvalidField

    folder = Path(args.model)
    if not folder.is_dir():
        raise InvalidField(f"{folder}: only a folder can be sealed", param="model")
    manifest = sealed(open_checkpoint(args.model))
    write_mtp_manifest(folder, manifest)
    print(f"{folder / MANIFEST_FILE}: {len(manifest.tensor_fingerprints)} tensors recorded")
    return 0
