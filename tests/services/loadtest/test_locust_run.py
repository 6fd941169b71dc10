"""Real Locust runs, headless, two worker processes, against a server whose E[R] is known."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest

from loadtest import compare
from loadtest.run import main
from tests.services.loadtest.mock_server import ACCEPTED, DEPTH, FIRST_S, NUM_TOKENS, ROUND_S, mock_server


def run_load(tmp_path, url, *flags):
    command = [sys.executable, "-m", "loadtest.run", "--host", url, "--results", str(tmp_path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    result = json.loads((tmp_path / "load.json").read_text())
    return done, result


@pytest.mark.slow
@pytest.mark.covers(95, 103)
def test_two_workers_add_up_to_the_truth(tmp_path):
    with mock_server() as url:
        done, result = run_load(
            tmp_path, url, "-u", "4", "-t", "4s", "--processes", "2", "--slo", "ttft:60000", "--min-goodput", "0.99"
        )
    assert done.returncode == 0, done.stderr
    answers, rounds = result["completed"], len(ACCEPTED)
    assert answers > 10
    assert result["num_processes"] == 2
    assert result["model_id"] == "mock"
    assert result["total_output_tokens"] == answers * NUM_TOKENS
    assert result["spec_decode_num_drafts"] == answers * rounds
    assert result["e_r"] == pytest.approx(
        {
            "verified": 1 + sum(ACCEPTED) / rounds,
            "delivered": (NUM_TOKENS - 1) / rounds,
            "seen": (NUM_TOKENS - 1) / rounds,
            "metrics": 1 + sum(ACCEPTED) / rounds,
        }
    )
    assert result["spec_decode_acceptance_rate"] == pytest.approx(sum(ACCEPTED) / rounds / DEPTH)
    assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert sum(each["answers"] for each in result["categories"].values()) == answers
    assert result["p50_ttft_ms"] >= FIRST_S * 1e3
    assert result["mean_e2el_ms"] - result["mean_ttft_ms"] > ROUND_S * 1e3  # chunks were read as they came
    assert result["mean_itl_ms"] / result["mean_tpot_ms"] == pytest.approx((NUM_TOKENS - 1) / rounds, rel=1e-6)
    assert result["goodput_ratio"] == 1.0
    with (tmp_path / "load_stats.csv").open() as file:
        rows = {row["Name"]: int(row["Request Count"]) for row in csv.DictReader(file)}
    assert rows["ttft"] == answers  # Locust's own table saw every worker too
    html = (tmp_path / "load.html").read_text()
    assert "<h2>Speculation</h2>" in html
    assert html.count("<svg") == 3
    assert sum(row["answers"] for row in result["timeline"]) == answers
    assert f"{result['e_r']['verified']:.2f}" in html


@pytest.mark.slow
def test_failed_streams_and_missed_objectives_are_counted_and_end_with_1(tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "FAIL"}\n{"prompt": "fine"}\n')
    with mock_server() as url:
        done, result = run_load(
            tmp_path, url, "-u", "1", "-t", "3s", "--dataset", str(dataset), "--slo", "ttft:1", "--rate", "20"
        )
    assert done.returncode == 1
    assert result["failed"] > 0
    assert result["completed"] > 0
    assert result["goodput_ratio"] == 0.0
    assert result["p99_lag_ms"] > 0.0
    assert "error event: internal_error: asked for" in done.stdout + done.stderr


@pytest.mark.slow
def test_two_servers_under_the_same_load(tmp_path):
    with mock_server() as one, mock_server() as other:
        flags = ["-u", "2", "-t", "2s", "--results", str(tmp_path), "--a-name", "plain", "--b-name", "other"]
        assert compare.main(["--a", one, "--b", other, *flags]) == 0
    compared = json.loads((tmp_path / "compare.json").read_text())
    rows = {label: values for label, *values in compared["rows"]}
    expected = 1 + sum(ACCEPTED) / len(ACCEPTED)
    assert rows["E[R], verified"] == pytest.approx([expected, expected, 1.0])
    assert rows["failed"] == [0, 0, None]
    assert rows["output tokens/s"][2] > 0
    page = (tmp_path / "compare.html").read_text()
    assert page.count("<svg") == 3
    assert "http" not in page.replace(one, "").replace(other, "").replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("https://matplotlib.org", "").replace("http://creativecommons.org", ""), "nothing from elsewhere"


def test_a_server_that_is_not_there_is_said_so(tmp_path, capsys):
    assert main(["--host", "http://127.0.0.1:9", "--results", str(tmp_path)]) == 2
    assert "Is the server running?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_spike_over_two_workers_has_its_recovery_in_every_report(tmp_path):
    with mock_server() as url:
        done, result = run_load(tmp_path, url, "-u", "20", "--shape", "spike", "--step-time", "3", "--processes", "2")
    assert done.returncode == 0, done.stderr
    found = result["recovery"]
    assert 2 < found["spike_s"] < 5
    assert found["during"]["requests"] > found["before"]["requests"] > 10
    assert sum(found[phase]["requests"] for phase in ("before", "during", "after")) <= result["completed"]
    assert found["backlog_s"] < found["spike_s"], "the last first token, not the end of the run"
    with (tmp_path / "load.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["recovery.backlog_s"]) == found["backlog_s"]
    assert "<h3>Recovery</h3>" in (tmp_path / "load.html").read_text()
