"""`seqmtp chat`: a conversation in the terminal, each token in the colour of its origin."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from seqmtp_serve.errors import SeqMTPError
from services.console.api import Api
from services.console.flags import add_sampling, add_service, coloured, sampling, teach
from services.console.launch import running_service
from services.console.origins import Numbers, dim, legend, paint

HELP = "/new begins anew · /seed N · /depth K · /temperature T · /origins switches colours · /quit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="start a service for this model, and stop it at the end"
    )
    add_service(parser)
    add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--json", action="store_true", help="one JSON object an answer, questions read line by line")
    teach(
        parser,
        """
examples:
  seqmtp chat                                 talk to the service at 127.0.0.1:8000
  seqmtp chat smollm2-135m-instruct           start one, talk to it, stop it
  echo "Name three rivers." | seqmtp chat --json --seed 7 | jq .text

in the chat:
  green a draft that was accepted, orange the model's correction, blue a bonus token. The numbers under an answer:
  E[R] is the mean of tokens a verification round yields. Type /help for the commands.
""",
    )


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends or /quit. Raises what keeps it from starting."""
    with running_service(args.model, args.url) as url:
        Chat(Api(url, args.api_key), args).loop()
    return 0


class Chat:
    """One conversation and its settings."""

    def __init__(self, api: Api, args: argparse.Namespace) -> None:
        self._api, self._args = api, args
        self._fields = sampling(args)
        self._colours = coloured(args)
        self._system = [{"role": "system", "content": args.system}] if args.system else []
        self._turns: list[dict[str, str]] = list(self._system)

    def loop(self) -> None:
        """Read, answer, print."""
        if sys.stdin.isatty() and not self._args.json:
            print(f"{legend() if self._colours else ''}\n{HELP}\n")
        for line in self._questions():
            if line.startswith("/"):
                if not self._command(*line[1:].split(maxsplit=1)):
                    return
            elif line:
                self._answer(line)

    def _questions(self) -> Iterator[str]:
        while True:
            try:
                yield (input("> ") if sys.stdin.isatty() else input()).strip()
            except EOFError:
                return

    def _command(self, name: str = "", value: str = "") -> bool:
        """Obey; False to leave."""
        if name in ("quit", "exit", "q"):
            return False
        if name == "new":
            self._turns = list(self._system)
        elif name == "origins":
            self._colours = not self._colours
        elif name in ("seed", "depth", "temperature"):
            with contextlib.suppress(ValueError):
                number: float | None = None if not value else float(value) if name == "temperature" else int(value)
                fields: dict[str, Any] = self._fields["speculation"] if name == "depth" else self._fields
                fields["max_depth" if name == "depth" else name] = number
        else:
            print(HELP)
        return True

    def _answer(self, question: str) -> None:
        self._turns.append({"role": "user", "content": question})
        numbers = Numbers()
        try:
            for chunk in self._api.stream("/v1/chat/completions", {**self._fields, "messages": self._turns}):
                self._show(chunk, numbers)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except SeqMTPError as error:
            if not sys.stdin.isatty():
                raise
            print(f"seqmtp: {error}", file=sys.stderr)
        if not numbers.text:
            self._turns.pop()
            return
        self._turns.append({"role": "assistant", "content": numbers.text})
        if self._args.json:
            print(json.dumps({"text": numbers.text, **numbers.summary(), "rows": numbers.rows}), flush=True)
        else:
            print(f"\n{dim(numbers.line()) if self._colours else numbers.line()}\n")

    def _show(self, chunk: dict[str, Any], numbers: Numbers) -> None:
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        numbers.text += text
        row = chunk.get("seqmtp")
        if row:
            numbers.add(row)
        if not self._args.json:
            print(paint(row) if row and self._colours else text, end="", flush=True)
