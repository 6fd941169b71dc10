"""Generates `services/rpc/pb` from `proto/`: `python -m services.rpc.build`. Built, never committed.

`-I services/rpc/pb=proto` tells protoc that the sources live under the package they are generated into, so the
generated modules import each other rightly without being patched (gRPC, `examples/python/helloworld`). The same guard
runs at first import (`wire.py`), so a fresh clone or an edited .proto needs no command; it takes a file lock, because
four services may start at the same moment.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
PACKAGE = "services/rpc/pb"
STAMP = ROOT / PACKAGE / "STAMP"
GENERATOR = [Path(__file__), Path(__file__).with_name("stub_types.py")]


def sources() -> list[Path]:
    """Every .proto file, in a fixed order."""
    return sorted(PROTO.rglob("*.proto"))


def fingerprint() -> str:
    """What the generated code depends on: the sources, this code, and the runtime that checks protoc's version."""
    digest = hashlib.sha256(version("protobuf").encode())
    for path in [*sources(), *GENERATOR]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    """Whether the generated code fits the sources. True where there are none (an installed wheel carries the code)."""
    if not sources():
        return True
    return STAMP.is_file() and STAMP.read_text() == fingerprint()


def generate() -> None:
    """Generate everything into a scratch folder, then put it in place. Raises RuntimeError if protoc refuses."""
    from grpc_tools import protoc

    from services.rpc.stub_types import stub_types

    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch, "descriptors")
        arguments = ["protoc", f"-I{PACKAGE}={PROTO}", f"--descriptor_set_out={described}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main([*arguments, *map(str, sources())]) != 0:
            raise RuntimeError("protoc refused the files in proto/: its own message is above")
        for path, text in stub_types(described.read_bytes()).items():
            Path(scratch, path).write_text(text)
        built = Path(scratch) / PACKAGE
        for folder in [built, *(path for path in built.rglob("*") if path.is_dir())]:
            (folder / "__init__.py").touch()
        shutil.copytree(built, ROOT / PACKAGE, dirs_exist_ok=True)
    STAMP.write_text(fingerprint())


def ensure() -> None:
    """Generate if the sources changed. One process does it, the others wait for that one."""
    if is_current():
        return
    (ROOT / PACKAGE).mkdir(parents=True, exist_ok=True)
    with (ROOT / PACKAGE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current():
            generate()


if __name__ == "__main__":
    generate()
    print(f"generated {PACKAGE} from {len(sources())} files in proto/", file=sys.stderr)
