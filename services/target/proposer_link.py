"""The target's view of a remote proposer: ports.Proposer over one long-lived stream, found in the registry.

Two threads meet here. The engine's thread calls `feed` and `collect`; the event loop keeps the connection (`run`).
A proposer that is lost, hangs, or was never there costs drafts, never a token: `feed` drops what it cannot send, and
`collect` waits no longer than draft_box.py allows. Each new connection is a new `generation`: the engine opens its
sequences anew from the hidden rows it kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import grpc
import torch

from seqmtp_serve.engine.hidden_rows import num_bytes
from seqmtp_serve.errors import Overloaded, SeqMTPError
from seqmtp_serve.ports import Draft, FeedRows
from seqmtp_serve.request import Ref
from services.rpc import channel, status
from services.rpc.convert import from_wire, to_wire
from services.rpc.discovery import Discover
from services.rpc.wire import proposer, proposer_rpc
from services.target.draft_box import DraftBox
from services.telemetry import current_traceparent

INFO_TIMEOUT_S = 1.0
RETRY_S = 0.2
REOPEN_S = 5.0  # refused feeds open the stream anew at most this often
MAX_QUEUED_FRAMES = 256
FRAME_BYTES = 4 * 2**20  # soft bound: a frame is closed once it holds more

FeedStream: TypeAlias = grpc.aio.StreamStreamCall[proposer.FeedFrame, proposer.DraftFrame]

log = logging.getLogger(__name__)

Judge = Callable[[proposer.ProposerInfo], str | None]  # why this proposer must not be used; None: it fits


class GrpcProposer:
    """Implements ports.Proposer. Create it in the event loop that runs `run()`."""

    def __init__(self, discover: Discover, judge: Judge) -> None:
        self._discover = discover
        self._judge = judge
        self._loop = asyncio.get_running_loop()
        self._box = DraftBox()
        self._lock = threading.Lock()  # guards the four below; taken before the box's own
        self._ready = False
        self._generation = 0
        self._open: set[str] = set()  # sequences opened on this connection, with no gap since
        self._detail = "no proposer is registered"
        self._frames: asyncio.Queue[proposer.FeedFrame] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._call: FeedStream | None = None
        self._reopened_at = -REOPEN_S

    # ---- the engine's thread

    @property
    def ready(self) -> bool:
        """Whether a fitting proposer is connected. It may still hang: then drafts do not come."""
        return self._ready

    @property
    def generation(self) -> int:
        """Rises with each connection."""
        return self._generation

    @property
    def detail(self) -> str:
        """In a sentence, why there are no drafts; empty when there should be."""
        if self._ready:
            return "the proposer does not answer" if self._box.stalled else ""
        return self._detail

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        """See ports.Proposer. Rows are copied before this returns; a feed that would leave a gap is dropped."""
        with self._lock:
            self._box.forget(closed)
            self._open.difference_update(closed)
            if not self._ready:
                return
            self._open.update(rows.ref.request_id for rows in feeds if rows.reset)
            sent = [rows for rows in feeds if rows.ref.request_id in self._open]
            self._box.expect(rows.ref for rows in sent if rows.depth > 0)
            generation = self._generation
        if sent or closed:
            frames = list(_frames(_on_host(sent), closed))
            if traceparent := current_traceparent():
                frames[0].traceparent = traceparent
            self._loop.call_soon_threadsafe(self._enqueue, generation, frames)

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """See ports.Proposer."""
        return self._box.collect(refs, timeout_s)

    # ---- the event loop

    async def run(self) -> None:
        """Keep a connection to a fitting proposer until cancelled."""
        while True:
            for address in await self._addresses():
                await self._use(address)
            await asyncio.sleep(RETRY_S)

    async def _addresses(self) -> Sequence[str]:
        try:
            addresses = await self._discover()
        except SeqMTPError as error:
            self._explain(f"proposers cannot be looked up: {error}")
            return ()
        if not addresses:
            self._explain("no proposer is registered")
        return addresses

    async def _use(self, address: str) -> None:
        """Connect and stay connected as long as it lasts. Never raises for what the peer does."""
        async with channel.connect(address) as connection:
            stub = proposer_rpc.ProposerStub(connection)
            try:
                info = await stub.Info(proposer.ProposerInfoRequest(), timeout=INFO_TIMEOUT_S)
                if (reason := self._judge(info)) is not None:
                    self._explain(reason)
                    return
                log.info("using proposer %s at %s", info.proposer_id, address)
                await self._talk(stub.Propose())
            except grpc.aio.AioRpcError as failure:
                self._explain(f"the proposer at {address} is lost: {status.from_call(failure)}")
            except ValueError as malformed:  # its frames cost drafts, not this process
                self._explain(f"the proposer at {address} sent a malformed frame: {malformed}")

    def _explain(self, detail: str) -> None:
        """Why there are no drafts now. Attempts repeat several times a second; the log hears of each reason once."""
        if detail != self._detail:
            log.warning("no drafts: %s", detail)
        self._detail = detail

    async def _talk(self, call: FeedStream) -> None:
        self._frames = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._call = call
        with self._lock:
            self._open.clear()
            self._generation += 1
            self._ready = True
        sending = asyncio.create_task(self._send(call, self._frames))
        try:
            while isinstance(frame := await call.read(), proposer.DraftFrame):
                self._receive(frame)
            self._explain("the proposer closed the stream")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # we are being stopped; otherwise `_hang_up` cancelled the call
        finally:
            with self._lock:
                self._ready = False
                self._open.clear()
                self._box.clear()
            self._call = None
            sending.cancel()
            call.cancel()

    async def _send(self, call: FeedStream, frames: asyncio.Queue[proposer.FeedFrame]) -> None:
        with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the reader sees the same end
            while True:
                await call.write(await frames.get())

    def _enqueue(self, generation: int, frames: list[proposer.FeedFrame]) -> None:
        if generation != self._generation:
            return
        try:
            for frame in frames:
                self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._hang_up("the proposer does not take what it is sent")

    def _receive(self, frame: proposer.DraftFrame) -> None:
        self._box.put(from_wire(Draft, draft) for draft in frame.drafts if not draft.HasField("error"))
        for draft in frame.drafts:
            if draft.HasField("error"):
                self._refused(from_wire(Ref, draft.ref), draft.error.code, draft.error.message)

    def _refused(self, ref: Ref, code: str, message: str) -> None:
        """The sequence has a gap now. Out of pages: it decodes without drafts; else open all anew, not too often."""
        with self._lock:
            self._open.discard(ref.request_id)
            self._box.refuse(ref)
        log.warning("feed of %s version %d refused: %s (%s)", ref.request_id, ref.version, message, code)
        if code != Overloaded.code and time.monotonic() - self._reopened_at >= REOPEN_S:
            self._reopened_at = time.monotonic()
            self._hang_up("the proposer refused a feed")

    def _hang_up(self, reason: str) -> None:
        self._explain(reason)
        if self._call is not None:
            self._call.cancel()


def _on_host(feeds: Sequence[FeedRows]) -> Sequence[FeedRows]:
    """Rows that lie on a device, brought here together: one transfer for all, not one a feed."""
    if not feeds or feeds[0].hidden.device.type == "cpu":
        return feeds
    lens = [len(rows.next_ids) for rows in feeds]
    hidden = torch.split(torch.cat([rows.hidden for rows in feeds]).cpu(), lens)
    found = [rows.hidden_scales for rows in feeds if rows.hidden_scales is not None]
    scales = torch.split(torch.cat(found).cpu(), lens) if found else (None,) * len(feeds)
    moved = zip(feeds, hidden, scales, strict=True)
    return [replace(rows, hidden=own, hidden_scales=scale) for rows, own, scale in moved]


def _frames(feeds: Sequence[FeedRows], closed: Sequence[str]) -> Iterator[proposer.FeedFrame]:
    """Frames of a bounded size; `closed` goes first."""
    frame = proposer.FeedFrame(closed=closed)
    size = 0
    for rows in feeds:
        frame.feeds.append(to_wire(rows))
        size += num_bytes(rows.hidden, rows.hidden_scales)
        if size > FRAME_BYTES:
            yield frame
            frame, size = proposer.FeedFrame(), 0
    if frame.feeds or frame.closed:
        yield frame
