"""`seqmtp complete`: go on with a text."""

from __future__ import annotations

import argparse
import json
import sys

from services.console.api import Api
from services.console.flags import add_sampling, add_service, coloured, sampling, teach
from services.console.origins import Numbers, paint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to go on with; default: what comes on standard input")
    add_service(parser)
    add_sampling(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object: text, numbers, rows")
    teach(
        parser,
        """
examples:
  seqmtp complete "The capital of Norway is" --temperature 0
  seqmtp complete "Once upon a time" --seed 7 --depth 0      ordinary decoding: the same text as at any depth
  seqmtp complete --json < story.txt > answer.json           its rows: seqmtp timeline answer.json
""",
    )


def run(args: argparse.Namespace) -> int:
    """Print the continuation as it comes; the numbers go to standard error."""
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    numbers = Numbers()
    for chunk in Api(args.url, args.api_key).stream("/v1/completions", {**sampling(args), "prompt": prompt}):
        text = "".join(choice["text"] for choice in chunk["choices"])
        numbers.text += text
        row = chunk.get("seqmtp")
        if row:
            numbers.add(row)
        if not args.json:
            print(paint(row) if row and coloured(args) else text, end="", flush=True)
    if args.json:
        print(json.dumps({"text": numbers.text, **numbers.summary(), "rows": numbers.rows}))
    else:
        print()
        print(numbers.line(), file=sys.stderr)
    return 0
