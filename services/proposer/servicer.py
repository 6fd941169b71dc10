"""The Proposer service: Info, and one long-lived Propose stream for each target group."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc

from seqmtp_serve.engine.proposer import Refusal
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.ports import Draft, FeedRows
from services.proposer.worker import PassLoop, Stream
from services.rpc import status
from services.rpc.convert import from_wire, to_wire
from services.rpc.duplex import write_while
from services.rpc.wire import proposer, proposer_rpc

FeedStream: TypeAlias = grpc.aio.ServicerContext[proposer.FeedFrame, proposer.DraftFrame]

log = logging.getLogger(__name__)


class ProposerServicer(proposer_rpc.ProposerServicer):
    """Frames in, drafts out. A stream's end, however it comes, forgets every sequence fed on it."""

    def __init__(self, passes: PassLoop, info: proposer.ProposerInfo) -> None:
        self._passes = passes
        self._info = info

    async def Info(self, request: proposer.ProposerInfoRequest, context: object) -> proposer.ProposerInfo:
        answer = proposer.ProposerInfo()
        answer.CopyFrom(self._info)
        answer.num_sequences, answer.num_held_pages = self._passes.held
        return answer

    async def Propose(self, request: AsyncIterator[proposer.FeedFrame], context: FeedStream) -> None:
        stream = self._passes.open_stream()
        log.info("stream %s opened by %s", stream.name, context.peer())

        async def write(answers: Sequence[Draft | Refusal]) -> None:
            await context.write(proposer.DraftFrame(drafts=[_message(answer) for answer in answers]))

        try:
            await write_while(self._read(stream, context), stream.answers, write)
        except ValueError as error:
            await status.abort(context, InvalidField(f"malformed feed: {error}", param="feeds"))
        finally:
            self._passes.close_stream(stream)
            log.info("stream %s closed", stream.name)

    async def _read(self, stream: Stream, context: FeedStream) -> None:
        while isinstance(frame := await context.read(), proposer.FeedFrame):
            feeds = [from_wire(FeedRows, feed) for feed in frame.feeds]
            await self._passes.submit(stream, feeds, frame.closed, frame.traceparent)


def _message(answer: Draft | Refusal) -> proposer.Draft:
    if isinstance(answer, Draft):
        message: proposer.Draft = to_wire(answer)
        return message
    refused = proposer.Draft(ref=to_wire(answer.ref))
    refused.error.code, refused.error.message = answer.code, answer.message
    return refused
