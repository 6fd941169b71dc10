"""Rules for the scripts: the head of each file names every key and argument that the body uses."""

from __future__ import annotations

import re

import pytest

from services.store.scripts import ALL, Script


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_the_head_lists_what_the_body_uses(script: Script) -> None:
    lines = script.text.splitlines()
    head = "\n".join(line for line in lines if line.startswith("-- "))
    body = "\n".join(line for line in lines if not line.startswith("--"))
    used = set(re.findall(r"(?:KEYS|ARGV)\[\d\]", body))
    assert used
    assert used == set(re.findall(r"(?:KEYS|ARGV)\[\d\]", head))
    assert head.startswith(f"-- {script.name}: ")
    assert "-- returns" in head


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_no_script_builds_a_key_of_its_own(script: Script) -> None:
    """Every command works on a declared key (or on none): the script may run on any shard of a cluster."""
    for arguments in re.findall(r"redis\.call\('(?:\w+)'(?:, ([^,)]+))?", script.text):
        assert arguments in ("", "state", "rows", "bucket", "KEYS[1]", "KEYS[2]")
