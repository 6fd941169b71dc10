"""The pass loop: one engine thread, all streams' frames batched, drafts routed back to the stream they belong to."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from seqmtp_serve.engine.proposer import Refusal
from seqmtp_serve.ports import Draft, FeedRows
from services.accounts import Account
from services.process_levels import process_levels
from services.proposer.passes import Close, Feed, into_namespace, original, renamed, take_pass
from services.telemetry import step_span

MAX_WAITING = 64  # feeds of one stream that may wait; then its frames stay in the network, which slows their sender


class DraftEngine(Protocol):
    """What the loop needs of an engine; called from one thread. `closed` is applied before `feeds`."""

    def propose(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> Sequence[Draft | Refusal]: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def num_held_pages(self) -> int: ...

    def levels(self) -> Mapping[str, float]: ...

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken; asked only when no sequence is open."""
        ...


@dataclass(slots=True, eq=False)
class Stream:
    """One target group's stream: its namespace, what it opened, and the answers on their way out."""

    name: str
    answers: asyncio.Queue[list[Draft | Refusal]] = field(default_factory=asyncio.Queue)
    sequences: set[str] = field(default_factory=set)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_WAITING))


class PassLoop:
    """Batches feeds into passes, one at a time, in a thread of the engine's own.

    Belongs to the event loop it is created in. A pass is begun where it becomes possible: no task stands before it.
    """

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="proposer-engine")
        self._waiting: deque[Feed | Close] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_passing = False
        self._broken: asyncio.Future[Exception] = self._loop.create_future()
        self._streams: dict[str, Stream] = {}
        self._names = itertools.count(1)
        self.held = (0, 0)  # open sequences and their pages, as of the last pass
        self._levels: Mapping[str, float] = engine.levels()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._waiting_since = 0.0
        self._traceparents: list[str] = []  # of frames that came since the last pass began

    def open_stream(self) -> Stream:
        """A new stream with an empty namespace."""
        stream = Stream(name=f"s{next(self._names)}")
        self._streams[stream.name] = stream
        return stream

    async def submit(
        self, stream: Stream, feeds: Sequence[FeedRows], closed: Sequence[str] = (), traceparent: str = ""
    ) -> None:
        """Queue a frame, with the span it belongs to. Waits while too much of this stream waits already."""
        if traceparent:
            self._traceparents.append(traceparent)
        for request_id in closed:
            stream.sequences.discard(request_id)
            self._waiting.append(Close(sequence=into_namespace(stream.name, request_id)))
        if not self._waiting:
            self._waiting_since = monotonic()
        for rows in feeds:
            if stream.room.locked():
                self._begin()  # what waits already makes room
            await stream.room.acquire()
            stream.sequences.add(rows.ref.request_id)
            self._waiting.append(Feed(rows=renamed(rows, stream.name)))
        self._begin()

    def account(self, id: str, model: str) -> Account:
        """This proposer's, as of its last pass."""
        age = monotonic() - self._waiting_since if self._waiting else 0.0
        waiting = {"waiting": float(len(self._waiting)), "queue_age_seconds": age}
        gauges = {**self._levels, **waiting, **process_levels()}
        return Account(kind="proposer", id=id, model=model, counters=dict(self._counts), gauges=gauges)

    def close_stream(self, stream: Stream) -> None:
        """Forget everything fed on the stream; answers still under way are dropped."""
        self._streams.pop(stream.name, None)
        own = {into_namespace(stream.name, request_id) for request_id in stream.sequences}
        kept = [item for item in self._waiting if item.sequence not in own]
        self._waiting.clear()
        self._waiting.extend(kept)
        self._waiting.extend(Close(sequence=sequence) for sequence in sorted(own))
        self._begin()

    async def run(self) -> None:
        """Until cancelled, or an error of the engine itself, which it raises: the engine's state is no longer known."""
        try:
            raise await self._broken
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Start the next pass, unless one runs. What comes meanwhile waits, and shares the pass after it."""
        if self._is_passing or self._broken.done() or not self._waiting:
            return
        feeds, closed = take_pass(self._waiting)
        self._waiting_since = monotonic()
        traceparents, self._traceparents = self._traceparents, []
        self._is_passing = True
        self._thread.submit(self._pass, feeds, closed, traceparents)

    def _pass(self, feeds: Sequence[FeedRows], closed: Sequence[str], traceparents: Sequence[str]) -> None:
        """In the engine's thread."""
        started = monotonic()
        try:
            with step_span("propose", traceparents):
                answers = self._engine.propose(feeds, closed)
            drafts = sum(isinstance(answer, Draft) for answer in answers)
            self._counts["passes"] += 1
            self._counts["feeds"] += len(feeds)
            self._counts["drafts"] += drafts
            self._counts["refusals"] += len(answers) - drafts
            self._counts["compute_ms"] += 1e3 * (monotonic() - started)
            self._levels = self._engine.levels()
            if not self._engine.num_sequences:
                self._engine.check()
            self.held = (self._engine.num_sequences, self._engine.num_held_pages)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._break, error)
        else:
            self._loop.call_soon_threadsafe(self._passed, feeds, answers)

    def _passed(self, feeds: Sequence[FeedRows], answers: Sequence[Draft | Refusal]) -> None:
        self._is_passing = False
        self._begin()
        self._deliver(feeds, answers)

    def _break(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_result(error)

    def _deliver(self, feeds: Sequence[FeedRows], answers: Sequence[Draft | Refusal]) -> None:
        for rows in feeds:
            stream, _ = original(rows.ref)
            if stream in self._streams:
                self._streams[stream].room.release()
        by_stream: defaultdict[str, list[Draft | Refusal]] = defaultdict(list)
        for answer in answers:
            stream, ref = original(answer.ref)
            by_stream[stream].append(replace(answer, ref=ref))
        for name, own in by_stream.items():
            if name in self._streams:
                self._streams[name].answers.put_nowait(own)
