"""The seams between processes, as values and three protocols. Messages are sorted by who receives them.

The coordinator drives a TargetGroup; the target feeds a Proposer; the coordinator commits to a FrontierStore.
Each has a form in one process (`local.py`) and a form over the network (`services/`). Hidden rows are opaque here
(`Tensor`): this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from seqmtp_serve.request import CommittedRow, FinishReason, Ref, Request, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

# ---- received by the target group ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Take the request: reserve its sequence. `output_ids` are tokens committed before (a replay), else empty.

    At the end of prefill, target KV covers P: the whole prompt when `output_ids` is empty (then the first token is
    sampled: the bootstrap), else prompt + output_ids[:-1] (then nothing is sampled: output_ids[-1] is the frontier).
    """

    ref: Ref
    request: Request
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Run positions [start, stop) of P. `last` marks the chunk that ends P. `next_depth`, `next_floor`: see Verify."""

    ref: Ref
    start: int
    stop: int
    last: bool
    next_depth: int | None = None
    next_floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Run one round from `ref`: at most `depth` drafts (0: plain decoding). Missing drafts lower it, never block it.

    `next_depth` is a hint: the drafts that the round after this one will ask for, so that no more are made. None: as
    many as it can use. At most `predicted` drafts may come from the request itself: what its grammar forces, or its
    prediction. The proposer's drafts are left out from the first whose chance is below `floor`, and none is made behind
    one whose chance is below `next_floor`: see `Draft.chances`.
    """

    ref: Ref
    depth: int
    next_depth: int | None = None
    predicted: int = 0
    floor: float = 0.0
    next_floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """The row that ends at `ref` is committed: the first `keep` provisional rows become canonical, the rest go.

    `keep` counts verify inputs (frontier and accepted drafts); 0 for the bootstrap row, whose KV is all prefill.
    """

    ref: Ref
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Forget the request: it finished, was cancelled, preempted or fenced. Unknown requests are not an error."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of one cohort. Applied in this order: release, publish, admit, then prefill and verify in one pass.

    `deadline_ms` bounds the wait for drafts and the step itself, from its receipt.
    """

    step_id: int
    release: tuple[Release, ...] = ()
    publish: tuple[Publish, ...] = ()
    admit: tuple[Admit, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    verify: tuple[Verify, ...] = ()
    deadline_ms: float = 30_000.0


# ---- received by the coordinator -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step produced for one request, from version `ref.version`; not yet committed anywhere.

    `tokens` is empty for a prefill chunk that is not the last, and for the last chunk of a replay. For a round it holds
    the accepted drafts and one more token: R = accepted + 1. `error` set: the item was refused and changed nothing.
    `logprobs` has one entry a token if the request asks for them; `prompt_logprobs` one for each prompt token that
    follows a row of a prefill chunk. `next_copied`: the drafts of the next round will be copied, and so often are the
    first one, the first two, … all accepted, as far as is known; empty where they will not. `chances`: those of the
    drafts that the proposer made, verified or left out.
    """

    ref: Ref
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    cached: int = 0  # positions of a prefill that were not computed: another sequence had
    error: str | None = None  # a `SeqMTPError.code`
    message: str = ""
    predicted: bool = False  # the drafts came from the request's prediction
    forced: int = 0  # of the drafts: those, from the first, that the request's grammar forces
    copied: bool = False  # the drafts, but the forced ones, were copied from the request's own text
    next_copied: tuple[float, ...] = ()
    chances: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of one step on the target, disjoint. `draft_wait` is the part of C_mtp nothing could hide."""

    forward: float = 0.0  # the target pass: C_main at depth 0, C_verify above it
    draft_wait: float = 0.0  # waiting for drafts that were not there yet
    select: float = 0.0  # exact selection
    pack: float = 0.0  # building batches, copying rows
    mtp: float = 0.0  # proposer compute, as the proposer reported it (overlaps others: not part of the sum)
    num_rows: int = 0
    mtp_touched: float = 0.0  # distinct experts of the MTP module that proposing read, over its layer passes
    feed: float = 0.0  # handing hidden rows to the proposer: a part of `pack`
    fed_rows: int = 0
    fed_bytes: int = 0  # of hidden rows, as they travel
    draft_prob: float = 0.0  # sum of the probabilities that drafts had where they were sampled: the ratio contract's
    num_draft_probs: int = 0  # how many drafts said theirs
    queued: float = 0.0  # between the plan's arrival and its begin: other steps' time, no part of the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWork:
    """What the experts that one rank holds did in the target pass of a step."""

    rank: int = 0
    num_pairs: int = 0  # (token, expert) pairs, of all layers
    num_touched: int = 0  # distinct experts of each layer, added up: weights that had to be read
    sent_bytes: int = 0  # to other ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The answer to one StepPlan."""

    step_id: int
    rows: tuple[RowResult, ...]
    costs: StepCosts
    free_pages: int
    proposer_ready: bool
    refused_drafts: int = 0  # of another state, or malformed: none was verified
    experts: tuple[ExpertWork, ...] = ()  # by rank; empty for a dense model
    draining: bool = False  # the group is ending: it finishes what it has, admit nothing more


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a target group can do, told once on connecting. `kernels`: which backend computes what."""

    group_id: str
    model: str
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_batch: int
    max_depth: int
    numerics: str
    manifest_fingerprint: str
    kernels: Mapping[str, str] = field(default_factory=dict)


# ---- received by the proposer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRows:
    """Hidden rows the target kept, and a wish for drafts.

    Row j is base i = first_base + j: it consumes (hidden[j] = pre-final-norm h_i, next_ids[j] = x_{i+1}).
    `first_base` must equal the proposer's number of canonical rows + its own first base, or the feed opens the
    sequence anew (`reset`): then rows before first_base do not exist and are masked. `ref` is the state after these
    rows' tokens: drafts made from it belong to that version. `depth` 0: only keep the rows. No draft is made behind one
    whose chance is below `floor`.
    """

    ref: Ref
    first_base: int
    hidden: Tensor  # [n, d] as it travels: see `engine/hidden_rows.py`
    next_ids: tuple[int, ...]  # n
    depth: int
    floor: float = 0.0
    hidden_scales: Tensor | None = None  # [n] float32, of int8 rows
    reset: bool = False
    request: Request | None = None  # given with reset: sampling parameters for the drafts


# ---- received by the target from the proposer ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A chain y1..yK proposed from `ref`, and the sparse distributions it was really sampled from.

    `draft_probs[j]` lists (token, probability), normalised, for the ratio contract; empty for greedy and coupled.
    `chances[j]`: how likely y1..y(j+1) are all accepted, going by the distributions alone, whichever tokens were drawn;
    empty unless the feed had a floor.
    """

    ref: Ref
    tokens: tuple[int, ...]
    draft_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    chances: tuple[float, ...] = ()
    mtp_ms: float = 0.0
    mtp_touched: float = 0.0  # experts of the module that were read for it: see `StepCosts`

    @property
    def token_probs(self) -> tuple[float, ...]:
        """What each draft token had in the distribution it was sampled from; empty where none is declared."""
        return tuple(dict(row).get(token, 0.0) for token, row in zip(self.tokens, self.draft_probs, strict=False))


# ---- received by the store -------------------------------------------------------------------------------------


class CommitResult(StrEnum):
    """Answers of the commit script; see `services/store/commit.lua`."""

    OK = "OK"
    DUP = "DUP"  # this very row is already committed: the reply was lost, the row was not
    CONFLICT = "CONFLICT"  # the version does not follow
    FENCED = "FENCED"  # a newer epoch owns the request
    GONE = "GONE"  # unknown, expired, finished or cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Append `row` after version row.version - 1 under `epoch`; `digest` is the ancestry digest after the row."""

    epoch: int
    row: CommittedRow
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything needed to continue, replay or read a request: its record outlives every worker.

    `meta` is what the first acquire gave. `acquired`: this very call made its caller the owner. `lease_left_s` is by
    the store's clock; at 0 or below nobody has shown signs of work for a while, which proves nothing.
    """

    request: Request
    epoch: int
    version: int
    digest: bytes
    rows: tuple[CommittedRow, ...] = ()
    finish: FinishReason | None = None
    owner: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)
    acquired: bool = False
    lease_left_s: float = field(default=0.0, compare=False)

    @property
    def ref(self) -> Ref:
        """The name of the record's state."""
        return Ref(request_id=self.request.request_id, epoch=self.epoch, version=self.version, digest=self.digest)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """All committed tokens, in order."""
        return tuple(token for row in self.rows for token in row.tokens)


# ---- the protocols ---------------------------------------------------------------------------------------------


class TargetGroup(Protocol):
    """The coordinator's view of a target group. Steps may be sent before earlier ones are answered; they run in order.

    Raises Unavailable when the group is gone: every request on it must then be replayed elsewhere.
    """

    async def info(self) -> TargetInfo: ...

    async def step(self, plan: StepPlan) -> StepReport: ...


class Proposer(Protocol):
    """The target's view of a proposer. Neither call raises for a lost peer: drafts then just do not come."""

    @property
    def ready(self) -> bool: ...

    @property
    def generation(self) -> int:
        """Rises when the peer was replaced: sequences it held are gone and must be opened anew (reset)."""
        ...

    def feed(self, feeds: Sequence[FeedRows], closed: Sequence[str] = ()) -> None:
        """Hand over rows and forget `closed` request ids. Returns at once."""
        ...

    def collect(self, refs: Sequence[Ref], timeout_s: float) -> dict[str, Draft]:
        """Drafts by request id for exactly these refs, waiting at most `timeout_s` for those fed and not yet here."""
        ...


class FrontierStore(Protocol):
    """The record. Every call is idempotent; StoreUnreachable means: repeat it."""

    async def acquire(
        self,
        request: Request,
        owner: str,
        lease_s: float,
        *,
        meta: Mapping[str, str] | None = None,
        seen_epoch: int | None = None,
        above: int = 0,
        claim: str = "",
    ) -> Snapshot:
        """Create the request's record, or take it over under an epoch higher than its own and than `above`.

        With `seen_epoch` only if the record's epoch is still that one (0: only if there is no record). See `acquired`
        of the answer; a record that has ended is never acquired. The answer has version 0, epoch 0 and no rows when
        there is no record and none was created. A call whose reply was lost is made again with the same `claim`, and
        then does not raise the epoch again.
        """
        ...

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult]:
        """Commit each row in its own atomic script, all in one pipeline. A row with `finish` set ends the record."""
        ...

    async def cancel(self, request_id: str, *, abandoned_at: int | None = None) -> CommitResult:
        """End the record from outside, whatever its epoch: its owner is told GONE at the next commit.

        OK, DUP (it was cancelled before) or GONE (unknown, or ended otherwise). `abandoned_at` is the epoch of an owner
        nobody reads from: then FENCED if that has passed, CONFLICT while somebody reads it through another process.
        """
        ...

    async def snapshot(self, request_id: str, after_version: int = 0) -> Snapshot | None:
        """Read the record; rows with version > after_version only. None: unknown or expired."""
        ...
