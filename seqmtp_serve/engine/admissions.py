"""The requests a target engine holds, from their admission to their end: what each directive of a plan does to them.

A directive that does not fit the state it meets raises a SeqMTPError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.prefix import publish_prefix, share_prefix
from seqmtp_serve.engine.sequences import TargetSequence
from seqmtp_serve.errors import ContextOverflow, IllegalTransition, InvalidField, Overloaded, RequestNotFound
from seqmtp_serve.model.device import CPU
from seqmtp_serve.ports import Admit, Prefill, Publish, Release, Verify
from seqmtp_serve.request import Ref, SamplingParams
from seqmtp_serve.speculation.grammar import GrammarCompiler
from seqmtp_serve.speculation.prediction import PredictionPointer
from seqmtp_serve.speculation.prompt_lookup import GREEDY, SAMPLED, PromptLookup
from seqmtp_serve.speculation.shaping import shaping_state


class Admissions:
    """Owns the sequences and their pages. `on_forget` hears the id of each request that is let go.

    Call `begin_pass` before the prefill and verify directives of a step: one pass runs a request once.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PagedCache,
        *,
        vocab_size: int,
        max_len: int,
        grammars: GrammarCompiler | None,
        on_forget: Callable[[str], None],
        device: torch.device = CPU,
    ) -> None:
        self.config, self._cache, self._grammars, self._on_forget = config, cache, grammars, on_forget
        self._vocab_size, self._max_len, self._device = vocab_size, max_len, device
        self.sequences: dict[str, TargetSequence] = {}
        self._busy: set[str] = set()  # requests with rows in the pass being put together

    def begin_pass(self) -> None:
        """No request has rows in the coming pass yet."""
        self._busy.clear()

    def check(self) -> None:
        """Assert every invariant of pages, lengths and versions."""
        pool = self._cache.pool
        pool.check()
        held = {page for sequence in self.sequences.values() for page in pool.pages(sequence.lease)}
        assert len(held) == pool.num_pages - pool.num_free, "pages are held for a request nobody knows"
        for sequence in self.sequences.values():
            sequence.check(len(pool.pages(sequence.lease)) * pool.page_size)

    def release(self, release: Release) -> None:
        """Forget the request, unless a newer epoch holds it by now."""
        sequence = self.sequences.get(release.request_id)
        if sequence is not None and sequence.ref.epoch <= release.epoch:
            self.forget(sequence)

    def publish(self, publish: Publish) -> None:
        """The pending row is committed: its rows become canonical, and full pages known to others."""
        sequence = self.find(publish.ref)
        sequence.publish(publish.ref, publish.keep)
        publish_prefix(self._cache.pool, sequence)

    def admit(self, admit: Admit) -> None:
        """Reserve pages for P and the first round. A newer epoch takes the place of an older one."""
        request, known = admit.request, self.sequences.get(admit.ref.request_id)
        if known is not None and known.ref.epoch >= admit.ref.epoch:
            known.require(admit.ref)
            raise IllegalTransition(f"{admit.ref.request_id} is admitted already")
        tokens = [*request.prompt_ids, *admit.output_ids]
        num_prefix = len(tokens) - bool(admit.output_ids)
        if not request.prompt_ids or num_prefix >= self._max_len:
            raise ContextOverflow(f"{num_prefix} tokens do not fit a context of {self._max_len}", param="prompt")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise InvalidField(f"a token of the prompt is outside the vocabulary of {self._vocab_size}", param="prompt")
        shaping = shaping_state(request, self._vocab_size, self._grammars, self._device)
        if known is not None:
            self.forget(known)
        if len(self.sequences) >= self.config.max_batch:
            raise Overloaded(f"{len(self.sequences)} sequences are running; release one first")
        pool = self._cache.pool
        lease = pool.open()
        is_scored = request.params.prompt_logprobs is not None and not admit.output_ids  # each row has to be computed
        shareable = [] if is_scored else tokens[: num_prefix - 1]  # the last row is computed: something follows it
        keys = share_prefix(pool, lease, shareable)
        try:
            pool.grow(lease, min(num_prefix + self.config.max_depth + 1, self._max_len))
        except Overloaded:
            self._cache.close(lease)
            raise
        self.sequences[request.request_id] = TargetSequence(
            request=request,
            ref=admit.ref,
            tokens=tokens,
            lease=lease,
            num_prefix=num_prefix,
            shaping=shaping,
            num_cached=len(keys) * pool.page_size,
            page_keys=keys,
            pointer=PredictionPointer(request.prediction_ids) if request.prediction_ids else None,
            lookup=self._lookup(request.params),
        )

    def _lookup(self, params: SamplingParams) -> PromptLookup | None:
        if not (self.config.prompt_lookup and params.max_depth):
            return None
        return PromptLookup(first_rates=SAMPLED if params.temperature > 0 else GREEDY)

    def check_prefill(self, prefill: Prefill) -> None:
        """Take the chunk into the coming pass."""
        sequence = self._idle(prefill.ref)
        fits = prefill.start == sequence.length < prefill.stop <= sequence.num_prefix
        if not fits or prefill.last != (prefill.stop == sequence.num_prefix):
            raise IllegalTransition(
                f"{prefill.ref.request_id}: positions {prefill.start} to {prefill.stop} do not follow "
                f"{sequence.length} of {sequence.num_prefix}"
            )
        self._busy.add(prefill.ref.request_id)

    def check_verify(self, verify: Verify) -> None:
        """Take the round into the coming pass, with pages for all its rows."""
        sequence = self._idle(verify.ref)
        if not (sequence.prefilled and sequence.is_bootstrapped):
            raise IllegalTransition(f"{verify.ref.request_id}: no round before the end of prefill")
        if sequence.length >= self._max_len:
            raise ContextOverflow(f"{verify.ref.request_id}: the context of {self._max_len} is full")
        num_drafts = max(self.depth(verify), self.num_predicted(verify))
        self._cache.pool.grow(sequence.lease, sequence.length + 1 + num_drafts)
        self._busy.add(verify.ref.request_id)

    def depth(self, verify: Verify) -> int:
        """Drafts this round may verify: as many as asked for, as configured, and as the context holds."""
        sequence = self.find(verify.ref)
        most = len(sequence.copy.tokens) if sequence.copy else self.config.max_depth
        return max(0, min(verify.depth, most, self._max_len - 1 - sequence.length))

    def num_predicted(self, verify: Verify) -> int:
        """Tokens of its prediction this round may verify."""
        return max(0, min(verify.predicted, self._max_len - 1 - self.find(verify.ref).length))

    def _idle(self, ref: Ref) -> TargetSequence:
        """The sequence at exactly this state, if it has no rows in this pass and none awaiting their commit."""
        sequence = self.find(ref)
        sequence.require(ref)
        if sequence.pending is not None:
            raise IllegalTransition(f"{ref.request_id}: version {ref.version + 1} awaits its commit")
        if ref.request_id in self._busy:
            raise IllegalTransition(f"{ref.request_id}: one pass runs a request once")
        return sequence

    def find(self, ref: Ref) -> TargetSequence:
        """The request's sequence, whatever its state. Raises RequestNotFound."""
        sequence = self.sequences.get(ref.request_id)
        if sequence is None:
            raise RequestNotFound(f"{ref.request_id} is not admitted here")
        return sequence

    def forget(self, sequence: TargetSequence) -> None:
        """Let it go, and its pages with it."""
        self._cache.close(sequence.lease)
        del self.sequences[sequence.request.request_id]
        self._on_forget(sequence.request.request_id)
