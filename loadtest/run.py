"""`make load`: Locust headless against a running server; CSV, JSON and HTML in one folder.

    python -m loadtest.run --host http://127.0.0.1:8000 --users 8 --run-time 60s --processes 2 --slo "ttft:1000"

Every other flag goes to Locust (its own and those of `options.py`). The exit code is Locust's: 0 only if no request
failed and enough answers met the objectives.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from loadtest import plots
from loadtest.report import csv_of, html_of
from loadtest.server_counters import acceptance_length, read_counters

HERE = Path(__file__).resolve().parent
SHAPES = ("steps", "ramp", "spike", "soak")


def main(arguments: list[str] | None = None) -> int:
    """Run, complete the HTML report, and say where things are."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.run", description="All other flags are handed to Locust.", allow_abbrev=False
    )
    parser.add_argument("--host", default="http://127.0.0.1:8000")
    parser.add_argument("--results", type=Path, default=Path("results/load"), help="folder to write to")
    parser.add_argument("--model", default="", help="default: the first one the server lists")
    parser.add_argument("--users", "-u", type=int, default=4)
    parser.add_argument("--spawn-rate", "-r", type=float, default=100.0, help="users started per second")
    parser.add_argument("--run-time", "-t", default="60s")
    parser.add_argument("--processes", type=int, default=1, help="worker processes to share the users between")
    parser.add_argument("--shape", choices=SHAPES, help="how users come, up to --users")
    options, passed_on = parser.parse_known_args(arguments)
    try:
        options.model = options.model or first_model(options.host)
    except (OSError, ValueError, LookupError) as error:
        print(
            f"No model found at {options.host}/v1/models ({error}). Is the server running? `make serve`",
            file=sys.stderr,
        )
        return 2
    options.results.mkdir(parents=True, exist_ok=True)
    result_file = options.results / "load.json"
    result_file.unlink(missing_ok=True)
    before = read_counters(options.host)
    code = subprocess.run([*locust_command(options), *passed_on], check=False).returncode
    report = options.results / "load.html"
    if result_file.exists():
        result = json.loads(result_file.read_text(encoding="utf-8"))
        result["e_r"]["metrics"] = acceptance_length(before, read_counters(options.host))
        result_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (options.results / "load.csv").write_text(csv_of(result), encoding="utf-8")
        if report.exists():
            add_section(report, html_of(result, pictures_of(result)))
    print(f"Results: {result_file}, {report}, {options.results}/load*.csv", file=sys.stderr)
    return code


def pictures_of(result: dict[str, Any]) -> str:
    """SVG for the report; none without an answer, or where matplotlib is not installed."""
    if not result["completed"]:
        return ""
    try:
        one = {"this run": result}
        return plots.over_time(result) + plots.latencies(one) + plots.speculation(one)
    except ImportError:
        print("No plots: pip install -e '.[load]' has matplotlib.", file=sys.stderr)
        return ""


def first_model(host: str) -> str:
    """The id of the first model listed. Raises OSError, ValueError or LookupError."""
    with urllib.request.urlopen(f"{host}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def locust_command(options: argparse.Namespace) -> list[str]:
    """The Locust call for these options. A shape decides the run's length itself."""
    files = [HERE / "locustfile.py", *([HERE / "shapes" / f"{options.shape}.py"] if options.shape else [])]
    command = [sys.executable, "-m", "locust", "--headless", "--only-summary", "--stop-timeout", "60"]
    command += ["-f", ",".join(str(file) for file in files), "--host", options.host]
    command += ["--users", str(options.users), "--spawn-rate", str(options.spawn_rate)]
    command += ["--csv-full-history"] if options.shape else ["--run-time", options.run_time]
    if options.processes > 1:
        command += ["--processes", str(options.processes)]
    command += ["--csv", str(options.results / "load"), "--html", str(options.results / "load.html")]
    return [*command, "--model", options.model, "--result-file", str(options.results / "load.json")]


def add_section(report: Path, section: str) -> None:
    """Put an HTML section at the end of a report's body."""
    page = report.read_text(encoding="utf-8")
    head, body_end, tail = page.rpartition("</body>")
    report.write_text(head + section + body_end + tail if body_end else page + section, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
