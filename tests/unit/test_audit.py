"""`make audit` never takes a package that was not looked up for a clean one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.audit import FOUND, UNKNOWN, main, verdict

CLEAN: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (2)"}
BAD = {"name": "c", "version": "3", "vulns": [{"id": "PYSEC-1", "fix_versions": ["4"], "aliases": []}]}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([CLEAN], 0, "1 of 1 packages looked up, 0 advisories"),
        ([CLEAN, BAD], FOUND, "c 3: PYSEC-1, mended in 4"),
        ([CLEAN, SKIPPED], UNKNOWN, "1 could not be, so this is no clean audit"),
        ([SKIPPED, BAD], FOUND, "1 of 2 packages looked up"),
        ([], UNKNOWN, "0 of 0"),
    ],
)
def test_the_verdict(packages: list[dict[str, Any]], code: int, said: str) -> None:
    found, words = verdict({"dependencies": packages})
    assert found == code
    assert said in words


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (f"echo '{json.dumps({'dependencies': [CLEAN], 'fixes': []})}'", 0, "1 of 1"),
        ("echo 'ConnectionError: no route to host' >&2; exit 1", UNKNOWN, "no route to host"),
    ],
    ids=["answered", "no network"],
)
def test_the_programs_are_asked_and_the_bill_is_written_first(
    program: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in (("pip-audit", program), ("cyclonedx-py", 'for last; do :; done; echo "{}" > "$last"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert main(tmp_path, tmp_path / "constraints.txt", tmp_path / "made" / "sbom.json") == code
    assert (tmp_path / "made" / "sbom.json").exists()
    assert said in capsys.readouterr().out
