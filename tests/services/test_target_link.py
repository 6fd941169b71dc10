"""The target service and the coordinator's link to it, over a real loopback connection, with a scripted engine."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest

from seqmtp_serve.errors import NotReady, Unavailable
from seqmtp_serve.ports import Admit, Release, RowResult, StepCosts, StepPlan, StepReport, TargetInfo, Verify
from seqmtp_serve.request import Ref, Request, SamplingParams
from services.coordinator import target_link
from services.coordinator.target_link import GrpcTargetGroup
from services.rpc import channel
from services.rpc.wire import target_rpc
from services.target.proposer_link import GrpcProposer
from services.target.servicer import TargetServicer
from services.target.step_thread import StepThread

INFO = TargetInfo(
    group_id="g",
    model="toy",
    max_model_len=64,
    vocab_size=100,
    page_size=4,
    num_pages=16,
    max_batch=4,
    max_depth=3,
    numerics="invariant",
    manifest_fingerprint="f",
)


class RecordingEngine:
    """Answers each verify with token 7; keeps the sequences it was told to hold. `gate` closed: a step hangs."""

    def levels(self):
        return {}

    def __init__(self):
        self.held: dict[str, int] = {}
        self.steps: list[int] = []
        self.num_checks = 0
        self.gate = threading.Event()
        self.gate.set()

    def info(self) -> TargetInfo:
        return INFO

    @property
    def is_idle(self) -> bool:
        return not self.held

    def check(self) -> None:
        self.num_checks += 1

    def step(self, plan: StepPlan) -> StepReport:
        self.gate.wait()
        if plan.deadline_ms == 13:
            raise RuntimeError("a bug")
        self.steps.append(plan.step_id)
        for release in plan.release:
            self.held.pop(release.request_id, None)
        self.held.update((admit.ref.request_id, admit.ref.epoch) for admit in plan.admit)
        rows = tuple(RowResult(ref=verify.ref, tokens=(7,)) for verify in plan.verify)
        return StepReport(step_id=plan.step_id, rows=rows, costs=StepCosts(), free_pages=9, proposer_ready=False)


class Group:
    """A target process' insides on one port."""

    def __init__(self):
        self.engine, self.address, self.hung = RecordingEngine(), "", asyncio.Event()

    async def start(self) -> None:
        async def nobody():
            return []

        loop = asyncio.get_running_loop()
        self.steps = StepThread(self.engine, on_hung=lambda: loop.call_soon_threadsafe(self.hung.set))
        self._watching = asyncio.create_task(self.steps.watch())
        self._server = channel.new_server()
        self.servicer = TargetServicer(self.steps, INFO, GrpcProposer(nobody, lambda info: None))
        target_rpc.add_TargetServicer_to_server(self.servicer, self._server)
        self.address = channel.bind(self._server, "127.0.0.1", 0)
        await self._server.start()

    async def stop(self) -> None:
        self._watching.cancel()
        await self._server.stop(None)
        self.engine.gate.set()
        self.steps.close()


@contextlib.asynccontextmanager
async def linked():
    group = Group()
    await group.start()

    async def discover():
        return [group.address]

    link = GrpcTargetGroup(discover)
    try:
        yield group, link
    finally:
        await link.close()
        await group.stop()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


REF = Ref(request_id="chat", epoch=3, version=1, digest=bytes(16))
REQUEST = Request(request_id="chat", prompt_ids=(1, 2), params=SamplingParams())


async def test_steps_are_answered_in_order_though_sent_ahead():
    async with linked() as (group, link):
        assert await link.info() == INFO
        reports = await asyncio.gather(
            *(link.step(StepPlan(step_id=i, verify=(Verify(ref=REF, depth=2),))) for i in range(1, 21))
        )
        assert [report.step_id for report in reports] == list(range(1, 21))
        assert group.engine.steps == list(range(1, 21))
        assert reports[0].rows[0] == RowResult(ref=REF, tokens=(7,))


async def test_the_end_of_a_coordinators_stream_releases_what_it_admitted():
    async with linked() as (group, link):
        await link.info()
        other = GrpcTargetGroup(link._discover)
        await other.info()
        await other.step(StepPlan(step_id=1, admit=(Admit(ref=REF, request=REQUEST),)))
        await link.step(StepPlan(step_id=1, admit=(Admit(ref=replace(REF, request_id="own"), request=REQUEST),)))
        assert group.engine.held == {"chat": 3, "own": 3}
        await other.close()
        await until(lambda: group.engine.held == {"own": 3})


async def test_what_was_released_is_not_released_again_at_the_end():
    async with linked() as (group, link):
        await link.info()
        await link.step(StepPlan(step_id=1, admit=(Admit(ref=REF, request=REQUEST),)))
        await link.step(StepPlan(step_id=2, release=(Release(request_id="chat", epoch=3),)))
        await link.close()
        assert group.engine.steps == [1, 2]
        assert group.engine.num_checks == 1  # idle again: it looked at itself


async def test_a_lost_group_fails_every_step_under_way_and_all_later_ones_until_it_is_found_again():
    async with linked() as (group, link):
        await link.info()
        group.engine.gate.clear()
        under_way = [asyncio.create_task(link.step(StepPlan(step_id=i))) for i in (1, 2)]
        await until(lambda: len(link._connection.waiting) == 2)
        await group.stop()
        for step in under_way:
            with pytest.raises(Unavailable):
                await step
        with pytest.raises(Unavailable, match="lost"):
            await link.step(StepPlan(step_id=3))
        with pytest.raises(NotReady):
            await link.info()
        await group.start()
        assert await link.info() == INFO
        assert (await link.step(StepPlan(step_id=4))).step_id == 4


async def test_the_group_that_was_just_lost_is_not_waited_for_when_there_is_another(monkeypatch):
    monkeypatch.setattr(target_link, "INFO_TIMEOUT_S", 60.0)
    stopped = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)  # takes a call, says nothing
    port = stopped.sockets[0].getsockname()[1]
    async with linked() as (group, link):

        async def both():
            return [f"127.0.0.1:{port}", group.address]

        link._discover, link._lost = both, f"127.0.0.1:{port}"
        async with asyncio.timeout(20):
            assert await link.info() == INFO
    stopped.close()


async def test_no_group_at_all_is_not_ready():
    async def nobody():
        return []

    link = GrpcTargetGroup(nobody)
    with pytest.raises(NotReady, match="no target group is registered"):
        await link.info()


async def test_a_step_that_is_not_answered_in_time_loses_the_group(monkeypatch):
    monkeypatch.setattr(target_link, "ANSWER_MARGIN_S", 0.05)
    async with linked() as (group, link):
        await link.info()
        group.engine.gate.clear()
        with pytest.raises(Unavailable, match="not answered in time"):
            await link.step(StepPlan(step_id=1, deadline_ms=50))
        assert not link.ready


async def test_the_watchdog_finds_a_step_that_hangs(monkeypatch):
    monkeypatch.setattr("services.target.step_thread.GRACE_S", 0.05)
    async with linked() as (group, link):
        await link.info()
        group.engine.gate.clear()
        step = asyncio.create_task(link.step(StepPlan(step_id=1, deadline_ms=50)))
        async with asyncio.timeout(20):
            await group.hung.wait()
        group.engine.gate.set()
        await step


async def test_a_bug_in_the_engine_takes_the_worker_out_of_service():
    async with linked() as (group, link):
        await link.info()
        with pytest.raises(Unavailable, match="broke the engine"):
            await link.step(StepPlan(step_id=1, deadline_ms=13))
        assert group.steps.failed.is_set()


@contextlib.asynccontextmanager
async def two_groups():
    """Two groups, the first of which is favoured and used, and a link that watches."""
    first, second = Group(), Group()
    await first.start()
    await second.start()
    listed = [first.address]

    async def discover():
        return listed

    link = GrpcTargetGroup(discover)
    await link.info()
    watching = asyncio.create_task(link.watch(0.02))
    try:
        yield first, second, link, listed
    finally:
        watching.cancel()
        await link.close()
        await first.stop()
        await second.stop()


async def test_a_group_that_is_ending_finishes_what_it_has_as_long_as_there_is_no_other():
    async with two_groups() as (first, _, link, listed):
        await link.step(StepPlan(step_id=1, admit=(Admit(ref=REF, request=REQUEST),)))
        first.servicer.drain()
        listed.clear()
        report = await link.step(StepPlan(step_id=2))
        assert report.draining
        assert first.servicer.num_held == 1
        await asyncio.sleep(0.1)  # it looks for another, and finds none
        assert (await link.step(StepPlan(step_id=3, release=(Release(request_id="chat", epoch=3),)))).step_id == 3
        assert first.servicer.num_held == 0


async def test_a_group_that_is_ending_is_left_for_another_at_the_end_of_a_step():
    async with two_groups() as (first, second, link, listed):
        await link.step(StepPlan(step_id=1, admit=(Admit(ref=REF, request=REQUEST),)))
        first.engine.gate.clear()
        under_way = asyncio.create_task(link.step(StepPlan(step_id=2)))
        await until(lambda: link._connection.waiting)
        first.servicer.drain()
        listed[:] = [first.address, second.address]
        await until(lambda: link._connection.leaving)
        first.engine.gate.set()
        assert (await under_way).step_id == 2  # what it was doing is not lost
        with pytest.raises(Unavailable, match="another goes on"):
            await link.step(StepPlan(step_id=3))
        await until(lambda: first.servicer.num_held == 0)
        listed[:] = [second.address]
        await link.info()
        assert not (await link.step(StepPlan(step_id=4))).draining
        assert second.engine.steps == [4]


async def test_an_idle_group_that_is_ending_is_left_without_a_step():
    async with two_groups() as (first, second, link, listed):
        first.servicer.drain()
        listed[:] = [second.address]
        await until(lambda: not link.ready)
        await link.info()
        assert link.ready


async def test_an_idle_group_is_asked_about_its_proposer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target_link, "LOOK_AGAIN_S", 0.0)
    async with linked() as (_, link):
        await link.look_at_proposer()  # nobody to ask
        await link.info()
        link.proposer_ready = True  # what it said once; there is no proposer
        await link.look_at_proposer()
        assert not link.proposer_ready
        assert link.proposer_detail
