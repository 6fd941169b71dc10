"""guidellm: it passes our acceptance on as it came, and prints tokens a stream iteration: the delivered E[R]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ours import OUTPUT_TOKENS, REQUESTS, URL, answer, compare

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={URL},model=scripted", "--profile", "kind=synchronous"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['SEQMTP_TOKENIZER']}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={report}", "--output", "kind=console"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=offline, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]

whole = answer()
ours = whole["metrics"]["speculative_decoding"]
requests = benchmark["requests"]["successful"]
first = requests[0]
tokens = whole["usage"]["completion_tokens"]
print(f"\n  {'figure':<44} {'guidellm':>22} {'ours':>22}")
compare(
    {
        "requests": (len(requests), REQUESTS),
        "output tokens": (sum(each["output_tokens"] for each in requests), REQUESTS * tokens),
        "mean acceptance length, of each request": (
            {each["response_metrics"]["speculative_decoding"]["mean_acceptance_length"] for each in requests},
            {ours["mean_acceptance_length"]},
        ),
        "Output Tok Per Stream Iter (delivered E[R])": (
            first["iter_tokens_per_iteration"],
            (tokens - 1) / ours["num_spec_steps"],
        ),
    }
)
assert all(each["response_metrics"]["speculative_decoding"] == ours for each in requests)
