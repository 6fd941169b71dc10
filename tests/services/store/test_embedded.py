"""The embedded server: private, alone in its directory, gone with whoever started it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from seqmtp_serve.errors import StoreError
from services.store.embedded import EmbeddedValkey

LAUNCH = """
import sys, time
from pathlib import Path
from services.store.embedded import EmbeddedValkey
server = EmbeddedValkey(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it goes while it is read
        return True


def test_it_listens_on_a_private_socket_only(own_valkey: EmbeddedValkey) -> None:
    assert stat.S_IMODE(own_valkey.socket.stat().st_mode) == 0o600
    with Redis.from_url(own_valkey.url) as redis:
        assert redis.config_get("port") == {"port": "0"}
        config = redis.config_get("append*")
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "no")
        assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_two_servers_never_share_a_directory(own_valkey: EmbeddedValkey) -> None:
    with pytest.raises(StoreError, match="another server"):
        EmbeddedValkey(own_valkey.directory).start()
    with Redis.from_url(own_valkey.url) as redis:
        assert redis.ping()


def test_stop_and_start_keep_the_data(own_valkey: EmbeddedValkey) -> None:
    with Redis.from_url(own_valkey.url) as redis:
        redis.set("key", "value")
    pid = own_valkey.pid
    assert pid is not None
    own_valkey.stop()
    own_valkey.stop()
    assert is_gone(pid)
    assert own_valkey.pid is None
    own_valkey.start()
    with Redis.from_url(own_valkey.url) as redis:
        assert redis.get("key") == b"value"


def test_a_long_path_still_gets_a_socket(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path / ("long" * 30)) as server:
        socket = server.socket
        with Redis.from_url(server.url) as redis:
            assert redis.ping()
            server.stop()
            server.start()
            assert redis.ping(), "the same URL after a restart"
    assert not socket.parent.exists()


def test_a_binary_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"valkey\.log"):
        EmbeddedValkey(tmp_path, binary=Path("/bin/false")).start()


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    give_up_at = time.monotonic() + 30
    while not is_gone(pid) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert is_gone(pid)
