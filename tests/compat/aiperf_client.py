"""NVIDIA's aiperf: its spec-decode section, read from each answer, and its scrape of /metrics, beside our figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ours import OUTPUT_TOKENS, REQUESTS, URL, answer, compare

with tempfile.TemporaryDirectory() as folder:
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", "scripted", "--url", URL]
    command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--ui", "none"]
    command += ["--tokenizer", os.environ["SEQMTP_TOKENIZER"], "--isl", "20", "--osl", OUTPUT_TOKENS]
    command += ["--request-count", REQUESTS, "--concurrency", "2", "--output-artifact-dir", folder]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    theirs = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    scraped = json.loads((Path(folder) / "server_metrics_export.json").read_text())["metrics"]

assert "Spec Decode" in run.stdout, "aiperf printed no spec-decode section"
whole = answer()
ours = whole["metrics"]["speculative_decoding"]
counter = {
    name: sum(series["stats"]["total"] for series in scraped[f"vllm:spec_decode_num_{name}"]["series"])
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
}
histogram = {str(accepted): REQUESTS * rounds for accepted, rounds in enumerate(ours["acceptance_histogram"]) if rounds}
print(f"\n  {'figure':<44} {'aiperf':>22} {'ours':>22}")
compare(
    {
        "requests": (theirs["request_count"]["avg"], float(REQUESTS)),
        "output tokens": (theirs["total_output_tokens"]["avg"], REQUESTS * float(whole["usage"]["completion_tokens"])),
        "Acceptance Length": (theirs["spec_decode_acceptance_length"]["avg"], ours["mean_acceptance_length"]),
        "Draft Acceptance Rate, %": (
            theirs["spec_decode_draft_acceptance_rate"]["avg"],
            100 * ours["draft_acceptance_rate"],
        ),
        "Spec Decode Steps": (theirs["total_spec_decode_steps"]["avg"], REQUESTS * float(ours["num_spec_steps"])),
        "accepted drafts per step": (theirs["pooled_spec_decode_acceptance_histogram"], histogram),
        "/metrics: drafts": (counter["drafts"], REQUESTS * float(ours["num_spec_steps"])),
        "/metrics: draft tokens": (counter["draft_tokens"], REQUESTS * float(ours["num_draft_tokens"])),
        "/metrics: accepted tokens": (counter["accepted_tokens"], REQUESTS * float(ours["num_accepted_draft_tokens"])),
        "/metrics: accepted, all positions": (counter["accepted_tokens_per_pos"], counter["accepted_tokens"]),
    }
)
