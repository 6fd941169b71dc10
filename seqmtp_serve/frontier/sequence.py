"""One request as a coordinator drives it: the frontier, where it is in its round, and what the target holds for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from seqmtp_serve.errors import AncestryMismatch, ProtocolError, StaleVersion
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.frontier.finish import FinishChecker
from seqmtp_serve.frontier.frontier import Frontier
from seqmtp_serve.frontier.round import Event, State, next_state
from seqmtp_serve.frontier.round_notes import RoundNote
from seqmtp_serve.frontier.survival import Survival
from seqmtp_serve.ports import Publish, RowResult
from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request, TokenLogprobs

MAX_PREDICTED = 12  # tokens of a prediction, or forced by a grammar, verified in one round

SURVIVAL_MEMORY = 64.0  # rounds of one request: a text changes its subject


def end_row(ref: Ref, finish: FinishReason, code: str | None = None) -> CommittedRow:
    """A last row without tokens, after the state `ref`: the request ended, but not by its text."""
    return CommittedRow(
        request_id=ref.request_id,
        version=ref.version + 1,
        tokens=(),
        finish=finish,
        stop_reason=code,
        epoch=ref.epoch,
        digest=extend_digest(ref.digest, ()),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable, owned by one driver. `arrival` orders requests for ever: a preempted one keeps its place.

    `decode` turns the next token into the text it adds; with `checker` it is as far as the chosen tokens are. `publish`
    waits to ride on the next plan. `step_id` names the step this sequence is part of, None between steps.
    """

    request: Request
    frontier: Frontier
    checker: FinishChecker
    decode: Callable[[int], str]
    arrival: int
    caller: str = ""  # whose it is, for fairness among callers
    priority: int = 0  # lower goes first
    state: State = State.QUEUED
    cohort: int = 0
    generation: int = 0  # of the target group that holds it
    num_cached: int = 0  # positions of P that the target had already
    prefilled: int = 0  # positions of P the target has been told to run
    held_pages: int = 0
    step_id: int | None = None
    asked_depth: int = 0
    asked_floor: float = 0.0  # of the chance of a draft in the round under way
    next_depth: int = 0  # drafts that the target was told the next round will ask for
    depth_reason: str = ""  # why the round under way has its depth
    choice: DepthChoice | None = None  # from which its depth comes, and the place of this sequence in it
    place: int = 0
    next_choice: DepthChoice | None = None
    next_place: int = 0
    survival: Survival = field(default_factory=lambda: Survival(SURVIVAL_MEMORY))
    drafted_len: int = 0  # positions that the MTP module had to compute for the drafts asked for so far
    asked_behind: int = 0  # rows that it had to compute for those of the round under way
    asked_predicted: int = 0
    copy_survivals: tuple[float, ...] = ()  # the next round's drafts will be copied: `RowResult.next_copied`
    asked_copy_survivals: tuple[float, ...] = ()  # those of the round under way
    draft_chances: tuple[float, ...] = ()  # of the module's drafts in the round just chosen
    publish: Publish | None = None
    refusals: int = 0  # since the last committed row
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the chunks so far, where they are asked for

    def on(self, event: Event) -> None:
        """Move along the transition table; IllegalTransition changes nothing."""
        self.state = next_state(self.state, event)

    @property
    def remaining(self) -> int:
        """New tokens the budget still allows; the frontier token is already counted as out."""
        return self.request.params.max_tokens - len(self.frontier.output_ids)

    @property
    def depth_limit(self) -> int:
        """Drafts worth asking for: a round yields one token more than it accepts, and no row may pass the budget."""
        return max(0, min(self.request.params.max_depth, self.remaining - 1))

    @property
    def behind(self) -> int:
        """Rows that the MTP module has to compute before it can draft."""
        return self.frontier.kv_len - self.drafted_len

    @property
    def predicted_limit(self) -> int:
        """Drafts of the request's own worth asking for in one round: its prediction, or what its grammar forces."""
        params = self.request.params
        is_forced = params.max_depth and params.shaping is not None and params.shaping.grammar
        return max(0, min(MAX_PREDICTED, self.remaining - 1)) if self.request.prediction_ids or is_forced else 0

    def settle(self, step_id: int, result: RowResult) -> CommittedRow | None:
        """Take what step `step_id` chose: the row to commit, or None when the step only built KV.

        The row is cut at the token that ends the text, before anyone sees it; `accepted` counts the accepted drafts
        that are left. Raises StaleVersion or AncestryMismatch for a result about another state (the late output of a
        preempted step) and ProtocolError for one that no round can have; then nothing has changed.
        """
        self._refuse_late(step_id, result)
        if self.state is State.PREFILLING:
            return self._settle_prefill(result)
        own = max(result.forced, result.drafted * result.predicted)  # drafts that the request brought itself
        asked = self.asked_predicted if own == result.drafted else self.asked_depth
        is_sound = len(result.tokens) - 1 == result.accepted <= result.drafted <= asked
        is_sound = is_sound and len(result.chances) <= self.asked_depth
        if not (is_sound and own <= min(self.asked_predicted, result.drafted)):
            raise ProtocolError(f"{self.request.request_id}: {result} is not a round of depth {asked}")
        self._require_logprobs(result)
        self.on(Event.SELECT)
        self.copy_survivals = result.next_copied
        if not (own or self.asked_copy_survivals):
            asked = self.asked_depth if result.chances else result.drafted
            made = len(result.chances) or result.drafted
            self.survival.add(asked, result.accepted, made=made, verified=result.drafted)
        self.draft_chances = result.chances
        last = "n" if result.accepted == result.drafted else "c"
        num_forced = min(result.forced, result.accepted)
        letter = "p" if result.predicted else "l" if result.copied else "a"
        return self._cut(result, "f" * num_forced + letter * (result.accepted - num_forced) + last)

    def check_refusal(self, step_id: int, result: RowResult) -> None:
        """Raises StaleVersion when the target's refusal is about a state that has passed."""
        open_states = (State.PREFILLING, State.PROPOSING, State.VERIFYING)
        at_rest = self.step_id is None and result.ref == self.frontier.ref
        if self.state not in open_states or not (self.step_id == step_id or at_rest):
            raise StaleVersion(f"{self.request.request_id}: a late refusal {result}")

    def _refuse_late(self, step_id: int, result: RowResult) -> None:
        if self.step_id != step_id or self.state not in (State.PREFILLING, State.VERIFYING):
            raise StaleVersion(f"{self.request.request_id}: step {step_id} is not in flight here ({self.state})")
        if result.ref != self.frontier.ref:
            kind = AncestryMismatch if result.ref.version == self.frontier.version else StaleVersion
            raise kind(f"{self.request.request_id}: a result for {result.ref}, at {self.frontier.ref}")

    def _settle_prefill(self, result: RowResult) -> CommittedRow | None:
        ended, replay = self.prefilled == self.frontier.kv_len, self.frontier.token is not None
        if len(result.tokens) != (1 if ended and not replay else 0) or result.drafted or result.accepted:
            raise ProtocolError(f"{self.request.request_id}: {result} is not a prefill of {self.prefilled} rows")
        self._require_logprobs(result)
        scored = self.prompt_logprobs + result.prompt_logprobs
        wanted = 0 if self.request.params.prompt_logprobs is None else len(self.request.prompt_ids) - 1
        if result.tokens and len(scored) != wanted:
            raise ProtocolError(f"{self.request.request_id}: {len(scored)} log-probabilities of its prompt")
        self.step_id, self.prompt_logprobs, self.copy_survivals = None, scored, result.next_copied
        self.num_cached += result.cached
        if result.tokens:
            self.on(Event.BOOTSTRAP)
            return replace(self._cut(result, "b"), prompt_logprobs=scored)
        self.on(Event.RESUMED if ended else Event.CHUNK)
        return None

    def _require_logprobs(self, result: RowResult) -> None:
        wanted = 0 if self.request.params.logprobs is None else len(result.tokens)
        if len(result.logprobs) != wanted:
            raise ProtocolError(f"{self.request.request_id}: {len(result.logprobs)} log-probabilities, not {wanted}")

    def _cut(self, result: RowResult, origins: str) -> CommittedRow:
        """Pass the tokens one at a time through the finish checker; what follows the end was never chosen."""
        tokens: list[int] = []
        finish = None
        for token in result.tokens:
            tokens.append(token)
            finish = self.checker.push(token, self.decode(token))
            if finish is not None:
                break
        return CommittedRow(
            request_id=self.request.request_id,
            version=self.frontier.version + 1,
            tokens=tuple(tokens),
            drafted=result.drafted,
            accepted=min(result.accepted, len(tokens)),
            origins=origins[: len(tokens)],
            cached=self.num_cached if origins == "b" else 0,
            finish=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            predicted=result.predicted,
            forced=result.forced,
            copied=result.copied,
            logprobs=result.logprobs[: len(tokens)],
            depth_reason=self.depth_reason,
            epoch=self.frontier.epoch,
            digest=extend_digest(self.frontier.digest, tokens),
        )

    def note(self, row: CommittedRow) -> RoundNote:
        """What the row does not say of the round that it came from. To be asked before the row is `committed`."""
        in_round = bool(row.tokens) and row.origins != "b"
        is_weighed = in_round and self.choice is not None and self.choice.inputs is not None
        return RoundNote(
            version=row.version,
            depth=self.asked_depth if in_round else 0,
            reason=row.depth_reason if in_round else "",
            place=self.place,
            copy_survivals=self.asked_copy_survivals if in_round else (),
            draft_chances=self.draft_chances if in_round else (),
            floor=self.asked_floor if in_round else 0.0,
            choice=self.choice if is_weighed else None,
            timings_ms=row.timings_ms,
        )

    def fail(self, code: str) -> CommittedRow:
        """It cannot go on: the row that will say so in the record. `code` is a `SeqMTPError.code`."""
        self.on(Event.FAIL)
        return end_row(self.frontier.ref, FinishReason.ERROR, code)

    def committed(self, row: CommittedRow) -> None:
        """The row is in the record: move the frontier. A row that goes on is whole, so every selected row is kept."""
        self.on(Event.COMMIT if row.finish is None else Event.FINISH)
        self.frontier = self.frontier.advance(row.tokens, finished=row.finish is not None, digest=row.digest)
        self.step_id = None
        self.prompt_logprobs = ()
        self.refusals = 0
        keep = 0 if row.origins == "b" else len(row.tokens)
        self.publish = Publish(ref=self.frontier.ref, keep=keep) if row.finish is None else None

    def forget_target(self) -> None:
        """The target's state for this sequence is gone or given up; the frontier stays."""
        self.prefilled = self.num_cached = self.held_pages = self.drafted_len = 0
        self.asked_depth = self.asked_predicted = self.next_depth = 0
        self.asked_floor = 0.0
        self.copy_survivals = self.asked_copy_survivals = self.draft_chances = ()
        self.choice = self.next_choice = None
        self.step_id = self.publish = None
        self.prompt_logprobs = ()
