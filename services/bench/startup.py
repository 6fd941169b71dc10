"""`seqmtp bench startup`: start a service of its own, and measure what it costs to get in.

Set-up (installing packages) is not measured. Ready is the first 200 of `/ready`; the first token is that of a short
prompt's stream, once right after that and then as the median of more; memory is the PSS of every process the service
started, after those requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil

from seqmtp_serve.errors import NotReady
from services.bench.machine import describe_machine
from services.bench.processes import alive, family, memory_of
from services.bench.url_backend import UrlBackend
from services.free_port import free_port

READY_WITHIN_S = 300.0
STOP_WITHIN_S = 30.0
SHORT_PROMPT = "Say hello."


def serve_command(model: str, serve_args: Sequence[str], port: int, data_dir: str) -> list[str]:
    """`seqmtp serve`, by the interpreter this runs in, on an empty `data_dir`: no earlier store to load or disturb."""
    own = ["--port", str(port), "--data-dir", data_dir]
    return [sys.executable, "-m", "services.cli", "serve", model, *own, *serve_args]


async def measure_startup(command: Sequence[str], port: int, *, requests: int = 5) -> dict[str, Any]:
    """Start `command`, which serves on 127.0.0.1:`port`, measure it, stop it. Raises NotReady with its log's end."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        started = perf_counter()
        service = await _start(command, log)
        try:
            backend = UrlBackend(f"http://127.0.0.1:{port}")
            await _until_ready(backend, service, log)
            ready_s = perf_counter() - started
            await backend.connect()
            replies = [await backend.generate(SHORT_PROMPT, depth=3, max_tokens=16) for _ in range(requests)]
            members = family(psutil.Process(service.pid))
            memory = memory_of(members)
        finally:
            stop_s, left = await _stop(service)
    return {
        "model": backend.model,
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "ready_s": round(ready_s, 2),
        "first_token_s": round(replies[0].first_token_s, 4),
        "first_token_warm_s": round(median(reply.first_token_s for reply in replies[1:] or replies), 4),
        "pss_mib": round(sum(one["pss_mib"] for one in memory), 1),
        "processes": memory,
        "stop_s": round(stop_s, 2),
        "left_behind": left,
    }


@contextlib.asynccontextmanager
async def running(model: str, serve_args: Sequence[str]) -> AsyncIterator[tuple[UrlBackend, str, psutil.Process]]:
    """A service of its own as long as the block: a backend that talks to it, its URL, its launcher."""
    port = free_port()
    with TemporaryDirectory(prefix="seqmtp-bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "serve.log"
        service = await _start(serve_command(model, serve_args, port, folder), log)
        url = f"http://127.0.0.1:{port}"
        try:
            backend = UrlBackend(url)
            await _until_ready(backend, service, log)
            await backend.connect()
            yield backend, url, psutil.Process(service.pid)
        finally:
            await _stop(service)


async def _start(command: Sequence[str], log: Path) -> asyncio.subprocess.Process:
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


async def _until_ready(backend: UrlBackend, service: asyncio.subprocess.Process, log: Path) -> None:
    started = perf_counter()
    while perf_counter() - started < READY_WITHIN_S:
        if service.returncode is not None:
            raise NotReady(f"the service ended with code {service.returncode}:\n{_tail(log)}")
        with contextlib.suppress(NotReady):
            await backend.ready()
            return
        await asyncio.sleep(0.1)
    raise NotReady(f"not ready after {READY_WITHIN_S:.0f} s:\n{_tail(log)}")


async def _stop(service: asyncio.subprocess.Process) -> tuple[float, list[str]]:
    """Ctrl-C, then wait. Returns the seconds it took and the names of processes it left (which are then killed)."""
    started, members = perf_counter(), list[psutil.Process]()
    if service.returncode is None:
        members = family(psutil.Process(service.pid))
        service.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WITHIN_S):
                await service.wait()
    stop_s = perf_counter() - started
    await asyncio.sleep(0.2)
    left = alive(members)
    names = [one["name"] for one in memory_of(left)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await service.wait()
    return stop_s, names


def _tail(log: Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
