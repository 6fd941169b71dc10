"""`seqmtp timeline`: a picture of an answer's rounds, one lane a process, as SVG; its depth decisions, made again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqmtp_serve.errors import InvalidField
from seqmtp_serve.frontier.depth_choice import DepthChoice, floors, num_copies, replay
from seqmtp_serve.frontier.scheduler import NO_PAGES
from seqmtp_serve.speculation.draft_chances import num_worth
from services.console.api import Api
from services.console.flags import add_service, teach
from services.console.timeline_picture import draw

Row = Mapping[str, Any]
LEDGER = "request.ledger"
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        nargs="?",
        help="a file (JSON with rows, a ledger or a saved event stream) or an answer's id; default: stdin",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="SVG", help="default: standard output")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="how many are drawn (default: 24)")
    parser.add_argument("--json", action="store_true", help="the rows that would be drawn, with when each began")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="draw nothing: decide each depth of a ledger again from its measurements; 1 if one comes out differently",
    )
    add_service(parser)
    teach(
        parser,
        """
examples:
  seqmtp complete --json "Once upon a time" --seed 7 | seqmtp timeline -o rounds.svg
  curl -N localhost:8000/v1/completions -d '{"prompt":"Hi","stream":true,"speculation":{"trace":true}}' \\
       -H 'content-type: application/json' > stream.txt && seqmtp timeline stream.txt -o rounds.svg
  seqmtp timeline chatcmpl-7f… -o rounds.svg        the ledger of an answer that the service at --url still has
  seqmtp timeline chatcmpl-7f… --replay             were its depths what the measurements said?

what it shows:
  Each round's measured parts: the wait for drafts, packing, the target's pass, selection; what the coordinator saw
  beyond them is sync. Widths are measured; the order within a round is the one they run in. The proposer's own time
  overlaps the target's and is drawn where it must have ended at the latest.
""",
    )


def run(args: argparse.Namespace) -> int:
    """Draw, print the rows, or decide again. Raises InvalidField for an input without rows, or without decisions."""
    text = _read(args)
    if args.replay:
        return _replay(text, args.json)
    rows = [row for row in rows_of(text) if row.get("timings_ms")]
    if not rows:
        raise InvalidField(
            "There are no rows with timings here: ask with --json, with 'speculation': {'trace': true}, or by an id.",
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


def _read(args: argparse.Namespace) -> str:
    """The text of the file or of standard input, or the ledger of an answer that has the id."""
    if args.trace is None:
        return sys.stdin.read()
    path = Path(args.trace)
    if path.is_file():
        return path.read_text()
    if not args.trace.startswith(ANSWER_PREFIXES):
        begin = ", ".join(ANSWER_PREFIXES)
        raise InvalidField(f"There is no file '{args.trace}', nor is this an answer's id ({begin}…).", param="trace")
    return json.dumps(Api(args.url, args.api_key).get(f"/v1/requests/{args.trace}/ledger"))


def _replay(text: str, as_json: bool) -> int:
    decisions = list(decisions_of(text))
    if not decisions:
        raise InvalidField(
            "No decision was weighed here: the input is no ledger, or the service runs with a fixed depth "
            "(see --depth-policy auto).",
            param="trace",
        )
    differ = sorted({*replay(decisions), *_rows_that_differ(text)})
    if as_json:
        print(json.dumps({"decisions": len(decisions), "differ": differ}))
    else:
        print(
            f"{len(decisions)} decisions, {len(differ)} of which come out differently when made again{_which(differ)}"
        )
    return 1 if differ else 0


def _which(differ: Sequence[int]) -> str:
    return f": {', '.join(map(str, differ))}" if differ else ""


def _rows_that_differ(text: str) -> Iterator[int]:
    """Decisions after which a round would have another number of copied drafts, or leave out others, now.

    Free pages may have been short, and a grammar may have taken fewer.
    """
    first = 0
    for choice in _choices(text):
        decisions = [DepthChoice.from_json(entry) for entry in choice.get("decisions", ())]
        for row in choice.get("rounds", ()):
            if row["decision"] is None:
                continue
            decided = decisions[row["decision"]]
            if row.get("copy_survivals") and row["reason"] != NO_PAGES:
                if num_copies(decided, row["place"], row["copy_survivals"]) != row["depth"]:
                    yield first + row["decision"]
            elif row.get("draft_chances") and row["drafts_from"] == "mtp":
                floor, _ = floors(decided, row["place"])
                if floor != row["floor"] or row["drafted"] > num_worth(row["draft_chances"], floor):
                    yield first + row["decision"]
        first += len(decisions)


def decisions_of(text: str) -> Iterator[Mapping[str, Any]]:
    """The weighed decisions of a ledger. Pure."""
    for choice in _choices(text):
        yield from choice.get("decisions", ())


def _choices(text: str) -> list[Mapping[str, Any]]:
    try:
        choices: list[Mapping[str, Any]] = json.loads(text)["choices"]
    except (ValueError, KeyError, TypeError):
        return []
    return choices


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
        for name in ("rows", "seqmtp", "rounds", *(["choices"] if found.get("object") == LEDGER else [])):
            if name in found:
                yield from _rows_in(found[name])
