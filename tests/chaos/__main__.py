"""`make chaos`: simulation, negative controls, the rig over every role and point, one report.

    python -m tests.chaos --out results/chaos            writes chaos-report.json and chaos-report.html

Ends with 1 when anything was violated, a control was not caught, or a fault found nobody at its point.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.bench.machine import describe_machine
from tests.chaos.rig.commit_latency import commit_latencies_ms
from tests.chaos.rig.faults import Fault, every_pair, fail_overs, partitions
from tests.chaos.rig.namespaces import why_not
from tests.chaos.rig.page import as_page
from tests.chaos.rig.report import as_json
from tests.chaos.rig.run import Outcome, run
from tests.chaos.simulation.controls import CONTROLS
from tests.chaos.simulation.sweep import sweep

MODEL = "random llama, 2 layers, hidden 32, vocabulary 64, with a random MTP module (tests/services/tiny_model.py)"


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--out", type=Path, default=Path("results/chaos"))
    parser.add_argument("--streams", type=int, default=9, help="streams through each fault")
    parser.add_argument("--disconnects", type=int, default=500)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--controls", type=int, default=200, help="schedules of each negative control")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", nargs="*", default=[], help="roles whose faults are left out")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no fault begins after so many")
    parser.add_argument("--note", default="", help="what a reader must know about the machine at that time")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    first = options.seed * options.schedules
    simulated = sweep(range(first, first + options.schedules))
    print(f"{simulated.num_schedules} schedules, {len(simulated.failures)} with violations", flush=True)
    controls = {name: sweep(range(options.controls), parts) for name, parts in CONTROLS.items()}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        commit_ms = asyncio.run(commit_latencies_ms(Path(folder) / "commits", 500))

        def campaign(name: str, faults: Sequence[Fault], num_disconnects: int = 0, **more: Any) -> Outcome:
            chosen = [fault for fault in faults if fault.role not in options.without]
            numbers = {"num_streams": options.streams, "num_disconnects": num_disconnects, "seed": options.seed}
            return asyncio.run(run(Path(folder) / name, chosen, **numbers, **more))

        outcome = campaign("loopback", every_pair(), options.disconnects, budget_s=60 * options.minutes)
        classes = () if "store" in options.without else ("C1", "C3")
        failed_over = {name: campaign(name, fail_overs(), durability=name, standby=True) for name in classes}
        apart = why_not() or campaign("apart", partitions(), apart=True)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "model": MODEL,
        "processes": "two of each role, one store, all on loopback",
        "seed": str(options.seed),
    }
    about |= {"left out": f"faults of {', '.join(options.without)}"} if options.without else {}
    faults = [fault for fault in every_pair() if fault.role not in options.without]
    if len(outcome.results) < len(faults):
        about["faults not reached in time"] = str(len(faults) - len(outcome.results))
    about |= {"note": options.note} if options.note else {}
    report = as_json(outcome, simulated, controls, commit_ms, about, failed_over, apart)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "chaos-report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    (options.out / "chaos-report.html").write_text(as_page(report))
    uncaught = [name for name, result in controls.items() if not result.failures]
    if isinstance(apart, str):
        print(f"no partitions of the network: {apart}")
    runs = (outcome, *failed_over.values(), *(() if isinstance(apart, str) else (apart,)))
    missed = [result.fault for each in runs for result in each.results if result.missed]
    violations = [violation for each in runs for violation in each.violations]
    for line in (*violations, *simulated.failures.items(), *uncaught, *missed):
        print(line)
    print(f"report: {options.out}/chaos-report.html")
    return 1 if violations or simulated.failures or uncaught or missed else 0


if __name__ == "__main__":
    sys.exit(main())
