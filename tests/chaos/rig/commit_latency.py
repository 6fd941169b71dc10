"""What a commit costs in each durability class: one row at a time, on an embedded server of its own.

C3 waits for one replica on the same machine: its figure is the floor of what a network adds to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from seqmtp_serve.frontier.ancestry import extend_digest, initial_digest
from seqmtp_serve.ports import Commit, CommitResult
from seqmtp_serve.request import CommittedRow, Request, SamplingParams
from services.free_port import free_port
from services.settings import StoreSettings
from services.store.client import RedisFrontierStore
from services.store.durability import Durability
from services.store.embedded import EmbeddedValkey

NUM_WARM = 20
CLASSES: tuple[Durability, ...] = ("C1", "C2", "C3")


async def commit_latencies_ms(folder: Path, num_commits: int) -> Mapping[str, tuple[float, ...]]:
    """Milliseconds of each commit, by class. The classes take turns: what else the machine does falls on all alike."""
    with ExitStack() as servers:
        writers = [await _writer(servers, folder / durability, durability) for durability in CLASSES]
        taken = [[await commit() for commit in writers] for _ in range(NUM_WARM + num_commits)][NUM_WARM:]
    return dict(zip(CLASSES, zip(*taken, strict=True), strict=True))


async def _writer(servers: ExitStack, folder: Path, durability: Durability) -> Callable[[], Awaitable[float]]:
    """Commits the next row of one request, and says how long that took."""
    port = free_port()
    primary = servers.enter_context(EmbeddedValkey(folder / "primary", durability=durability, port=port))
    if durability == "C3":
        servers.enter_context(EmbeddedValkey(folder / "replica", replica_of=port))
    request = Request(request_id="measured", prompt_ids=(1, 2, 3), params=SamplingParams())
    store = RedisFrontierStore(primary.url, StoreSettings(durability=durability, deadline_s=20.0))
    epoch = (await store.acquire(request, "bench", 60.0)).epoch
    version, digest = 0, initial_digest(request.prompt_ids)

    async def commit() -> float:
        nonlocal version, digest
        version += 1
        row = CommittedRow(request_id=request.request_id, version=version, tokens=(version,), origins="n")
        digest = extend_digest(digest, row.tokens)
        began = perf_counter()
        answers = await store.commit([Commit(epoch=epoch, row=row, digest=digest)])
        taken_ms = 1e3 * (perf_counter() - began)
        assert list(answers) == [CommitResult.OK]
        return taken_ms

    return commit
