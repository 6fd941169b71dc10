"""`seqmtp timeline`: a picture of an answer's rounds, one lane a process, as SVG."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqmtp_serve.errors import InvalidField
from services.console.flags import teach
from services.console.timeline_picture import draw

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", type=Path, help="JSON with rows, or a saved event stream; default: stdin")
    parser.add_argument("-o", "--output", type=Path, metavar="SVG", help="default: standard output")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="how many are drawn (default: 24)")
    parser.add_argument("--json", action="store_true", help="the rows that would be drawn, with when each began")
    teach(
        parser,
        """
examples:
  seqmtp complete --json "Once upon a time" --seed 7 | seqmtp timeline -o rounds.svg
  curl -N localhost:8000/v1/completions -d '{"prompt":"Hi","stream":true,"speculation":{"trace":true}}' \\
       -H 'content-type: application/json' > stream.txt && seqmtp timeline stream.txt -o rounds.svg

what it shows:
  Each round's measured parts: the wait for drafts, packing, the target's pass, selection; what the coordinator saw
  beyond them is sync. Widths are measured; the order within a round is the one they run in. The proposer's own time
  overlaps the target's and is drawn where it must have ended at the latest.
""",
    )


def run(args: argparse.Namespace) -> int:
    """Draw, or print the rows. Raises InvalidField for an input without rows."""
    text = sys.stdin.read() if args.trace is None else args.trace.read_text()
    rows = [row for row in rows_of(text) if row.get("timings_ms")]
    if not rows:
        raise InvalidField(
            "There are no rows with timings here: ask with --json, or with 'speculation': {'trace': true}.",
            param="trace",
        )
    rows = rows[: args.rounds]
    if args.json:
        print(json.dumps([{"began_ms": began, **row} for began, row in zip(starts(rows), rows, strict=True)]))
        return 0
    picture = draw(rows, starts(rows))
    if args.output is None:
        print(picture)
    else:
        args.output.write_text(picture)
    return 0


def starts(rows: Sequence[Row]) -> list[float]:
    """When each round began: rounds of one request follow each other. Milliseconds from the first. Pure."""
    found = [0.0]
    for row in rows[:-1]:
        found.append(found[-1] + row["timings_ms"]["step"])
    return found


def rows_of(text: str) -> Iterator[Row]:
    """Rows of `--json` answers (one, or one a line), a list of rows, or an event stream with a trace. Pure."""
    for line in [text, *text.splitlines()]:
        try:
            found = json.loads(line.removeprefix("data: "))
        except ValueError:
            continue
        yield from _rows_in(found)
        if line is text:
            return


def _rows_in(found: Any) -> Iterator[Row]:
    if isinstance(found, list):
        for entry in found:
            yield from _rows_in(entry)
    elif isinstance(found, dict):
        if "origins" in found and "drafted" in found:
            yield found
        for name in ("rows", "seqmtp"):
            if name in found:
                yield from _rows_in(found[name])
