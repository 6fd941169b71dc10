"""The system behind a URL, through its public API: a streamed chat completion, and the coordinators' counters."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from seqmtp_serve.errors import InternalError, NotReady
from services.bench.backend import SEED, Depth, Generation
from services.bench.figures import COST_NAMES, HIDDEN, OVERLAP
from services.gateway.scrape import FRESH_S

TIMEOUT_S = 300.0
MAX_DEPTH = 8
# The counters a bench reads, as `/metrics` spells them: dots become underscores, a position becomes a label.
_PLAIN = ("outputs", "rounds", "progress.verified", *(f"cost_ms.{name}" for name in COST_NAMES), *OVERLAP, *HIDDEN)
_STEPS = tuple(f"steps.depth{depth}" for depth in range(MAX_DEPTH + 1))
_SPELLED = {f"seqmtp_{name.replace('.', '_')}_total": name for name in (*_PLAIN, *_STEPS)}
_POSITIONS = {"seqmtp_drafted_per_pos_total": "drafted", "seqmtp_accepted_per_pos_total": "accepted"}
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(?P<position>\d+)"')


class UrlBackend:
    """Talks plain HTTP in threads: one connection a request. `connect` first.

    `numerics` is the end of `system_fingerprint` (`seqmtp-<version>-<numerics>`): known after the first reply.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._address = (parts.hostname or "127.0.0.1", parts.port)
        self.model, self.numerics, self.is_local = "", "unknown", False

    async def connect(self) -> None:
        """Ask which model is served. Raises NotReady."""
        self.model = json.loads(await asyncio.to_thread(self._get, "/v1/models"))["data"][0]["id"]

    async def ready(self) -> None:
        """Raises NotReady until `/ready` says 200."""
        await asyncio.to_thread(self._get, "/ready")

    async def generate(self, prompt: str, *, depth: Depth, max_tokens: int, temperature: float = 0.0) -> Generation:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "seed": SEED,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if depth != "auto":  # else the service does as it was started to
            body["speculation"] = {"enabled": depth > 0, "max_depth": depth}
        return await asyncio.to_thread(self._stream, body)

    async def counters(self) -> Mapping[str, float]:
        """As of now: what a gateway read before and still shows has gone stale by then."""
        await asyncio.sleep(1.5 * FRESH_S)
        return parse_counters(await asyncio.to_thread(self._get, "/metrics"))

    def _stream(self, body: dict[str, Any]) -> Generation:
        connection = self._connection(*self._address, timeout=TIMEOUT_S)
        started, first_s, pieces, usage = perf_counter(), 0.0, list[str](), dict[str, Any]()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise InternalError(f"the server answered {answer.status}: {answer.read(500).decode(errors='replace')}")
            while line := answer.readline():
                event = line.removeprefix(b"data: ").strip()
                if event == line.strip() or event == b"[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise InternalError(f"the stream ended with {chunk['error']}")
                self.numerics = str(chunk.get("system_fingerprint") or self.numerics).rpartition("-")[2]
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if piece and not first_s:
                    first_s = perf_counter() - started
                pieces.append(piece)
                usage = chunk.get("usage") or usage
        except (OSError, HTTPException) as fault:
            raise NotReady(f"the server went away: {fault}") from fault
        finally:
            connection.close()
        return Generation(
            text="".join(pieces),
            num_tokens=usage.get("completion_tokens", 0),
            first_token_s=first_s,
            total_s=perf_counter() - started,
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_cached=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        )

    def _get(self, path: str) -> str:
        connection = self._connection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, HTTPException) as fault:
            raise NotReady(f"no server at {self._address[0]}:{self._address[1]}: {fault}") from fault
        finally:
            connection.close()
        if answer.status != 200:
            raise NotReady(f"{path} answered {answer.status}: {text[:200]}")
        return text


def parse_counters(text: str) -> dict[str, float]:
    """The ledger's counters out of Prometheus text, summed over coordinators."""
    totals: defaultdict[str, float] = defaultdict(float)
    for found in filter(None, map(_SAMPLE.fullmatch, text.splitlines())):
        name, labels = found["name"], found["labels"] or ""
        if name in _SPELLED:
            totals[_SPELLED[name]] += float(found["value"])
        elif name in _POSITIONS and (position := _POSITION.search(labels)):
            totals[f"{_POSITIONS[name]}.pos{position['position']}"] += float(found["value"])
    return dict(totals)
