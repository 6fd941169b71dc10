"""The help text of every counter and gauge that a worker keeps: one table, for /metrics and for docs/metrics.md.

A key is matched as a whole; `*` stands for a number or a word (a depth, a rank, an error's code).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

TASKS = "asyncio tasks of the process: what it has with nothing to do, and some for each request and stream."
OPEN_FILES = "Open files of the process, sockets among them."

COORDINATOR: Mapping[str, str] = {
    "outputs": "Committed tokens: bootstraps + progress_delivered.",
    "bootstraps": "First tokens: one a request, from its prefill; no round.",
    "rounds": "Rounds committed: the sum of the kinds below.",
    "rounds.accepted": "Rounds whose drafts were all accepted.",
    "rounds.rejected": "Rounds of which a draft was rejected.",
    "rounds.plain": "Rounds without drafts: ordinary decoding.",
    "rounds.predicted": "Rounds whose drafts came from the request's prediction.",
    "rounds.forced": "Rounds that began with drafts which the request's grammar forced.",
    "copied.rounds": "Rounds drafted by copying from the request's own text; they are among those above.",
    "copied.drafted": "Copied tokens verified.",
    "copied.accepted": "Copied tokens accepted.",
    "predicted.drafted": "Tokens of predictions verified.",
    "predicted.accepted": "Tokens of predictions accepted.",
    "forced.drafted": "Tokens forced by a grammar verified.",
    "forced.accepted": "Tokens forced by a grammar accepted.",
    "forced.followers.drafted": "The proposer's tokens verified behind forced ones.",
    "forced.followers.accepted": "The proposer's tokens accepted behind forced ones.",
    "progress.verified": "Tokens of rounds as verified, sum of R; E[R] = progress_verified / rounds.",
    "progress.delivered": "Tokens of rounds as committed: less than verified where a stop or the budget cut a row.",
    "drafted": "Draft tokens verified.",
    "accepted": "Draft tokens accepted.",
    "drafted.pos": "Rounds that drafted this position.",
    "accepted.pos": "Rounds that accepted this position; over drafted_per_pos: acceptance, unconditional.",
    "drafts.left_out": "Drafts of the MTP module that were made, and not worth verifying by how sure it was.",
    "drafts.refused": "Drafts of another state, or malformed: none was verified.",
    "candidate_prob.sum": "Sum of the probabilities that drafts had where they were sampled (ratio contract).",
    "candidate_prob.count": "Drafts that said their probability.",
    "finished.*": "Requests ended, by reason.",
    "commits.*": "Answers of the commit script other than OK: dup, conflict, fenced, gone.",
    "fallbacks": "Steps at depth 0 because the ledger or a lost proposer said so.",
    "steps": "Steps of the target group.",
    "steps.depth*": "Steps of nothing but rounds, by depth.",
    "cost_ms.main": "C_main: target passes at depth 0, milliseconds, in steps of nothing but rounds.",
    "cost_ms.mtp": "C_mtp: waiting for drafts that nothing hid, milliseconds.",
    "cost_ms.verify": "C_verify: target passes above depth 0, milliseconds.",
    "cost_ms.pack": "C_pack: building batches and selecting, milliseconds.",
    "cost_ms.sync": "C_sync: commit and the way to the target and back, milliseconds.",
    "cost_ms.round": "C_round: proposer rounds of their own, milliseconds; none in this schedule.",
    "overlap.wall_ms": "From report to report of steps of nothing but rounds, all cohorts, milliseconds.",
    "overlap.pass_ms": "The target passes of those steps, milliseconds.",
    "overlap.other_ms": "All the rest of those rounds, hidden behind a pass or not, milliseconds.",
    "mtp_compute_ms": "The proposer's computing time, hidden or not, milliseconds.",
    "hidden.rows": "Hidden rows handed to the proposer.",
    "hidden.bytes": "Bytes of them, as they travel.",
    "hidden.ms": "Handing them over, milliseconds: a part of C_pack.",
    "step_seconds": "A step as the coordinator saw it.",
    "commit_seconds": "One pipeline of commits.",
    "experts.*.rank*.pairs": "(token, expert) pairs of one rank's experts, by kind of pass.",
    "experts.*.rank*.touched": "Distinct experts read, summed over layers, by kind of pass.",
    "experts.*.rank*.sent_bytes": "Bytes sent to other ranks, by kind of pass.",
    "experts.mtp.touched": "Experts of the MTP module that proposing read.",
    "refused.*": "Rows that the target refused, by error code.",
    "replays": "Requests queued to be rebuilt from their record.",
    "target_losses": "Target groups lost.",
    "restored_rows": "Rows given back to a store that had lost them.",
    "late_results": "Results that came for a request which had gone on.",
    "preemptions": "Requests that gave their pages to older ones.",
    "store_retries": "Calls of the store that were made again.",
}
COORDINATOR_GAUGES: Mapping[str, str] = {
    "requests_live": "Requests this coordinator owns.",
    "readers": "Streams being read.",
    "depth": "Drafts that a running request was last asked for, in the mean.",
    "pages": "KV pages of the target group.",
    "pages_free": "KV pages free, by the target's last word.",
    "pages_held": "KV pages that this coordinator believes it holds. Without requests and with fewer pages_free than "
    "pages, pages were lost.",
    "waiting_tokens": "Tokens to prefill of requests that wait.",
    "max_batch": "Requests that may run at once.",
    "store_used_bytes": "Memory of the store's server.",
    "store_limit_bytes": "Memory above which no request is taken; 0: no limit.",
    "tasks": TASKS,
    "open_files": OPEN_FILES,
}
TARGET: Mapping[str, str] = {
    "steps": "Steps run.",
    "rows": "Rows (tokens) computed.",
    "forward_ms": "Time in passes, milliseconds.",
    "draft_wait_ms": "Time waiting for drafts, milliseconds.",
}
TARGET_GAUGES: Mapping[str, str] = {
    "sequences": "Requests admitted (rank 0).",
    "pages": "KV pages of rank 0.",
    "pages_free": "KV pages of rank 0 that nobody holds.",
    "kv_bytes": "Keys and values of pages in use (rank 0).",
    "hidden_bytes": "Hidden rows kept beside them for proposers (rank 0).",
    "branch_bytes": "Keys and values of provisional rows in the last step (rank 0).",
    "weight_bytes": "Weights of rank 0.",
    "proposer_ready": "1 if a fitting proposer is connected.",
    "kernel_*": "Always 1: which backend computes what.",
    "tasks": TASKS,
    "open_files": OPEN_FILES,
}
PROPOSER: Mapping[str, str] = {
    "passes": "Passes of the MTP module.",
    "feeds": "Feeds of hidden rows taken.",
    "drafts": "Drafts given.",
    "refusals": "Feeds refused.",
    "compute_ms": "Time in passes, milliseconds.",
}
PROPOSER_GAUGES: Mapping[str, str] = {
    "sequences": "Sequences open.",
    "pages_held": "MTP pages they hold. With no sequence open and pages held, pages were lost.",
    "mtp_kv_bytes": "MTP keys and values of pages in use.",
    "weight_bytes": "Weights: the module, and replicas of embedding, final norm and head.",
    "waiting": "Feeds that wait for the next pass.",
    "queue_age_seconds": "How long the oldest of them has waited.",
    "kernel_*": "Always 1: which backend computes what.",
    "tasks": TASKS,
    "open_files": OPEN_FILES,
}


def help_of(key: str, table: Mapping[str, str]) -> str:
    """The text for a key of `table`. An unknown one is named as it is; a test sees to it that there is none."""
    if key in table:
        return table[key]
    return next((text for pattern, text in table.items() if fnmatchcase(key, pattern)), f"Counter '{key}'.")
