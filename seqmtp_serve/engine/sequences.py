"""What a target engine knows of one request between steps.

Lengths count positions from the start of the prompt. The caches hold `length` canonical rows and, after a
verification, `pending.num_rows` provisional ones above them: publishing moves `length` up, rolling back drops a count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from seqmtp_serve.engine.pages import Lease
from seqmtp_serve.errors import AncestryMismatch, Fenced, IllegalTransition, StaleVersion
from seqmtp_serve.frontier.ancestry import extend_digest
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Contract, Ref, Request
from seqmtp_serve.speculation.prediction import PredictionPointer
from seqmtp_serve.speculation.prompt_lookup import Copy, PromptLookup
from seqmtp_serve.speculation.shaping import ShapingState


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """A selected row that is not committed yet: `num_rows` provisional cache rows stand behind its tokens."""

    ref: Ref  # the version that the row will be
    tokens: tuple[int, ...]
    num_rows: int


@dataclass(slots=True, kw_only=True)
class TargetSequence:
    """One admitted request.

    `tokens` is the prompt and every committed token. P, the part the target must have seen before a round, is all but
    the last of them once anything was committed (the last is the frontier), and the prompt before that.
    """

    request: Request
    ref: Ref
    tokens: list[int]
    lease: Lease
    num_prefix: int  # positions of P when it was admitted
    shaping: ShapingState | None = None
    length: int = 0
    num_cached: int = 0  # positions of P whose rows other sequences had computed when it was admitted
    page_keys: list[bytes] = field(default_factory=list)  # of its pages that are full of canonical rows
    pending: PendingRow | None = None
    fed_bases: int = 0  # rows the proposer holds: bases 0 .. fed_bases - 1
    fed_generation: int = -1  # of the proposer they were given to
    draft_ref: Ref | None = None  # the state that drafts were last asked for
    pointer: PredictionPointer | None = None  # into the request's prediction, if it has one
    lookup: PromptLookup | None = None  # its text, where drafts may be copied from it
    copy: Copy | None = None  # the next round's drafts, if they are to come from there

    @property
    def prefilled(self) -> bool:
        """Whether the caches cover P."""
        return self.length >= self.num_prefix

    @property
    def is_bootstrapped(self) -> bool:
        """Whether the first token was chosen (here or before a replay)."""
        return len(self.tokens) > len(self.request.prompt_ids)

    @property
    def has_frontier(self) -> bool:
        """Whether the next pass is a round: P is covered and a token after it is chosen, perhaps not yet committed."""
        return self.prefilled and (self.is_bootstrapped or self.pending is not None)

    @property
    def num_remaining(self) -> int:
        """New tokens the budget still allows after the committed ones."""
        return self.request.params.max_tokens - (len(self.tokens) - len(self.request.prompt_ids))

    @property
    def known_tokens(self) -> list[int]:
        """Committed tokens and those of the pending row."""
        return self.tokens + list(self.pending.tokens) if self.pending else self.tokens

    @property
    def num_computed(self) -> int:
        """Rows in the caches that the known tokens stand for: canonical and pending ones."""
        return self.length + (self.pending.num_rows if self.pending else 0)

    def predicted(self, num_tokens: int, vocab_size: int) -> Draft | None:
        """What the prediction proposes after the known tokens, at most so many; None when it leads nowhere."""
        if self.pointer is None:
            return None
        self.pointer.catch_up(self.known_tokens[len(self.request.prompt_ids) :])
        tokens = self.pointer.propose(num_tokens)
        tokens = tuple(takewhile(lambda token: token < vocab_size, tokens))
        if not tokens:
            return None
        return self.certain(tokens)

    def forced(self) -> tuple[int, ...]:
        """What its grammar lets follow the known tokens and nothing else; nothing for ordinary decoding (depth 0)."""
        grammar = self.shaping.grammar if self.shaping else None
        if self.shaping is None or grammar is None or not self.request.params.max_depth:
            return ()
        self.shaping.catch_up(self.tokens)
        if self.pending:
            grammar = grammar.fork()
            for token in self.pending.tokens:
                grammar.push(token)
        return grammar.forced()

    def copied(self, num_tokens: int) -> Draft | None:
        """As much of what was found by `look_up`; None when that is nothing."""
        tokens = self.copy.tokens[:num_tokens] if self.copy else ()
        return self.certain(tokens) if tokens else None

    def look_up(self, num_tokens: int, *, module_drafts: bool) -> None:
        """Find drafts for the round after the known tokens, at most so many, in the text itself.

        None where the module would draft (`module_drafts`) and do better, or where the request brings better ones.
        """
        if self.lookup is None:
            return
        self.lookup.extend(self.known_tokens[self.lookup.num_tokens :])
        if num_tokens and not self.is_predicted:
            self.copy = self.lookup.find(num_tokens, module_drafts=module_drafts)

    def certain(self, tokens: tuple[int, ...]) -> Draft:
        """A draft that nobody sampled. Under the ratio contract each token's distribution is the token alone."""
        is_ratio = self.request.params.contract is Contract.RATIO
        return Draft(
            ref=self.ref, tokens=tokens, draft_probs=tuple(((token, 1.0),) for token in tokens) if is_ratio else ()
        )

    @property
    def is_predicted(self) -> bool:
        """Whether the prediction was right about the newest known tokens, and goes on."""
        if self.pointer is None:
            return False
        self.pointer.catch_up(self.known_tokens[len(self.request.prompt_ids) :])
        return self.pointer.is_sure and bool(self.pointer.propose(1))

    def require(self, ref: Ref) -> None:
        """Refuse a message about another epoch, version or ancestry. Raises ProtocolError; changes nothing."""
        _require_equal(self.ref, ref)

    def select(self, tokens: tuple[int, ...], num_rows: int) -> PendingRow:
        """Keep a selected row until it is committed."""
        ref = Ref(
            request_id=self.ref.request_id,
            epoch=self.ref.epoch,
            version=self.ref.version + 1,
            digest=extend_digest(self.ref.digest, tokens),
        )
        self.pending, self.copy = PendingRow(ref=ref, tokens=tokens, num_rows=num_rows), None
        return self.pending

    def num_draftable(self, max_depth: int, max_len: int) -> int:
        """Of `max_depth` drafts, those that the next round can use: its budget and the context must leave room for one
        more token than these.
        """
        if not self.has_frontier:
            return 0
        num_pending = len(self.pending.tokens) if self.pending else 0
        budget, context = self.num_remaining - num_pending - 1, max_len - 1 - self.num_computed
        return max(0, min(max_depth, budget, context))

    def publish(self, ref: Ref, keep: int) -> None:
        """The pending row is committed: its `keep` provisional rows are canonical now. Raises ProtocolError."""
        pending = self.pending
        if pending is None:
            _require_equal(self.ref, ref)
            raise IllegalTransition(f"{ref.request_id}: version {ref.version} is published already")
        _require_equal(pending.ref, ref)
        if keep != pending.num_rows:
            raise IllegalTransition(f"{ref.request_id}: a row of {pending.num_rows} inputs cannot keep {keep}")
        self.length += keep
        self.tokens.extend(pending.tokens)
        self.ref, self.pending = pending.ref, None

    def check(self, num_slots: int) -> None:
        """Assert the carried-frontier invariant: the caches cover P, the frontier has no row yet."""
        assert self.num_computed <= num_slots, "rows beyond the pages"
        if self.is_bootstrapped and self.prefilled:
            assert self.length == len(self.tokens) - 1, "target rows must cover exactly P"
        if self.pending is None:
            assert self.fed_bases <= self.length, "the proposer was fed rows that do not exist"


def _require_equal(own: Ref, ref: Ref) -> None:
    if ref.epoch < own.epoch:
        raise Fenced(f"{own.request_id}: epoch {ref.epoch} given, {own.epoch} is current")
    if ref.epoch > own.epoch:
        raise StaleVersion(f"{own.request_id}: epoch {ref.epoch} was never admitted here, only {own.epoch}")
    if ref.version != own.version:
        raise StaleVersion(f"{own.request_id}: version {ref.version} given, {own.version} expected")
    if ref.digest != own.digest:
        raise AncestryMismatch(f"{own.request_id}: version {ref.version} was computed from another prefix")
