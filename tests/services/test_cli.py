"""The `seqmtp` command: quick to answer, one line for a typed error."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from seqmtp_serve import __version__
from services.cli import COMMANDS, main

HEAVY = ("torch", "ray", "numpy", "fastapi", "grpc", "pydantic", "redis")


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("words", [["--help"], ["version"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    script = f"""
import contextlib, sys
from services.cli import main
with contextlib.suppress(SystemExit):
    main({words!r})
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.rstrip().endswith("[]")


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """It and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_word_of_a_command_is_explained(name: str) -> None:
    parser = argparse.ArgumentParser(prog=name)
    import_module(COMMANDS[name][0]).add_arguments(parser)
    mute = [
        f"{each.prog} {action.dest}"
        for each in parsers(parser)
        for action in each._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert mute == []


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("server") == 2
    assert "server" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["version"])
    assert __version__ in capsys.readouterr().out


def test_config_shows_the_tree_and_its_schema(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQMTP_GATEWAY__API_KEY", "hunter2")
    assert exit_code("config", "show", "--port", "9001") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["gateway"]["port"] == 9001
    assert "hunter2" not in printed
    assert exit_code("config", "schema") == 0
    assert "engine" in json.loads(capsys.readouterr().out)["properties"]


def test_a_bad_setting_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "show", "--port", "eighty") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "gateway.port" in error


def test_a_model_that_is_not_there_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "no-such-model") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [printed.err.strip()]
    assert "no-such-model" in printed.err


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "services.cli", "config", "schema"]
    with os.fdopen(writing, "w") as gone:
        answer = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stderr) == (141, "")
