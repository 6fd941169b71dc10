"""The target engine: one worker that prefills, verifies and selects for many requests, a step at a time.

Synchronous and single-threaded. A step never raises for what its plan says: an item that does not fit the state it
meets is refused in its own row and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from seqmtp_serve.config import EngineConfig, copied_limit
from seqmtp_serve.engine.admissions import Admissions
from seqmtp_serve.engine.batch import Item, logit_rows, prefill_item, round_item, select
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.feeder import Feeder, Want
from seqmtp_serve.engine.hidden_rows import HiddenPolicy
from seqmtp_serve.engine.memory import storages
from seqmtp_serve.engine.own_drafts import own_drafts
from seqmtp_serve.engine.pages import Owner
from seqmtp_serve.engine.prefix import publish_prefix
from seqmtp_serve.engine.scoring import Scores, chosen_logprobs, prompt_logprobs
from seqmtp_serve.engine.stopwatch import Stopwatch
from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.deepseek import ExpertShare
from seqmtp_serve.model.device import wait_for
from seqmtp_serve.model.dispatch import Tally
from seqmtp_serve.model.family import ModelConfig, Trunk, build_trunk, kernel_levels, numerics_for
from seqmtp_serve.ports import (
    Admit,
    ExpertWork,
    Prefill,
    Proposer,
    Publish,
    RowResult,
    StepCosts,
    StepPlan,
    StepReport,
    TargetInfo,
    Verify,
)
from seqmtp_serve.speculation.grammar import GrammarCompiler
from seqmtp_serve.speculation.row_params import RecentRowParams

T = TypeVar("T", Publish, Admit, Prefill, Verify)


class TargetEngine:
    """Implements what `ports.TargetGroup` promises, without the network. `proposer` None: ordinary decoding only.

    `share` says which experts this rank holds, for a model that has any (None: all of them). Raises InvalidField when a
    backend that `config.kernels` names cannot run here, or its device is not there. Without `grammars`
    requests with one are refused.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tensors: Mapping[str, Tensor],
        proposer: Proposer | None = None,
        name: str = "model",
        fingerprint: str = "",
        group_id: str = "target-0",
        share: ExpertShare | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        torch.set_num_threads(config.num_threads)
        self.config, self.model = config, model
        self._info = (name, fingerprint, group_id)
        self._max_len = min(config.max_model_len, model.max_position)
        numerics = numerics_for(config, model)
        self._device = numerics.device
        self._trunk = build_trunk(tensors, model, config.page_size, self._max_len, numerics, share)
        self._weight_bytes = sum(storages(self._trunk).values())
        self._in_group = share is not None and share.experts is not None
        self._cache = PagedCache(Owner.TARGET, config, model, model.num_layers, self._device)
        self._feeder = Feeder(
            proposer,
            self._cache,
            vocab_size=model.vocab_size,
            max_depth=config.max_depth,
            max_len=self._max_len,
            hidden=HiddenPolicy(window=config.hidden_window, dtype=config.hidden_dtype),
        )
        self._admissions = Admissions(
            config,
            self._cache,
            vocab_size=model.vocab_size,
            max_len=self._max_len,
            grammars=grammars,
            on_forget=self._feeder.close,
            device=self._device,
        )
        self._sequences = self._admissions.sequences
        self._row_params = RecentRowParams(self._device)

    @property
    def trunk(self) -> Trunk:
        """The weights, for accounting."""
        return self._trunk

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def cache(self) -> PagedCache:
        """The pages, for accounting."""
        return self._cache

    def info(self) -> TargetInfo:
        """What this engine can do."""
        name, fingerprint, group_id = self._info
        return TargetInfo(
            group_id=group_id,
            model=name,
            max_model_len=self._max_len,
            vocab_size=self.model.vocab_size,
            page_size=self.config.page_size,
            num_pages=self.config.num_pages,
            max_batch=self.config.max_batch,
            max_depth=self.config.max_depth,
            numerics=self.config.numerics,
            manifest_fingerprint=fingerprint,
            kernels=self._trunk.kernels,
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepReport:
        """Release, publish, admit; then one pass over all prefill and verify rows, exact selection, and the next feed.

        Hidden rows the pass kept go to the proposer before this returns, so it drafts while the rows are committed.
        """
        watch, held = Stopwatch(), self._admissions
        rows: list[RowResult] = []
        with watch.phase("pack"):
            for release in plan.release:
                held.release(release)
            self._each(plan.publish, held.publish, rows)
            self._each(plan.admit, held.admit, rows)
            held.begin_pass()
            prefills = self._each(plan.prefill, held.check_prefill, rows)
            verifies = self._each(plan.verify, held.check_verify, rows)
        refused_before = self._feeder.num_refused_drafts
        rows_before, bytes_before = self._feeder.num_fed_rows, self._feeder.num_fed_bytes
        with watch.phase("draft_wait"):
            by_id = {each.ref.request_id: each for each in verifies}
            wanted = {name: (held.find(each.ref), held.depth(each)) for name, each in by_id.items()}
            leading = {name: (*wanted[name], held.num_predicted(each)) for name, each in by_id.items()}
            own = own_drafts(leading, self.model.vocab_size)
            needed = {
                name: Want(sequence=sequence, depth=depth, floor=by_id[name].floor)
                for name, (sequence, depth) in wanted.items()
                if not own.suffices(name, depth)
            }
            proposed = self._feeder.collect(needed, plan.deadline_ms / 1e3 - watch.elapsed_s())
        with watch.phase("pack"):
            items = [prefill_item(each, held.find(each.ref)) for each in prefills if not self._is_cached(each)]
            for name, each in by_id.items():
                drafted = proposed.get(name)
                chosen = own.choose(name, drafted.draft if drafted else None)
                items.append(round_item(each, held.find(each.ref), chosen, drafted.all if drafted else None))
        done_before = copy(self._trunk.tally)
        with watch.phase("forward"):
            state_Nd = self._forward(items)
            prompt_scores, bad = prompt_logprobs(state_Nd, items, self._trunk.logits)
            logits_nV = self._logits(state_Nd, items)
            wait_for(self._device)  # or the selection would be charged for it
        with watch.phase("select"):
            rows += [self._pass_over(each) for each in prefills if self._is_cached(each)]
            rows += self._select(logits_nV, items, prompt_scores, bad)
        with watch.phase("feed"):
            alive = (item for item in items if item.sequence.request.request_id in self._sequences)
            self._feeder.feed((item.sequence, item.next) for item in alive)
        drafts = [one.all for one in proposed.values()]
        draft_probs = [prob for one in proposed.values() if one.draft for prob in one.draft.token_probs]
        return StepReport(
            step_id=plan.step_id,
            refused_drafts=self._feeder.num_refused_drafts - refused_before,
            rows=tuple(rows),
            costs=StepCosts(
                forward=watch.ms("forward"),
                draft_wait=watch.ms("draft_wait"),
                select=watch.ms("select"),
                pack=watch.ms("pack") + watch.ms("feed"),
                mtp=sum(draft.mtp_ms for draft in drafts),
                num_rows=sum(len(item.token_ids) for item in items),
                mtp_touched=sum(draft.mtp_touched for draft in drafts),
                feed=watch.ms("feed"),
                fed_rows=self._feeder.num_fed_rows - rows_before,
                fed_bytes=self._feeder.num_fed_bytes - bytes_before,
                draft_prob=sum(draft_probs),
                num_draft_probs=len(draft_probs),
            ),
            free_pages=self._cache.pool.num_free,
            proposer_ready=self._feeder.ready,
            experts=self._experts_since(done_before),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is admitted."""
        return not self._sequences

    def levels(self) -> dict[str, float]:
        """What is held now, for telemetry; from the thread that steps."""
        cache, held = self._cache, self._sequences.values()
        return {
            "sequences": float(len(self._sequences)),
            "pages": float(cache.pool.num_pages),
            "pages_free": float(cache.pool.num_free),
            "kv_bytes": float(cache.num_rows_in_use * cache.row_bytes),
            "hidden_bytes": float(cache.num_rows_in_use * cache.hidden_row_bytes),
            "branch_bytes": float(sum(one.pending.num_rows for one in held if one.pending) * cache.row_bytes),
            "weight_bytes": float(self._weight_bytes),
            "proposer_ready": float(self._feeder.ready),
            **kernel_levels(self._trunk.kernels),
        }

    def check(self) -> None:
        """Assert every invariant of pages, lengths and versions. For idle moments and after tests."""
        self._admissions.check()

    # ---- the pass

    def _each(self, directives: Sequence[T], apply: Callable[[T], None], rows: list[RowResult]) -> list[T]:
        """Apply each directive; a refused one becomes a row with its error. Returns those that were applied."""
        applied = []
        for directive in directives:
            try:
                apply(directive)
            except SeqMTPError as error:
                rows.append(RowResult(ref=directive.ref, error=error.code, message=str(error)))
            else:
                applied.append(directive)
        return applied

    def _is_cached(self, prefill: Prefill) -> bool:
        """Whether every row of this chunk lies in shared pages."""
        return prefill.stop <= self._admissions.find(prefill.ref).num_cached

    def _pass_over(self, prefill: Prefill) -> RowResult:
        self._admissions.find(prefill.ref).length = prefill.stop
        return RowResult(ref=prefill.ref, cached=prefill.stop - prefill.start)

    def _forward(self, items: Sequence[Item]) -> Tensor:
        """Run the rows and keep their hidden states beside their keys and values; returns the trunk's states."""
        if not items:
            if self._in_group:  # others may have rows for this rank's experts
                self._trunk.forward((), [], self._cache.kv_LSE)
            return torch.empty(0, self.model.hidden_size, device=self._device)
        pool = self._cache.pool
        spans = [
            Span(pages=pool.pages(item.sequence.lease), start=item.start, num_rows=len(item.token_ids))
            for item in items
        ]
        token_ids = [token for item in items for token in item.token_ids]
        state_Nd = self._trunk.forward(token_ids, spans, self._cache.kv_LSE)
        slots_N = torch.cat(
            [pool.slots(item.sequence.lease, item.start, item.start + len(item.token_ids)) for item in items]
        )
        self._cache.hidden_Sd.index_copy_(0, slots_N.to(self._device), self._trunk.features(state_Nd))
        return state_Nd

    def _logits(self, state_Nd: Tensor, items: Sequence[Item]) -> Tensor:
        """The raw logits of the rows that choose a token."""
        rows_n = logit_rows(items)
        if not len(rows_n):
            return state_Nd[:0]
        return self._trunk.logits(state_Nd.index_select(0, rows_n.to(self._device)))

    def _select(
        self, logits_nV: Tensor, items: Sequence[Item], prompt_scores: Scores, bad: dict[str, SeqMTPError]
    ) -> list[RowResult]:
        """Prefilled rows become canonical at once; chosen tokens stay pending until their row is published."""
        cached: dict[str, int] = {}
        for item in items:
            sequence = item.sequence
            if item.start < sequence.num_prefix:
                cached[sequence.request.request_id] = item.start - sequence.length
                sequence.length = item.start + len(item.token_ids)
                publish_prefix(self._cache.pool, sequence)
        choosing = [item for item in items if item.chooses]
        tokens, unfit = select(logits_nV, choosing, self._row_params) if choosing else ({}, {})
        bad = bad | unfit
        scores = chosen_logprobs(logits_nV, choosing, tokens)
        rows = []
        for item in items:
            sequence = item.sequence
            error = bad.get(sequence.request.request_id)
            if error is not None:
                rows.append(RowResult(ref=sequence.ref, error=error.code, message=str(error)))
                self._cache.scrub(sequence.lease)
                self._admissions.forget(sequence)
            else:
                name = sequence.request.request_id
                row = self._row(item, tuple(tokens.get(name, ())), cached.get(name, 0))
                rows.append(replace(row, logprobs=scores.get(name, ()), prompt_logprobs=prompt_scores.get(name, ())))
        return rows

    def _row(self, item: Item, tokens: tuple[int, ...], cached: int) -> RowResult:
        sequence, accepted = item.sequence, max(0, len(tokens) - 1)
        ref = sequence.ref
        if tokens:
            is_round = item.start >= sequence.num_prefix
            if sequence.lookup is not None and item.module_draft is not None:
                sequence.lookup.module_drafted(item.module_draft)
            sequence.select(tokens, num_rows=accepted + 1 if is_round else 0)
        most = copied_limit(sequence.request.params.max_depth, self.config.max_depth, self.config.max_copied)
        module_drafts = item.next.depth != 0 and self._feeder.ready
        sequence.look_up(sequence.num_draftable(most, self._max_len), module_drafts=module_drafts)
        return RowResult(
            ref=ref,
            tokens=tokens,
            drafted=len(item.drafts),
            accepted=accepted,
            cached=cached,
            predicted=item.is_predicted,
            forced=item.num_forced,
            copied=item.is_copied,
            next_copied=sequence.copy.survivals if sequence.copy else (),
            chances=item.proposed.chances if item.proposed else (),
        )

    def _experts_since(self, before: Tally | None) -> tuple[ExpertWork, ...]:
        if self._trunk.tally is None or before is None:
            return ()
        done = self._trunk.tally.settle().since(before)
        work = ExpertWork(num_pairs=done.num_pairs, num_touched=done.num_touched, sent_bytes=done.sent_bytes)
        return (work,)
