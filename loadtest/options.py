"""The flags a load test adds to Locust's own, and what they make of a request."""

from __future__ import annotations

import platform
from argparse import Namespace
from datetime import UTC, datetime
from typing import Any

from loadtest.prompts import BUILT_IN


def add_options(parser: Any) -> None:
    """Add the flags to Locust's parser; they also appear in its web form."""
    group = parser.add_argument_group("SeqMTP load")
    add = group.add_argument
    add("--dataset", default=str(BUILT_IN), help='JSON lines of {"prompt"} or {"category", "turns"}')
    add("--prompt-chars", type=int, default=4000, help="cut each user turn to this many characters; 0: never")
    add("--turns", type=int, default=1, help="turns of a conversation to ask, at most")
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--model", default="", help="default: the first one the server lists")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--sampling-seed", type=int, default=None, help="send this seed with every request")
    add("--ignore-eos", action="store_true", help="answers of exactly --max-tokens")
    add("--depth", type=int, default=None, help="most drafts per round; 0: no speculation; default: the server's")
    add("--rate", type=float, default=0.0, help="requests per second, Poisson, over all users; 0: as fast as answered")
    add("--load-seed", type=int, default=0, help="order of prompts and arrivals")
    add("--step-time", type=float, default=20.0, help="seconds per level of a load shape")
    add("--slo", default="", help='objectives in ms, such as "ttft:1000 tpot:80 e2el:20000"')
    add("--min-goodput", type=float, default=0.0, help="exit with 1 if a smaller share of requests met the objectives")
    add("--result-file", default="", help="write the result as JSON here")


def request_body(options: Namespace, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The JSON body of one streamed request."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.endpoint == "chat":
        body["messages"] = messages
    else:
        body["prompt"] = "\n\n".join(message["content"] for message in messages)
    if options.sampling_seed is not None:
        body["seed"] = options.sampling_seed
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.depth is not None:
        body["speculation"] = {"enabled": options.depth > 0, "max_depth": options.depth}
    return body


def settings_of(options: Namespace, host: str, num_processes: int) -> dict[str, Any]:
    """What was asked for, to stand in the result beside what was measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.endpoint,
        "host": host,
        "client_machine": f"{platform.machine()} {platform.system()}",
        "model_id": options.model or "the server's first",
        "dataset": options.dataset,
        "max_concurrency": options.num_users,
        "num_processes": num_processes,
        "request_rate": options.rate or "inf",
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "max_depth": options.depth,
        "slo": options.slo,
    }
