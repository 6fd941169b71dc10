"""What speculation costs and earns, counted where it happens. Milliseconds; costs are disjoint.

    S = E[R] * C_main / (C_round + C_mtp + C_verify + C_pack + C_sync)

E[R] is the mean progress of a round, as verified; acceptance is given by position and unconditional: accepted rounds
over rounds that drafted this far. Costs come only from steps without prefill rows, in buckets of (depth, batch), so a
round is compared with an ordinary decode of the same batch. The frontier token is part of the pass that consumes it
and is charged there once. `outputs = bootstraps + sum of R as delivered`; R as delivered is smaller than R as verified
only in a request's last round.

What hides behind the pass is told by a second account: `overlap.wall_ms` is the time that the group's rounds took one
after the other, `pass_ms` that of their target passes, `other_ms` all the rest of their costs as if nothing overlapped.

    hidden share = 1 - (wall_ms - pass_ms) / other_ms
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from seqmtp_serve.frontier.spread import Spread
from seqmtp_serve.ports import RowResult, StepCosts, StepPlan, StepReport
from seqmtp_serve.request import CommittedRow

RECENT_STEPS = 256  # a bucket forgets half of itself here, so old load does not decide for ever
# Counted from the start: a counter that first appears at 1 hides that step from a rate.
ALWAYS = (
    *("outputs", "bootstraps", "rounds", "rounds.accepted", "rounds.rejected", "rounds.plain"),
    *("progress.verified", "progress.delivered", "drafted", "accepted", "drafts.left_out", "drafts.refused"),
    *("steps", "fallbacks"),
    *("commits.dup", "commits.conflict", "commits.fenced", "commits.gone", "replays", "target_losses", "restored_rows"),
    *("overlap.wall_ms", "overlap.pass_ms", "overlap.other_ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """One round of a batch, in milliseconds. `main` is the pass at depth 0, `verify` the pass above it."""

    main: float = 0.0
    mtp: float = 0.0  # the part of proposing and repair that nothing hid
    verify: float = 0.0
    pack: float = 0.0  # building batches, copying rows, selection
    sync: float = 0.0  # commit, and the way to the target and back
    round: float = 0.0  # proposer rounds of their own: none in this schedule

    @classmethod
    def of_step(cls, costs: StepCosts, *, depth: int, step_ms: float, commit_ms: float) -> RoundCosts:
        """Split a step: `step_ms` is its whole time as the driver saw it; what the target cannot explain is sync."""
        explained = costs.forward + costs.draft_wait + costs.select + costs.pack
        return cls(
            main=0.0 if depth else costs.forward,
            verify=costs.forward if depth else 0.0,
            mtp=costs.draft_wait,
            pack=costs.pack + costs.select,
            sync=max(0.0, step_ms - explained) + commit_ms,
        )

    @property
    def total(self) -> float:
        """The whole round."""
        return self.main + self.mtp + self.verify + self.pack + self.sync + self.round


def hidden_share(counters: Mapping[str, float]) -> float | None:
    """The share of all costs but the target pass that hid behind one; None when nothing was measured."""
    other_ms = counters.get("overlap.other_ms", 0.0)
    if not other_ms:
        return None
    return 1.0 - (counters["overlap.wall_ms"] - counters["overlap.pass_ms"]) / other_ms


def speedup(expected_r: float, main_ms: float, costs: RoundCosts) -> float:
    """S of the formula above. `main_ms` is one ordinary decode of the same batch. Speculation wins above 1."""
    return expected_r * main_ms / costs.total


@dataclass(slots=True)
class _Bucket:
    num_steps: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 6)
    num_rounds: float = 0.0
    progress: float = 0.0  # sum of R

    def add(self, costs: RoundCosts, num_rounds: int, progress: int) -> None:
        if self.num_steps >= RECENT_STEPS:
            self.num_steps, self.num_rounds, self.progress = (
                self.num_steps / 2,
                self.num_rounds / 2,
                self.progress / 2,
            )
            self.sums = [value / 2 for value in self.sums]
        self.num_steps += 1
        self.num_rounds += num_rounds
        self.progress += progress
        self.sums = [value + more for value, more in zip(self.sums, astuple(costs), strict=True)]


class Ledger:
    """The account of one coordinator. `counters()` only ever rise; those of `max_depth` positions begin at 0."""

    def __init__(self, max_depth: int = 0) -> None:
        self._positions = [f"{kind}.pos{position}" for kind in ("drafted", "accepted") for position in range(max_depth)]
        self._counts: Counter[str] = Counter()
        self._times: defaultdict[str, float] = defaultdict(float)
        self._buckets: defaultdict[tuple[int, int], _Bucket] = defaultdict(_Bucket)
        self._spreads = {name: Spread() for name in ("step_seconds", "commit_seconds")}

    # ---- entries -----------------------------------------------------------------------------------------------

    def count(self, name: str, amount: int = 1) -> None:
        """Any event that has a name and nothing else: replays, preemptions, fallbacks, refusals."""
        self._counts[name] += amount

    def record_row(self, row: CommittedRow, result: RowResult) -> None:
        """One committed row, and the result it was cut from."""
        self.count("outputs", len(row.tokens))
        if row.finish is not None:
            self.count(f"finished.{row.finish}")
        if row.origins == "b":
            self.count("bootstraps")
            return
        self.count("rounds")
        self.count("progress.delivered", len(row.tokens))
        self.count("progress.verified", len(result.tokens))
        if result.predicted:
            self.count("predicted.drafted", result.drafted)
            self.count("predicted.accepted", result.accepted)
            self.count("rounds.predicted")
            return
        if result.forced:
            num_kept = min(result.accepted, result.forced)
            self.count("forced.drafted", result.forced)
            self.count("forced.accepted", num_kept)
            self.count("forced.followers.drafted", result.drafted - result.forced)
            self.count("forced.followers.accepted", result.accepted - num_kept)
            self.count("rounds.forced")
            return
        self.count("drafted", result.drafted)
        self.count("accepted", result.accepted)
        if result.copied:
            self.count("copied.drafted", result.drafted)
            self.count("copied.accepted", result.accepted)
            self.count("copied.rounds")
        if result.drafted:
            self.count("rounds.accepted" if result.accepted == result.drafted else "rounds.rejected")
        else:
            self.count("rounds.plain")
        for position in range(result.drafted):
            self.count(f"drafted.pos{position}")
            self.count(f"accepted.pos{position}", int(position < result.accepted))

    def record_step(self, plan: StepPlan, report: StepReport, step_ms: float, commit_ms: float) -> RoundCosts | None:
        """Enter a step. Costs are those of steps of nothing but rounds: any other would charge prefill to speculation.

        Returns them; None for any other step.

        Hidden rows are counted for every step. What experts did is counted for each kind of pass apart, and for the MTP
        module apart from the target.
        """
        self._record_experts(plan, report)
        self.count("hidden.rows", report.costs.fed_rows)
        self.count("hidden.bytes", report.costs.fed_bytes)
        self._times["hidden.ms"] += report.costs.feed
        self._spreads["step_seconds"].add(step_ms / 1e3)
        if any(result.tokens for result in report.rows):
            self._spreads["commit_seconds"].add(commit_ms / 1e3)
        self.count("steps")
        self.count("drafts.left_out", sum(_num_left_out(result) for result in report.rows))
        self._times["mtp_compute_ms"] += report.costs.mtp
        self._times["candidate_prob.sum"] += report.costs.draft_prob
        self.count("candidate_prob.count", report.costs.num_draft_probs)
        results = [result for result in report.rows if result.error is None]
        if not results or len(results) != len(plan.verify) or plan.prefill:
            return None
        if any(result.predicted or result.forced for result in results):
            return None  # such a step says nothing of what the MTP module's drafts cost and earn
        depth = max(item.depth for item in plan.verify)
        costs = RoundCosts.of_step(report.costs, depth=depth, step_ms=step_ms, commit_ms=commit_ms)
        self.record_rounds(depth, results, costs)
        return costs

    def record_rounds(self, depth: int, results: Sequence[RowResult], costs: RoundCosts) -> None:
        """Rounds of one step, asked at `depth`: their costs and the progress they bought."""
        self._buckets[depth, len(results)].add(costs, len(results), sum(len(result.tokens) for result in results))
        self.count(f"steps.depth{depth}")
        for name in ("main", "mtp", "verify", "pack", "sync", "round"):
            self._times[f"cost_ms.{name}"] += getattr(costs, name)

    def record_overlap(self, costs: StepCosts, round_ms: float, wall_ms: float | None) -> None:
        """Enter how long a step of nothing but rounds was for the group, and how long its parts were, hidden or not.

        `round_ms` is the whole round of one cohort: planned, sent, waited for, committed. `wall_ms` lies between the
        report before, of any cohort, and this step's; None if the group was idle meanwhile.
        """
        if wall_ms is None:
            return
        self._times["overlap.wall_ms"] += wall_ms
        self._times["overlap.pass_ms"] += costs.forward
        drafted_before_ms = max(0.0, costs.mtp - costs.draft_wait)
        self._times["overlap.other_ms"] += max(0.0, round_ms - costs.queued - costs.forward) + drafted_before_ms

    def _record_experts(self, plan: StepPlan, report: StepReport) -> None:
        depth = max((item.depth for item in plan.verify), default=0)
        kind = "prefill" if plan.prefill else "verify" if depth else "main"
        for work in report.experts:
            prefix = f"experts.{kind}.rank{work.rank}"
            self.count(f"{prefix}.pairs", work.num_pairs)
            self.count(f"{prefix}.touched", work.num_touched)
            self.count(f"{prefix}.sent_bytes", work.sent_bytes)
        if report.costs.mtp_touched:
            self._times["experts.mtp.touched"] += report.costs.mtp_touched

    # ---- readings ----------------------------------------------------------------------------------------------

    def costs(self, depth: int, batch: int) -> RoundCosts | None:
        """Mean costs of a round of this batch at this depth."""
        bucket = self._buckets[depth, batch]
        if not bucket.num_steps:
            return None
        main, mtp, verify, pack, sync, own = (value / bucket.num_steps for value in bucket.sums)
        return RoundCosts(main=main, mtp=mtp, verify=verify, pack=pack, sync=sync, round=own)

    def expected_r(self, depth: int, batch: int) -> float:
        """E[R] of the bucket, as verified; 1 when nothing is known."""
        bucket = self._buckets[depth, batch]
        return bucket.progress / bucket.num_rounds if bucket.num_rounds else 1.0

    def acceptance(self) -> tuple[float, ...]:
        """By position, unconditional: rounds that accepted this position over rounds that drafted it."""
        rates: list[float] = []
        while drafted := self._counts[f"drafted.pos{len(rates)}"]:
            rates.append(self._counts[f"accepted.pos{len(rates)}"] / drafted)
        return tuple(rates)

    def speedup(self, depth: int, batch: int) -> float | None:
        """S against ordinary decoding of the same batch; None until both were measured.

        C_main is the whole ordinary round, its own sync and packing included: both sides pay them.
        """
        plain, costs = self.costs(0, batch), self.costs(depth, batch)
        if plain is None or costs is None:
            return None
        return speedup(self.expected_r(depth, batch), plain.total, costs)

    def counters(self) -> dict[str, float]:
        """Every count and cost sum by name, for telemetry."""
        spreads = {key: value for name, each in self._spreads.items() for key, value in each.counters(name).items()}
        counts = {**dict.fromkeys([*ALWAYS, *self._positions], 0), **self._counts}
        return {**{name: float(value) for name, value in counts.items()}, **self._times, **spreads}


def _num_left_out(result: RowResult) -> int:
    """Drafts of the module that this round did not verify; none where it had others."""
    has_others = result.predicted or result.forced or not result.chances
    return 0 if has_others else len(result.chances) - result.drafted
