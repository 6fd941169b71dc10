"""Flags that the terminal commands share, and help with examples under it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from services.console.api import DEFAULT_URL, KEY_VARIABLE


def teach(parser: argparse.ArgumentParser, text: str) -> None:
    """Put a text with examples under the flags, as it is written."""
    parser.epilog = text.strip("\n")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_service(parser: argparse.ArgumentParser) -> None:
    """Which service to talk to."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the service (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the variable {KEY_VARIABLE}")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How to answer."""
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text, at any depth")
    parser.add_argument("--depth", type=int, metavar="K", help="drafts of a round at most; 0: ordinary decoding")
    parser.add_argument("--max-tokens", type=int, default=400, metavar="N", help="of an answer at most (default: 400)")
    parser.add_argument("--plain", action="store_true", help="no colours")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The part of a request body that those flags ask for; every row is traced."""
    body: dict[str, Any] = {"max_tokens": args.max_tokens, "speculation": {"trace": True}}
    if args.depth is not None:
        body["speculation"]["max_depth"] = args.depth
    return body | {name: value for name in ("temperature", "seed") if (value := getattr(args, name)) is not None}


def coloured(args: argparse.Namespace) -> bool:
    """Whether to colour what is printed."""
    return not args.plain and sys.stdout.isatty()
