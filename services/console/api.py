"""A running service as the terminal commands see it: JSON, and streams that outlive a broken connection. Blocking.

Standard library only: `seqmtp chat` starts at once.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

from seqmtp_serve.errors import InvalidField, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 120.0
GIVE_UP_S = 30.0  # without a connection
RETRY_S = 0.3
BROKEN = (OSError, http.client.HTTPException)  # URLError and timeouts are OSErrors


class Api:
    """One service. A refusal is raised as InvalidField with the service's own words, its absence as Unavailable."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._key = key if key is not None else os.environ.get(KEY_VARIABLE)

    def get(self, path: str, timeout_s: float = 10.0) -> Any:
        """The JSON at `path`."""
        with self._open(path, timeout_s=timeout_s) as reply:
            return json.load(reply)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that `path` answers to a body."""
        with self._open(path, body) as reply:
            return json.load(reply)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer, each once. A connection that breaks is taken up after the last event."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        answer = last_event = ""
        broken_at = 0.0
        while True:
            try:
                if last_event:
                    reply = self._open(f"{path}/{answer}", headers={"Last-Event-ID": last_event})
                else:
                    reply = self._open(path, {**body, "stream": True}, headers)
                with reply:
                    if reply.status == 204:
                        return
                    for event_id, data in _events(reply):
                        broken_at, last_event = 0.0, event_id or last_event
                        if data == "[DONE]":
                            return
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise InvalidField(str(chunk["error"].get("message")))
                        answer = chunk["id"]
                        yield chunk
                raise http.client.IncompleteRead(b"")
            except BROKEN as error:
                broken_at = broken_at or time.monotonic()
                if not last_event or time.monotonic() - broken_at > GIVE_UP_S:
                    raise Unavailable(f"The connection to {self.url} was lost: {error}") from error
                time.sleep(RETRY_S)
            except Unavailable:  # refused while going on with a stream: another gateway may be on its way
                if not broken_at or time.monotonic() - broken_at > GIVE_UP_S:
                    raise
                time.sleep(RETRY_S)

    def _open(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=sent)
            return urllib.request.urlopen(request, timeout=timeout_s)
        except (ValueError, http.client.InvalidURL) as error:
            raise InvalidField(f"{self.url} is no address of a service: {error}", param="url") from error
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except urllib.error.URLError as error:
            raise Unavailable(
                f"No service answers at {self.url}: {error.reason}. Start one with: seqmtp serve"
            ) from error

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        with error:
            text = error.read().decode(errors="replace")
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{self.url} answered {error.code}."
        return Unavailable(message) if error.code >= 500 else InvalidField(message)


def _events(reply: Any) -> Iterator[tuple[str, str]]:
    """(id, data) of each whole server-sent event."""
    event_id = data = ""
    for line in reply:
        text = line.decode().rstrip("\r\n")
        if not text:
            if data:
                yield event_id, data
            event_id = data = ""
        elif text.startswith("id: "):
            event_id = text[4:]
        elif text.startswith("data: "):
            data = text[6:]
