"""A proposer that answers with garbage, over a real connection: its frames cost drafts, never the target's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from seqmtp_serve.ports import FeedRows
from seqmtp_serve.request import Ref
from services.proposer.servicer import ProposerServicer
from services.proposer.worker import PassLoop
from services.rpc import channel
from services.rpc.convert import to_wire
from services.rpc.wire import common, proposer, proposer_rpc
from services.target.proposer_link import GrpcProposer
from tests.services.test_proposer_link import CountingEngine

REF = Ref(request_id="chat", epoch=1, version=1, digest=bytes(16))

Answer = Callable[[common.Ref], proposer.Draft]


def torn(ref: common.Ref) -> proposer.Draft:
    """Three tokens with two probabilities."""
    return proposer.Draft(ref=ref, tokens=[1], draft_probs=[proposer.SparseRow(tokens=[1, 2, 3], probs=[0.5, 0.5])])


def forged(ref: common.Ref) -> proposer.Draft:
    """Another digest."""
    return proposer.Draft(ref=common.Ref(request_id=ref.request_id, epoch=1, version=1, digest=b"x" * 16), tokens=[1])


def swapped(ref: common.Ref) -> proposer.Draft:
    """Another request's."""
    return proposer.Draft(ref=common.Ref(request_id="other", epoch=1, version=1, digest=ref.digest), tokens=[1])


def nameless(ref: common.Ref) -> proposer.Draft:
    """Of no state at all."""
    return proposer.Draft(tokens=[1])


class HostileServicer(proposer_rpc.ProposerServicer):
    """Answers each feed with `answer`, then with the honest draft (tokens 7, 8) once `honest` is set."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.honest = answer, False

    async def Info(self, request, context):
        return proposer.ProposerInfo(proposer_id="p", hidden_size=4)

    async def Propose(self, request_iterator, context) -> None:
        async for frame in request_iterator:
            for feed in frame.feeds:
                draft = proposer.Draft(ref=feed.ref, tokens=[7, 8]) if self.honest else self.answer(feed.ref)
                await context.write(proposer.DraftFrame(drafts=[draft]))


@contextlib.asynccontextmanager
async def served(servicer: proposer_rpc.ProposerServicer) -> AsyncIterator[str]:
    server = channel.new_server()
    proposer_rpc.add_ProposerServicer_to_server(servicer, server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    yield address
    await server.stop(None)


def feed(first_base: int) -> FeedRows:
    return FeedRows(ref=REF, first_base=first_base, hidden=torch.ones(1, 4), next_ids=(3,), depth=2, reset=True)


@pytest.mark.covers(86, 130)
@pytest.mark.parametrize("answer", [torn, forged, swapped, nameless])
async def test_garbage_costs_a_draft_and_no_process(answer: Answer) -> None:
    servicer = HostileServicer(answer)
    async with served(servicer) as address:

        async def discover():
            return [address]

        link = GrpcProposer(discover, lambda info: None)
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(60):
            while not link.ready:
                await asyncio.sleep(0.01)
            link.feed([feed(0)])
            assert await asyncio.to_thread(link.collect, [REF], 1.0) == {}
            servicer.honest = True
            drafts: dict = {}
            while not drafts:  # a torn frame costs the connection: it is opened anew
                assert not running.done(), "the link ended: its process would, too"
                link.feed([feed(0)])
                drafts = await asyncio.to_thread(link.collect, [REF], 1.0)
                await asyncio.sleep(0.05)
        assert drafts["chat"].tokens == (7, 8)
        running.cancel()


def misshapen() -> proposer.FeedRows:
    message = to_wire(feed(0))
    message.hidden.shape[0] = 3
    return message


def unknown_dtype() -> proposer.FeedRows:
    message = to_wire(feed(0))
    message.hidden.dtype = 99
    return message


def huge() -> proposer.FeedRows:
    message = to_wire(feed(0))
    del message.hidden.shape[:]
    message.hidden.shape.extend([2**31 - 1, 2**31 - 1, 2**31 - 1])
    return message


@pytest.mark.parametrize("garbage", [misshapen, unknown_dtype, huge])
async def test_garbled_rows_end_their_own_stream_only(garbage: Callable[[], proposer.FeedRows]) -> None:
    engine = CountingEngine()
    passes = PassLoop(engine)
    running = asyncio.create_task(passes.run())
    async with served(ProposerServicer(passes, proposer.ProposerInfo())) as address, channel.connect(address) as link:
        stub = proposer_rpc.ProposerStub(link)
        hostile, honest = stub.Propose(), stub.Propose()
        await hostile.write(proposer.FeedFrame(feeds=[garbage()]))
        await honest.write(proposer.FeedFrame(feeds=[to_wire(feed(0))]))
        async with asyncio.timeout(30):
            (draft,) = (await honest.read()).drafts
            assert list(draft.tokens) == [4, 5]
            assert (await hostile.code()).name == "INVALID_ARGUMENT"
        honest.cancel()
    assert not running.done()
    running.cancel()
