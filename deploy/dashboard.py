"""The Grafana dashboard as a list of panels: `python -m deploy.dashboard > deploy/grafana/seqmtp.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

UID = "seqmtp-serve"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name=~"$model"'
RATE = "[$__rate_interval]"
ONCE = "max without (instance, pod)"  # every frontend that is scraped shows the same series of the whole service
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


def rate(name: str, *by: str, more: str = "") -> str:
    """The rate of a counter, summed over everything but `by`."""
    return f"sum by ({', '.join(by)}) ({ONCE} (rate({name}{{{MODEL}{more}}}{RATE})))"


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram over all processes."""
    return f"histogram_quantile({share}, {rate(name + '_bucket', 'le')})"


def quantiles(name: str) -> list[tuple[str, str]]:
    """p50, p95 and p99 with their legends."""
    return [(quantile(share, name), f"p{round(share * 100)}") for share in (0.5, 0.95, 0.99)]


def level(name: str, *by: str) -> str:
    """A gauge, summed over everything but `by`."""
    return f"sum by ({', '.join(by)}) ({ONCE} ({name}{{{MODEL}}}))"


# row -> panels: (title, unit, queries with their legends)
Panel = tuple[str, str, list[tuple[str, str]]]
ROWS: dict[str, list[Panel]] = {
    "Speculation": [
        (
            "E[R], verified",
            "none",
            [(f"{rate('seqmtp_progress_verified_total')} / {rate('seqmtp_rounds_total')}", "E[R]")],
        ),
        (
            "Acceptance by position, unconditional",
            "percentunit",
            [
                (
                    f"{rate('seqmtp_accepted_per_pos_total', 'position')} / "
                    f"{rate('seqmtp_drafted_per_pos_total', 'position')}",
                    "position {{position}}",
                )
            ],
        ),
        (
            "vLLM's names: mean acceptance length",
            "none",
            [
                (
                    f"1 + {rate('vllm:spec_decode_num_accepted_tokens_total')} / "
                    f"{rate('vllm:spec_decode_num_drafts_total')}",
                    "1 + accepted / drafts",
                )
            ],
        ),
        (
            "Rounds a second",
            "ops",
            [(rate(f"seqmtp_rounds_{kind}_total"), kind) for kind in ("accepted", "rejected", "plain")],
        ),
        ("Depth asked for", "none", [(f"avg(seqmtp_depth{{{MODEL}}})", "mean of coordinators")]),
        (
            "Fallbacks to ordinary decoding",
            "percentunit",
            [(f"{rate('seqmtp_fallbacks_total')} / {rate('seqmtp_steps_total')}", "of steps")],
        ),
        (
            "Probability of a draft where it was sampled",
            "percentunit",
            [(f"{rate('seqmtp_candidate_prob_sum_total')} / {rate('seqmtp_candidate_prob_count_total')}", "mean")],
        ),
        (
            "Costs of a round, disjoint",
            "ms",
            [
                (f"{rate(f'seqmtp_cost_ms_{part}_total')} / {rate('seqmtp_rounds_total')}", f"C_{part}")
                for part in ("main", "mtp", "verify", "pack", "sync", "round")
            ],
        ),
        (
            "Proposer: computing, and time a draft",
            "ms",
            [(f"{rate('seqmtp_proposer_compute_ms_total')} / {rate('seqmtp_proposer_drafts_total')}", "a draft")],
        ),
    ],
    "Latency": [
        ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Time per output token", "s", quantiles("vllm:request_time_per_output_token_seconds")),
        ("Time between chunks", "s", quantiles("vllm:inter_token_latency_seconds")),
        ("End to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
        ("A step", "s", quantiles("seqmtp_step_seconds")),
        ("A pipeline of commits", "s", quantiles("seqmtp_commit_seconds")),
    ],
    "Load": [
        (
            "Tokens a second",
            "ops",
            [(rate("vllm:generation_tokens_total"), "output"), (rate("vllm:prompt_tokens_total"), "prompt")],
        ),
        (
            "Requests",
            "none",
            [(level("vllm:num_requests_running"), "running"), (level("vllm:num_requests_waiting"), "waiting")],
        ),
        ("Ends", "ops", [(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")]),
        ("Failures", "ops", [(rate("seqmtp_request_failures_total", "code"), "{{code}}")]),
        ("Tokens waiting to be prefilled", "none", [(level("seqmtp_waiting_tokens"), "tokens")]),
        ("KV pages in use", "percentunit", [(f"avg(vllm:kv_cache_usage_perc{{{MODEL}}})", "of the target group")]),
    ],
    "Faults": [
        (
            "Commits refused or repeated",
            "ops",
            [(rate(f"seqmtp_commits_{answer}_total"), answer) for answer in ("dup", "conflict", "fenced", "gone")],
        ),
        (
            "Recovery",
            "ops",
            [
                (rate("seqmtp_replays_total"), "replays"),
                (rate("seqmtp_target_losses_total"), "target groups lost"),
                (rate("seqmtp_preemptions_total"), "preemptions"),
                (rate("seqmtp_store_retries_total"), "store calls repeated"),
            ],
        ),
        (
            "Ready",
            "bool",
            [(f"min(seqmtp_{side}_ready{{{MODEL}}})", side) for side in ("target", "mtp", "store")],
        ),
    ],
    "Memory": [
        (
            "Target rows",
            "bytes",
            [(level(f"seqmtp_target_{kind}_bytes"), kind) for kind in ("kv", "hidden", "branch", "weight")],
        ),
        (
            "Proposer",
            "bytes",
            [(level(f"seqmtp_proposer_{kind}_bytes"), kind) for kind in ("mtp_kv", "weight")],
        ),
        (
            "Store",
            "bytes",
            [("max(seqmtp_store_used_bytes)", "used"), ("max(seqmtp_store_limit_bytes)", "new requests up to")],
        ),
        (
            "Leaks: what is held when nothing runs",
            "none",
            [
                (f"{level('seqmtp_pages')} - {level('seqmtp_pages_free')}", "target pages"),
                (level("seqmtp_proposer_pages_held"), "proposer pages"),
                (level("seqmtp_readers"), "readers"),
                (level("seqmtp_requests_live"), "requests"),
            ],
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole board, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, contents in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row, "gridPos": place, "collapsed": False, "panels": []})
        for number, (title, unit, queries) in enumerate(contents):
            x, y = number * WIDTH % COLUMNS, top + 1 + number * WIDTH // COLUMNS * HEIGHT
            panels.append(panel(title, unit, queries, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}))
        top += 1 + -(-len(contents) * WIDTH // COLUMNS) * HEIGHT
    for number, one in enumerate(panels, 1):
        one["id"] = number
    models = {"query": "label_values(seqmtp_rounds_total, model_name)", "refId": "models"}
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "model",
            "type": "query",
            "datasource": SOURCE,
            "query": models,
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        },
    ]
    return {
        "uid": UID,
        "title": "SeqMTP Serve",
        "tags": ["seqmtp"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def panel(title: str, unit: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    """One time series."""
    targets = [
        {"datasource": SOURCE, "expr": query, "legendFormat": legend, "refId": chr(ord("A") + number)}
        for number, (query, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
