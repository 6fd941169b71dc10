"""API keys: several, compared in constant time, taken anew from their file when it changes, each with its own limits.

A file has a key a line: `KEY [name=NAME] [requests=N] [tokens=N]`; N are per minute. Empty lines and `#` begin nothing.
Rotation is editing the file: put the new key in, hand it out, take the old one away. `services/gateway/limits.py` holds
keys to their limits.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqmtp_serve.errors import InvalidField

LOGGER = logging.getLogger("seqmtp.gateway")
LOOK_AGAIN_S = 1.0
FIELD = "api_key_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One caller's. Limits per minute; None: none."""

    secret: bytes
    name: str
    requests: float | None = None
    tokens: float | None = None

    def __repr__(self) -> str:
        return f"Key({self.name})"


def parse_keys(text: str) -> tuple[Key, ...]:
    """The keys of a file. Raises InvalidField, which never quotes a line."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        secret, *options = line.split("#", 1)[0].split() or [""]
        if not secret:
            continue
        given = dict(option.partition("=")[::2] for option in options)
        if set(given) - {"name", "requests", "tokens"}:
            raise InvalidField(f"line {number} of the key file: options are name, requests, tokens", param=FIELD)
        try:
            limits = {name: float(given[name]) for name in ("requests", "tokens") if name in given}
            if any(not limit > 0 for limit in limits.values()):
                raise ValueError
        except ValueError:
            raise InvalidField(f"line {number} of the key file: a limit is a number above 0", param=FIELD) from None
        keys.append(Key(secret=secret.encode(), name=given.get("name", f"key{number}"), **limits))
    if not keys:
        raise InvalidField("the key file holds no key", param=FIELD)
    return tuple(keys)


class KeyRing:
    """The keys in force; without any the API is open. A file that cannot be read any more changes nothing."""

    def __init__(self, single: str | None, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidField for a file that cannot be used from the start."""
        self._file, self._clock = file, clock
        self._seen: tuple[int, int] = (0, 0)
        self._looked_at = clock()
        self.keys: tuple[Key, ...] = ()
        if file is not None:
            self.keys = self._read(file)
        elif single is not None:
            self.keys = (Key(secret=single.encode(), name="key"),)

    def find(self, token: bytes) -> Key | None:
        """The key that this is. Every key is compared, whole, whatever matched before."""
        self._look_again()
        found = None
        for key in self.keys:
            if hmac.compare_digest(token, key.secret):
                found = key
        return found

    def _look_again(self) -> None:
        if self._file is None or self._clock() - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = self._clock()
        try:
            if _stamp(self._file) != self._seen:
                self.keys = self._read(self._file)
                LOGGER.info("%d API key(s) in force, read again", len(self.keys))
        except (OSError, InvalidField) as error:
            LOGGER.error("the API keys stay as they were: %s", error)

    def _read(self, file: Path) -> tuple[Key, ...]:
        try:
            self._seen = _stamp(file)
            return parse_keys(file.read_text())
        except OSError as error:
            raise InvalidField(f"the key file cannot be read: {error.strerror}", param=FIELD) from error


def _stamp(file: Path) -> tuple[int, int]:
    """Changes with the file, also where a mounted Secret is exchanged by a link."""
    found = file.stat()
    return found.st_mtime_ns, found.st_ino
