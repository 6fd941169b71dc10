"""Secrets stay out of logs: whatever a library or a traceback says, known secrets and passwords in URLs are starred."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

STARS = "**********"
_PATTERNS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@"), rf"\1:{STARS}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",]+"), rf"\1 {STARS}"),
)


def redacted(text: str, secrets: Sequence[str] = ()) -> str:
    """The text without `secrets`, passwords in URLs, and bearer tokens."""
    for secret in secrets:
        text = text.replace(secret, STARS)
    for pattern, stars in _PATTERNS:
        text = pattern.sub(stars, text)
    return text


class RedactingFormatter(logging.Formatter):
    """Formats as its parent does, message and traceback, and takes the secrets out."""

    def __init__(self, form: str, secrets: Sequence[str]) -> None:
        super().__init__(form)
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record), self._secrets)
