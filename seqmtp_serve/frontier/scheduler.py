"""What goes into the next step: a pure decision over sequences, pages and a row budget. No clock, no IO.

Verify rows come first, prefill chunks take what is left of the budget. Admission is by free pages and never passes the
head of the queue by. The head is whoever was in the middle of its text; then the lowest `priority`; then the caller who
has fewest requests running; then the first to come. When pages run out the youngest gives up its pages and is replayed
later from its committed tokens, at its old place in the queue: so the oldest always advances, and everyone becomes the
oldest. Pages are reserved for the deepest row a step may write; what another coordinator holds on the same group shows
as an `overloaded` refusal.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter

from seqmtp_serve.config import SchedulerConfig, copied_limit
from seqmtp_serve.errors import ContextOverflow, Overloaded
from seqmtp_serve.frontier.depth_choice import DepthChoice, floors, num_copies
from seqmtp_serve.frontier.recovery import admission
from seqmtp_serve.frontier.round import Event, State
from seqmtp_serve.frontier.sequence import Sequence
from seqmtp_serve.ports import Admit, Prefill, Publish, Release, StepPlan, TargetInfo, Verify
from seqmtp_serve.request import CommittedRow, Request

_by_arrival = attrgetter("arrival")

ChooseDepths = Callable[[list[Sequence]], DepthChoice]

NO_PROPOSER = "plain: the proposer went away"  # since the depth was chosen
NO_PAGES = "plain: no free pages for drafts"


class BatchScheduler:
    """Owns every live sequence of one coordinator on one target group. `check()` holds between any two calls."""

    def __init__(self, config: SchedulerConfig, info: TargetInfo | None = None) -> None:
        self.config = config
        self.info = info  # of the target group; nothing can be planned before there was one
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.generation = 0  # of the target group: rises when it is lost
        self.num_preempted = 0
        self._release: list[Release] = []

    # ---- what may come in ------------------------------------------------------------------------------------

    def accepts(self, request: Request, num_live: int) -> None:
        """Raises ContextOverflow when it can never fit, Overloaded when `num_live` requests fill batch and queue."""
        self.fits(request)
        if num_live >= self.max_batch + self.config.max_waiting:
            raise Overloaded(f"{num_live} requests are running or waiting already")
        bound, queued = self.config.max_waiting_tokens, self.waiting_tokens
        if bound and queued and queued + len(request.prompt_ids) > bound:
            raise Overloaded(f"{queued} tokens wait to be prefilled already; the bound is {bound}")

    def fits(self, request: Request) -> None:
        """Raises ContextOverflow when prompt and budget exceed what this group can hold for one sequence."""
        total_len = len(request.prompt_ids) + request.params.max_tokens
        limit, num_rows = self._group.max_model_len, self._group.num_pages * self._group.page_size
        if num_rows < limit:
            limit = num_rows - self._group.max_depth
        if total_len > limit:
            raise ContextOverflow(f"{total_len} tokens of prompt and budget; the limit is {limit}", param="max_tokens")

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its arrival; new and replayed alike."""
        insort(self.waiting, sequence, key=_by_arrival)

    # ---- the plan ----------------------------------------------------------------------------------------------

    def plan(
        self, cohort: int, step_id: int, choose: ChooseDepths, *, drafts: bool = True, admit: bool = True
    ) -> StepPlan | None:
        """The next step of one cohort, marked as in flight; None when there is nothing to send.

        Each round asks for as many drafts as were announced when the step before was planned (none, if `drafts` is
        False); `choose` says what to announce for the next. `admit` False keeps newcomers out for now. Sequences of
        other cohorts that are in flight are not touched.
        """
        verify = tuple(self._plan_verify(cohort, step_id, drafts))
        admitted = tuple(self._plan_admission(cohort)) if admit else ()
        budget = self.config.step_tokens - sum(max(one.asked_depth, one.asked_predicted) + 1 for one in verify)
        prefill = tuple(self._plan_prefill(cohort, step_id, budget))
        publish = tuple(self._take_publish(cohort))
        release, self._release = tuple(self._release), []
        if not (verify or admitted or prefill or publish or release):
            return None
        coming = self._announce(step_id, choose)
        return StepPlan(
            step_id=step_id,
            release=release,
            publish=publish,
            admit=admitted,
            prefill=tuple(_announced(one, coming.get(one.ref.request_id)) for one in prefill),
            verify=tuple(
                Verify(
                    ref=one.frontier.ref,
                    depth=one.asked_depth,
                    next_depth=one.next_depth,
                    predicted=one.asked_predicted,
                    floor=one.asked_floor,
                    next_floor=_next_floor(one),
                )
                for one in verify
            ),
            deadline_ms=self.config.step_deadline_ms,
        )

    def _announce(self, step_id: int, choose: ChooseDepths) -> dict[str, Sequence]:
        """Choose depths for the round after step `step_id`. Returns those that may have one, by request id."""
        coming = [
            one for one in self.in_step(step_id) if one.state is State.VERIFYING or one.prefilled == one.frontier.kv_len
        ]
        if not coming:
            return {}
        choice = choose(coming)
        for place, (sequence, depth) in enumerate(zip(coming, choice.depths, strict=True)):
            sequence.next_depth = min(depth, self.config.max_depth, self._group.max_depth)
            sequence.next_choice, sequence.next_place = choice, place
        return {one.request.request_id: one for one in coming}

    def _plan_verify(self, cohort: int, step_id: int, drafts: bool) -> Iterator[Sequence]:
        """Oldest first. Short of pages: first without drafts, then at the cost of the youngest, else not this time."""
        ready = list(self._in(cohort, State.PROPOSING))
        drafting = len(ready) * (self.config.max_depth + 1)
        room = (self.config.step_tokens - drafting) // 2  # for what a request brings itself; the rest is for prefill
        for sequence in ready:
            if sequence.state is not State.PROPOSING:
                continue  # preempted for an older one a moment ago
            kv_len, asked = sequence.frontier.kv_len, min(sequence.next_depth, sequence.depth_limit) if drafts else 0
            predicted = min(sequence.predicted_limit, room)
            reason = "" if sequence.next_choice is None else sequence.next_choice.reason
            survivals = sequence.copy_survivals[: self._copied_limit(sequence, room)]
            if survivals:
                asked, reason = _num_copies(sequence, survivals)
            elif sequence.next_depth and not drafts:
                reason = NO_PROPOSER
            if not self._reserve(sequence, kv_len + max(asked, predicted) + 1):
                reason = NO_PAGES if asked or predicted else reason
                asked = predicted = 0
                if not self._reserve(sequence, kv_len + 1, preempt=True):
                    continue
            room -= max(predicted, asked - self.config.max_depth)
            sequence.on(Event.VERIFY)
            sequence.step_id, sequence.asked_depth, sequence.asked_predicted = step_id, asked, predicted
            sequence.asked_copy_survivals = survivals
            sequence.asked_floor, _ = floors(sequence.next_choice, sequence.next_place)
            sequence.asked_behind = sequence.behind if asked and not survivals else 0
            sequence.drafted_len += sequence.asked_behind
            sequence.depth_reason = reason
            sequence.choice, sequence.place = sequence.next_choice, sequence.next_place
            yield sequence

    def _copied_limit(self, sequence: Sequence, room: int) -> int:
        """Drafts of the next round that may be copied; those beyond the depth take rows from `room`."""
        max_depth = self.config.max_depth
        most = copied_limit(sequence.request.params.max_depth, max_depth, self.config.max_copied)
        return max(0, min(most, max_depth + max(0, room), sequence.remaining - 1))

    def _plan_admission(self, cohort: int) -> Iterator[Admit]:
        """A newcomer leaves one free page to each running sequence, or it would be preempted at once."""
        while self.waiting and len(self.running) < self.max_batch and self._is_least_loaded(cohort):
            sequence = self._head()
            first_round = sequence.frontier.kv_len + self._group.max_depth + 1  # what a target reserves on admission
            need = self._pages(min(first_round, self._group.max_model_len))
            if need + len(self.running) > self.free_pages:
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_by_arrival)
            sequence.on(Event.ADMIT)
            sequence.cohort, sequence.generation, sequence.held_pages = cohort, self.generation, need
            yield admission(sequence.request, sequence.frontier)

    def _head(self) -> Sequence:
        running = Counter(one.caller for one in self.running)

        def place(one: Sequence) -> tuple[bool, int, int, int]:
            is_new = not one.frontier.output_ids
            return is_new, is_new * one.priority, is_new * running[one.caller], one.arrival

        return min(self.waiting, key=place)

    def _plan_prefill(self, cohort: int, step_id: int, budget: int) -> Iterator[Prefill]:
        for sequence in list(self._in(cohort, State.PREFILLING)):
            start, kv_len = sequence.prefilled, sequence.frontier.kv_len
            stop = min(kv_len, start + min(budget, self.config.prefill_chunk))
            if stop == start:
                return
            budget -= stop - start
            sequence.prefilled, sequence.step_id = stop, step_id
            yield Prefill(ref=sequence.frontier.ref, start=start, stop=stop, last=stop == kv_len)

    def _take_publish(self, cohort: int) -> Iterator[Publish]:
        for sequence in self.running:
            if sequence.cohort == cohort and sequence.publish is not None:
                yield sequence.publish
                sequence.publish = None

    # ---- what a step changed -----------------------------------------------------------------------------------

    def committed(self, sequence: Sequence, row: CommittedRow) -> None:
        """The row is in the record. A last row frees the pages; a group lost meanwhile means a replay."""
        sequence.committed(row)
        if sequence.state is State.FINISHED:
            self._leave(sequence)
        elif sequence.generation != self.generation:
            self._requeue(sequence, Event.LOSE, Event.REPLAY)

    def drop(self, sequence: Sequence) -> None:
        """End it from outside (cancelled, fenced, failed), wherever it is."""
        if sequence.state is not State.FINISHED:
            sequence.on(Event.DROP)
            self._leave(sequence)

    def replay(self, sequence: Sequence) -> None:
        """The target refused it: give its state up there and build it anew from the record."""
        self._requeue(sequence, Event.LOSE, Event.REPLAY)

    def lose_target(self) -> int:
        """The group is gone, and all KV with it: every sequence on it is queued for replay. Returns how many.

        Those being committed follow when they are. Releases are kept: the same group may come back.
        """
        self.generation += 1
        lost = [sequence for sequence in self.running if sequence.state is not State.COMMITTING]
        for sequence in lost:
            self._requeue(sequence, Event.LOSE, Event.REPLAY)
        return len(lost)

    def in_step(self, step_id: int) -> list[Sequence]:
        """Sequences that still wait for what this step chose."""
        open_states = (State.PREFILLING, State.VERIFYING)
        return [one for one in self.running if one.step_id == step_id and one.state in open_states]

    # ---- pages and places --------------------------------------------------------------------------------------

    @property
    def _group(self) -> TargetInfo:
        assert self.info is not None, "nothing can be planned before there was a target group"
        return self.info

    @property
    def max_batch(self) -> int:
        """Sequences that may run at once."""
        return min(self.config.max_batch, self._group.max_batch)

    @property
    def free_pages(self) -> int:
        """Pages of the group that no sequence of ours may write to."""
        return self._group.num_pages - sum(sequence.held_pages for sequence in self.running)

    @property
    def waiting_tokens(self) -> int:
        """What the queue has to prefill."""
        return sum(sequence.frontier.kv_len for sequence in self.waiting)

    def _pages(self, num_rows: int) -> int:
        return -(-num_rows // self._group.page_size)

    def _reserve(self, sequence: Sequence, num_rows: int, *, preempt: bool = False) -> bool:
        need = self._pages(num_rows) - sequence.held_pages
        if need <= 0:
            return True
        while need > self.free_pages:
            younger = [one for one in self.running if one.arrival > sequence.arrival and one.step_id is None]
            younger = [one for one in younger if one.state in (State.PREFILLING, State.PROPOSING)]
            if not preempt or not younger:
                return False
            victim = younger[-1]
            self.num_preempted += 1
            self._requeue(victim, Event.PREEMPT)
        sequence.held_pages += need
        return True

    def _requeue(self, sequence: Sequence, *events: Event) -> None:
        for event in events:
            sequence.on(event)
        self._leave(sequence)
        self.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running batch (its pages with it) or out of the queue."""
        if sequence in self.running:
            self.running.remove(sequence)
            release = Release(request_id=sequence.request.request_id, epoch=sequence.frontier.epoch)
            self._release.append(release)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.forget_target()

    def _in(self, cohort: int, state: State) -> Iterator[Sequence]:
        return (one for one in self.running if one.cohort == cohort and one.state is state and one.step_id is None)

    def _is_least_loaded(self, cohort: int) -> bool:
        loads = [0] * self.config.cohorts
        for sequence in self.running:
            loads[sequence.cohort] += 1
        return loads[cohort] == min(loads)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert self.free_pages >= 0
        assert len(self.running) <= self.max_batch
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_by_arrival)
        assert all(one.state is State.QUEUED and not one.held_pages and not one.prefilled for one in self.waiting)
        for sequence in self.running:
            sequence.frontier.check()
            in_flight = sequence.state in (State.VERIFYING, State.COMMITTING)
            assert sequence.state in (State.PREFILLING, State.PROPOSING) or in_flight
            assert not in_flight or sequence.step_id is not None or sequence.state is State.COMMITTING
            assert sequence.prefilled <= sequence.frontier.kv_len
            assert sequence.held_pages >= self._pages(sequence.prefilled)


def _next_floor(sequence: Sequence) -> float:
    """Of the chance of a draft, for another to be made behind it in the round that comes."""
    return floors(sequence.next_choice, sequence.next_place)[1]


def _announced(prefill: Prefill, sequence: Sequence | None) -> Prefill:
    """The chunk, with what the round after it will ask for; None: none comes yet."""
    if sequence is None:
        return replace(prefill, next_depth=0)
    return replace(prefill, next_depth=sequence.next_depth, next_floor=_next_floor(sequence))


def _num_copies(sequence: Sequence, survivals: tuple[float, ...]) -> tuple[int, str]:
    """Drafts to ask of those that the target will copy, and why."""
    choice = sequence.next_choice
    num_drafts, price = num_copies(choice, sequence.next_place, survivals), choice.row_price if choice else 0.0
    expected = ", ".join(f"{survival:.2f}" for survival in survivals)
    return num_drafts, f"copied: {num_drafts}, right with {expected}; a row costs {price:.2f} tokens"
