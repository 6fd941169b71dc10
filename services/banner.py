"""Waiting until the service answers, and saying so once: the address, what is ready, and a request to try."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from time import monotonic
from typing import Any

from services.builtin_models import builtin_model
from services.settings import Settings

POLL_S = 0.2
MTP_GRACE_S = 10.0  # the drafts' side may come up a moment after the target; then the banner says that it is missing
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What `/ready` said."""

    ready: bool
    body: Mapping[str, Any]

    @property
    def mtp_ready(self) -> bool:
        """Whether rounds will have drafts."""
        return bool(self.body.get("mtp", {}).get("ready"))

    @property
    def waiting_for(self) -> str:
        """The first side that is not there yet, in the service's own words."""
        for side in ("store", "target", "mtp"):
            part = self.body.get(side, {})
            if not part.get("ready"):
                return f"{side}: {part.get('detail') or 'not there yet'}"
        return ""


def base_url(settings: Settings) -> str:
    """Where a client on this machine reaches the gateway."""
    host = ANY_ADDRESS.get(settings.gateway.host, settings.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.gateway.port}"


def probe(url: str) -> Readiness:
    """Ask `/ready` once. A gateway that does not answer is not ready."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return Readiness(ready=True, body=json.load(reply))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        return Readiness(ready=False, body=json.loads(text) if text.startswith(b"{") else {})
    except (OSError, ValueError):
        return Readiness(ready=False, body={})


async def until_ready(settings: Settings) -> Readiness:
    """Poll until a request would be served, with drafts if they come soon after. Cancel it to give up."""
    url, said, target_ready_at = base_url(settings), "", None
    wants_mtp = settings.speculation.num_speculative_tokens > 0
    while True:
        answer = await asyncio.to_thread(probe, url)
        if answer.ready:
            target_ready_at = target_ready_at or monotonic()
            if answer.mtp_ready or not wants_mtp or monotonic() - target_ready_at > MTP_GRACE_S:
                return answer
        if answer.body and answer.waiting_for != said:
            said = answer.waiting_for
            say(f"waiting for {said}")
        await asyncio.sleep(POLL_S)


def text(settings: Settings, answer: Readiness, took_s: float) -> str:
    """The banner."""
    url = base_url(settings)
    model = answer.body.get("model") or settings.model.served_name or settings.model.path
    depth = settings.speculation.num_speculative_tokens
    drafts = f"up to {depth} drafts a round" if answer.mtp_ready else f"no drafts ({answer.waiting_for or 'depth 0'})"
    known = builtin_model(settings.model.path)
    about = f"\n{fill(known.about, 100, initial_indent='  ', subsequent_indent='  ')}\n" if known.about else ""
    return f"""
  {model} is ready at {url}  ({took_s:.0f} s; {drafts})
{about}
  chat page   {url}/
  API         {url}/v1   (any OpenAI client)

  {known.curl(url, model)}

  Ctrl-C stops it.
"""


def say(line: str) -> None:
    """One line for the person at the terminal, if it is still there: one that hung up is why a launcher stops."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
