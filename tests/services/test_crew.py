"""The leader's side of a gang over real gRPC: who may join, and that a lost rank ends every wait with its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future

import grpc
import pytest

from seqmtp_serve.errors import InternalError, SeqMTPError, TargetIncomplete, Unavailable
from seqmtp_serve.fake import FakeTargetGroup
from seqmtp_serve.ports import StepCosts, StepPlan, StepReport, TargetInfo
from services.rpc import channel, status
from services.rpc.convert import from_wire, to_wire
from services.rpc.wire import gang, gang_rpc
from services.target.crew import Crew

WORLD_SIZE = 3


class Lead:
    """A crew of ranks 1 and 2 behind its server, and streams to it."""

    def __init__(self) -> None:
        self.crew = Crew("gang-1", WORLD_SIZE, "checkpoint-1")
        self.server = channel.new_server()
        gang_rpc.add_GangServicer_to_server(self.crew, self.server)
        self.address = channel.bind(self.server, "127.0.0.1", 0)
        self.channels: list[grpc.aio.Channel] = []

    async def join(self, rank: int, *, gang_id: str = "gang-1", fingerprint: str = "checkpoint-1"):
        """A rank's stream, on a connection of its own, after its hello."""
        connection = channel.connect(self.address)
        self.channels.append(connection)
        call = gang_rpc.GangStub(connection).Join()
        await call.write(gang.RankFrame(hello=gang.Hello(gang_id=gang_id, rank=rank, manifest_fingerprint=fingerprint)))
        return call

    async def formed(self):
        """The two ranks' streams, both ready."""
        calls = [await self.join(1), await self.join(2)]
        await self.crew.joined()
        self.crew.form()
        for call in calls:
            assert (await call.read()).WhichOneof("what") == "form"
            await call.write(gang.RankFrame(ready=to_wire(await info())))
        await self.crew.ready()
        return calls


async def info() -> TargetInfo:
    return await FakeTargetGroup().info()


@pytest.fixture
async def lead() -> AsyncIterator[Lead]:
    lead = Lead()
    await lead.server.start()
    yield lead
    await asyncio.gather(*(connection.close() for connection in lead.channels))
    await lead.server.stop(0)


async def refusal(call: grpc.aio.StreamStreamCall) -> SeqMTPError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError("the stream ended well")
    return status.from_call(failed.value)


def report(step_id: int) -> StepReport:
    return StepReport(step_id=step_id, rows=(), costs=StepCosts(), free_pages=1, proposer_ready=False)


async def result(answer: Future[StepReport]) -> StepReport:
    return await asyncio.wait_for(asyncio.wrap_future(answer), 20)


async def test_shares_go_to_their_ranks_and_reports_come_back(lead: Lead):
    calls = await lead.formed()
    answers = lead.crew.send([StepPlan(step_id=1, deadline_ms=1.0), StepPlan(step_id=1, deadline_ms=2.0)])
    for rank, call in enumerate(calls, start=1):
        share = from_wire(StepPlan, (await call.read()).share)
        assert share.deadline_ms == float(rank)
        await call.write(gang.RankFrame(report=to_wire(report(10 + rank))))
    assert [(await result(answer)).step_id for answer in answers] == [11, 12]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"gang_id": "gang-0"}, InternalError),
        ({"rank": 0}, InternalError),
        ({"rank": WORLD_SIZE}, InternalError),
        ({"fingerprint": "checkpoint-2"}, TargetIncomplete),
    ],
)
async def test_a_stranger_is_refused_and_the_gang_goes_on(lead: Lead, wrong: dict, error: type[SeqMTPError]):
    call = await lead.join(**{"rank": 1, **wrong})
    assert type(await refusal(call)) is error
    await lead.formed()


async def test_a_rank_joins_once(lead: Lead):
    await lead.formed()
    assert "not expected" in str(await refusal(await lead.join(2)))


async def test_a_lost_rank_ends_the_step_and_the_watch(lead: Lead):
    calls = await lead.formed()
    watching = asyncio.create_task(lead.crew.watch())
    answers = lead.crew.send([StepPlan(step_id=1), StepPlan(step_id=1)])
    for call in calls:
        await call.read()
    await lead.channels[1].close()
    with pytest.raises(Unavailable, match="rank 2 is lost"):
        await asyncio.wait_for(watching, 20)
    for answer in answers:
        with pytest.raises(Unavailable, match="rank 2 is lost"):
            await result(answer)
    with pytest.raises(Unavailable, match="rank 2 is lost"):
        await result(lead.crew.send([StepPlan(step_id=2), StepPlan(step_id=2)])[0])


async def test_a_rank_lost_before_it_is_ready_is_noticed(lead: Lead):
    await lead.join(1)
    await lead.join(2)
    await lead.crew.joined()
    await lead.channels[0].close()
    with pytest.raises(Unavailable, match="rank 1 is lost"):
        await asyncio.wait_for(lead.crew.ready(), 20)


async def test_a_report_nobody_waits_for_ends_the_gang(lead: Lead):
    calls = await lead.formed()
    await calls[0].write(gang.RankFrame(report=to_wire(report(1))))
    with pytest.raises(Unavailable, match="rank 1 is lost: it sent report"):
        await asyncio.wait_for(lead.crew.watch(), 20)
