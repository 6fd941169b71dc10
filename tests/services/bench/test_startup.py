"""`seqmtp bench startup` on a pretended service: what it measures, and what it notices on the way out."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from seqmtp_serve.errors import NotReady
from services.bench import cli
from services.bench.processes import family, pss_mib
from services.bench.startup import measure_startup, serve_command
from services.bench.table import as_table
from services.free_port import free_port

SERVICE = Path(__file__).parent / "pretend_service.py"


async def measured(*manner: str) -> dict[str, Any]:
    port = free_port()
    return await measure_startup([sys.executable, str(SERVICE), str(port), *manner], port, requests=2)


async def test_ready_first_token_memory_and_stop() -> None:
    others = set(psutil.Process().children(recursive=True))  # other tests' servers
    report = await measured()
    assert report["model"] == "pretend"
    assert report["ready_s"] > 0.3
    assert report["first_token_s"] > 0
    assert len(report["processes"]) == 2
    assert report["pss_mib"] == pytest.approx(sum(one["pss_mib"] for one in report["processes"]), abs=0.2)
    assert report["pss_mib"] > 2
    assert report["left_behind"] == []
    assert "left behind: nothing" in as_table(report)
    assert set(psutil.Process().children(recursive=True)) <= others


async def test_a_process_left_behind_is_named_and_then_ended() -> None:
    report = await measured("leave-behind")
    assert len(report["left_behind"]) == 1


async def test_a_service_that_dies_says_why() -> None:
    with pytest.raises(NotReady, match="no weights here"):
        await measured("die")


def test_the_command_is_our_own_serve() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(["startup", "some/model", "--serve-args", "--no-ray", "--cohorts", "2"])
    command = serve_command(args.model, args.serve_args, 8123, "/an/empty/folder")
    assert command[1:5] == ["-m", "services.cli", "serve", "some/model"]
    assert command[5:] == ["--port", "8123", "--data-dir", "/an/empty/folder", "--no-ray", "--cohorts", "2"]


def test_memory_of_this_process_and_of_one_that_is_gone() -> None:
    here = psutil.Process()
    assert family(here)[0].pid == os.getpid()
    assert 5 < pss_mib(here) < here.memory_info().rss / 2**20 + 1
    assert pss_mib(here, proc=Path("/nowhere")) == 0.0
