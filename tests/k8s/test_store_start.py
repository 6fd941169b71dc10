"""The store's start script, with stand-ins for server and client: who replicates whom, and who must not start."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.k8s.rendered import K8S

SCRIPT = K8S / "base" / "store-start.sh"
ROLES = {"PRIMARY": "store-0", "PEERS": "store-0 store-1"}


class Start:
    """One start: its exit code, its words, and the configuration that the server would have read."""

    def __init__(
        self, folder: Path, *, held: str | None = "0", has_data: bool = False, tls: bool = False, **environment: str
    ) -> None:
        """`held`: keys that a peer answers with; None: no peer answers."""
        self.asked = folder / "asked"
        for name in ("run", "conf", "secret", "data", "bin"):
            (folder / name).mkdir()
        (folder / "conf" / "valkey.conf").write_text("appendonly yes")
        if tls:
            (folder / "tls").mkdir()
            (folder / "tls" / "tls.crt").touch()
        (folder / "secret" / "password").write_text("s3cret pass\n")
        if has_data:
            (folder / "data" / "appendonlydir").mkdir()
        self._stand_in(folder / "bin" / "valkey-server", 'cat "$1"; echo "argument: $1"')
        self._stand_in(
            folder / "bin" / "valkey-cli", "exit 1" if held is None else f'echo "$@" >> {self.asked}; echo {held}'
        )
        places = {f"{name.upper()}_DIR": str(folder / name) for name in ("run", "conf", "secret", "data", "tls")}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", str(SCRIPT)], env={"PATH": path, **places, **environment}, capture_output=True, text=True, timeout=60
        )
        self.code, self.says, self.conf = done.returncode, done.stderr, done.stdout
        self.file = folder / "run" / "valkey.conf"

    @staticmethod
    def _stand_in(path: Path, body: str) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


def test_the_password_is_in_a_private_file_and_in_no_argument(tmp_path: Path) -> None:
    start = Start(tmp_path, POD_NAME="store-0")
    assert start.code == 0, start.says
    assert 'requirepass "s3cret pass"' in start.conf.splitlines()
    assert "appendonly yes" in start.conf.splitlines()
    assert "s3cret" not in start.conf.rpartition("argument:")[2]
    assert stat.S_IMODE(start.file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("pod", "roles", "replicates"),
    [("store-0", {}, False), ("store-0", ROLES, False), ("store-1", ROLES, True), ("gcs-store-0", {}, False)],
)
def test_who_replicates(pod: str, roles: dict[str, str], replicates: bool, tmp_path: Path) -> None:
    start = Start(tmp_path, POD_NAME=pod, **roles)
    assert start.code == 0, start.says
    assert ("replicaof store-0.store-peers 6379" in start.conf.splitlines()) is replicates


@pytest.mark.parametrize(
    ("held", "has_data", "starts"),
    [("0", False, True), (None, False, True), ("7", False, False), ("7", True, True)],
    ids=["first start", "first start, peers not there yet", "its disk is gone", "an ordinary restart"],
)
def test_an_empty_primary_does_not_empty_its_replicas(
    held: str | None, has_data: bool, starts: bool, tmp_path: Path
) -> None:
    start = Start(tmp_path, held=held, has_data=has_data, POD_NAME="store-0", **ROLES)
    assert (start.code == 0) is starts
    assert ("Promote store-1" in start.says) is not starts


def test_a_promoted_pod_is_the_primary_and_the_old_one_follows(tmp_path: Path) -> None:
    roles = {**ROLES, "PRIMARY": "store-1"}
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    assert "replicaof" not in Start(tmp_path / "new", has_data=True, POD_NAME="store-1", **roles).conf
    assert "replicaof store-1.store-peers" in Start(tmp_path / "old", POD_NAME="store-0", **roles).conf


def test_a_certificate_means_tls_and_nothing_else_also_to_the_peers(tmp_path: Path) -> None:
    start = Start(tmp_path, tls=True, POD_NAME="store-0", STORE_USER="seqmtp", **ROLES)
    lines = start.conf.splitlines()
    assert {"port 0", "tls-port 6379", "tls-auth-clients yes", "tls-replication yes"} <= {*lines}
    assert f"tls-ca-cert-file {tmp_path}/tls/ca.crt" in lines
    assert start.asked.read_text().startswith(f"--user seqmtp --tls --cacert {tmp_path}/tls/ca.crt")
