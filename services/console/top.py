"""`seqmtp top`: the live board in a terminal (Textual), or one reading as JSON."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from services.console.api import Api
from services.console.flags import add_service, teach
from services.console.reading import figures

if TYPE_CHECKING:
    from services.console.top_app import TopApp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--json", action="store_true", help="look twice, print what happened between, and end")
    teach(
        parser,
        """
examples:
  seqmtp top                                  the board of the service at 127.0.0.1:8000; q ends it
  seqmtp top --json --interval 5 | jq .expected_progress

what it shows:
  E[R]         mean tokens a verification round yields, over the last ten looks: 1 + accepted / rounds with drafts
  accepted     of the drafts made at each position
  cost         milliseconds by part: main and verify are target passes, mtp the wait for drafts
  workers      who is registered; one that dies is missing once its lease lapsed (three seconds)
""",
    )


def run(args: argparse.Namespace) -> int:
    """Show the board until q, or print one reading."""
    api = Api(args.url, args.api_key)
    first = api.get("/board")  # a service that is not there is said before the screen is taken
    if args.json:
        began = time.monotonic()
        time.sleep(args.interval)
        last = api.get("/board")
        found = figures(first, last, time.monotonic() - began)
        print(
            json.dumps(
                {
                    "model": last["model"],
                    "tokens_per_s": found.tokens_per_s,
                    **asdict(found),
                    "workers": last["workers"],
                }
            )
        )
        return 0
    app(api, args.interval).run()
    return 0


def app(api: Api, interval_s: float) -> TopApp:
    """The board; Textual is imported only for it."""
    from services.console.top_app import TopApp

    return TopApp(api, interval_s)
