"""Target groups and a proposer of a simulation: the product's fake group, drafts that come from elsewhere, and links.

The group's next token is a hash of all before it, so it needs no model; what is simulated is who holds which state.
Drafts arrive late, of older states, or not at all, so the same version may hold different prefixes in two replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from seqmtp_serve.errors import NotReady, Unavailable
from seqmtp_serve.fake import FAKE_INFO, FakeTargetGroup, fake_next
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.ports import Draft, Release, RowResult, StepPlan, StepReport, TargetInfo, Verify
from seqmtp_serve.request import Ref, Request
from tests.chaos.simulation.network import Network, Pipe, Process

STEP_S = 0.002  # one pass
ASK_S = 0.1  # for a group's account of itself
RIGHT = 0.7  # of the drafted tokens


class SimProposer:
    """Drafts the right token most of the time. It keeps nothing, so its death costs the drafts under way."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.process = Process("proposer")

    def draft(self, asker: Process, ref: Ref, request: Request, known: Sequence[int], put: Callable[[Draft], None]):
        """Send a chain of two tokens after `known` to the asker; `ref` names the state they were drafted from."""
        rng = self._network.rng

        def there() -> None:
            chain: list[int] = []
            for _ in range(2):
                right = fake_next(request, [*known, *chain])
                chain.append(right if rng.random() < RIGHT else (right + 1) % FAKE_INFO.vocab_size)
            self._network.send(self.process, asker, lambda: put(Draft(ref=ref, tokens=tuple(chain))))

        self._network.send(asker, self.process, there)


class SimTarget(FakeTargetGroup):
    """One group on one process. It verifies the drafts it has, refuses those of another state, and asks for more."""

    def __init__(self, name: str, proposer: SimProposer) -> None:
        super().__init__(replace(FAKE_INFO, group_id=name))
        self.process = Process(name)
        self.num_refused_drafts = 0
        self.busy_until = 0.0
        self._proposer = proposer
        self._drafts: dict[str, Draft] = {}

    def _verify(self, held, item: Verify) -> RowResult:
        super()._verify(held, replace(item, depth=0))  # every check, and the plain next token
        drafts = self._draft_for(held.ref)[: item.depth]
        self._grow(held, held.kv_len + len(drafts) + 1)
        chosen: list[int] = []
        for draft in (*drafts, None):
            chosen.append(fake_next(held.request, held.output_ids + chosen))
            if draft != chosen[-1]:
                break
        held.selected, held.selected_keep = chosen, len(chosen)
        after = Ref(
            request_id=held.ref.request_id,
            epoch=held.ref.epoch,
            version=held.ref.version + 1,
            digest=extend_digest(held.ref.digest, chosen),
        )
        known = held.output_ids + chosen
        self._proposer.draft(self.process, after, held.request, known, self._put)
        return RowResult(ref=item.ref, tokens=tuple(chosen), drafted=len(drafts), accepted=len(chosen) - 1)

    def _draft_for(self, ref: Ref) -> tuple[int, ...]:
        draft = self._drafts.pop(ref.request_id, None)
        if draft is None:
            return ()
        if draft.ref != ref:
            self.num_refused_drafts += 1
            return ()
        return draft.tokens

    def _put(self, draft: Draft) -> None:
        self._drafts[draft.ref.request_id] = draft


@dataclass(slots=True, eq=False)
class _Connection:
    """One Step stream between one coordinator and one incarnation of a group."""

    group: SimTarget
    up: Pipe
    down: Pipe
    held: dict[str, int] = field(default_factory=dict)  # request id -> epoch, of what this stream admitted
    waiting: dict[int, asyncio.Future[StepReport]] = field(default_factory=dict)
    last: StepReport | None = None


class SimTargetLink:
    """Implements ports.TargetGroup for one coordinator. `stale`: how probably a report shows rows of an older one."""

    def __init__(self, network: Network, me: Process, groups: Callable[[], Sequence[SimTarget]], stale: float) -> None:
        self._network, self._me, self._groups, self.stale = network, me, groups, stale
        self._connection: _Connection | None = None

    async def info(self) -> TargetInfo:
        for group in self._network.rng.sample(list(self._groups()), len(self._groups())):
            try:
                info = await self._network.call(self._me, group.process, lambda: group._info, timeout_s=ASK_S)  # noqa: B023
            except TimeoutError:
                continue
            if self._connection is None:
                self._connect(group)
            return info
        raise NotReady("no target group answers")

    async def step(self, plan: StepPlan) -> StepReport:
        connection = self._connection
        if connection is None:
            raise Unavailable("there is no stream")
        answer: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        connection.waiting[plan.step_id] = answer
        connection.up.send(lambda: self._run(connection, plan))
        try:
            return await answer
        except asyncio.CancelledError:
            self.drop(connection)
            raise
        finally:
            connection.waiting.pop(plan.step_id, None)

    def drop(self, connection: _Connection | None = None) -> None:
        """The stream is over: who waits is told, and the group lets go of what was admitted on it."""
        connection = connection or self._connection
        if connection is None or connection is not self._connection:
            return
        self._connection = None
        for answer in connection.waiting.values():
            if not answer.done():
                answer.set_exception(Unavailable("the stream broke"))
        released = tuple(Release(request_id=name, epoch=epoch) for name, epoch in connection.held.items())
        group = connection.group
        asyncio.get_running_loop().call_later(
            self._network.delay_s(), lambda: group.run(StepPlan(step_id=0, release=released))
        )

    def _connect(self, group: SimTarget) -> None:
        def broken() -> None:
            self.drop(connection)

        connection = _Connection(
            group=group,
            up=Pipe(self._network, self._me, group.process, broken),
            down=Pipe(self._network, group.process, self._me, broken),
        )
        self._connection = connection

    def _run(self, connection: _Connection, plan: StepPlan) -> None:
        """At the group: steps of all streams run one after the other."""
        if connection is not self._connection:
            return  # the stream ended before the plan was read
        group, now = connection.group, asyncio.get_running_loop().time()
        for release in plan.release:
            if connection.held.get(release.request_id, -1) <= release.epoch:
                connection.held.pop(release.request_id, None)
        connection.held.update((admit.ref.request_id, admit.ref.epoch) for admit in plan.admit)
        report = group.run(plan)
        group.busy_until = max(group.busy_until, now) + STEP_S
        shown = report
        if connection.last is not None and self._network.rng.random() < self.stale:
            shown = replace(report, rows=connection.last.rows)
        connection.last = report
        connection.down.send(lambda: self._answer(connection, shown), after_s=group.busy_until - now)

    def _answer(self, connection: _Connection, report: StepReport) -> None:
        answer = connection.waiting.get(report.step_id)
        if answer is not None and not answer.done():
            answer.set_result(report)
