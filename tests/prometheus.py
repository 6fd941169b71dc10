"""Debian's `prometheus` and `promtool` for the tests: `python -m tests.prometheus`, a part of `make setup-dev`.

No package index has them. The two programs are taken out of the Debian package without installing it, so neither root
nor a service is needed; what apt-get knows of the archive is asked for anew, in a folder of ours, only where it is
missing or old. Where that cannot be done, it is said, and the tests that need the programs are skipped with this
reason in pytest's summary.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")
BESIDE = Path(sysconfig.get_path("scripts"))
SKIPPED = "no promtool here: `python -m tests.prometheus` takes it from Debian's package"
LIMIT_S = 120


def program(name: str) -> Path | None:
    """Where it is: beside this Python, or on the path."""
    found = shutil.which(name, path=f"{BESIDE}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    return None if found is None else Path(found)


def are_missing() -> bool:
    return any(program(name) is None for name in PROGRAMS)


def download(folder: Path) -> Path:
    """The package as a file in the folder. Raises subprocess.SubprocessError or OSError."""
    package = ("download", "prometheus")
    try:
        _call("apt-get", *package, cwd=folder)
    except subprocess.CalledProcessError:  # the lists are missing, or name a version that the archive no longer has
        (folder / "lists/partial").mkdir(parents=True)
        own = [f"Dir::State::Lists={folder / 'lists'}", f"Dir::Cache={folder / 'cache'}", "APT::Sandbox::User="]
        options = [word for option in (*own, "Acquire::Retries=3") for word in ("-o", option)]
        _call("apt-get", *options, "update", cwd=folder)
        _call("apt-get", *options, *package, cwd=folder)
    (file,) = folder.glob("prometheus_*.deb")
    return file


def unpack(package: Path, into: Path) -> None:
    """The two programs, whole or not at all, into a folder."""
    inside = package.parent / "inside"
    _call("dpkg-deb", "--extract", str(package), str(inside))
    for name in PROGRAMS:
        arriving = into / f".{name}"
        shutil.copy2(inside / "usr/bin" / name, arriving)
        arriving.replace(into / name)


def _call(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def main() -> None:
    """Fetch what is missing; where that cannot be, say so."""
    if not are_missing():
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            unpack(download(Path(folder)), BESIDE)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        print(
            f"No prometheus and promtool: {last}\n"
            "Two tests of tests/services/test_monitoring.py are skipped without them.",
            file=sys.stderr,
        )
    else:
        print(f"prometheus and promtool, from Debian's package: {BESIDE}")


if __name__ == "__main__":
    main()
