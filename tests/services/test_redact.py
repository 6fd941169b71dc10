"""Secrets are not in logs, in tracebacks, in `config show`, or in the settings' own repr."""

from __future__ import annotations

import io
import json
import logging

from services.flags import shown
from services.redact import RedactingFormatter, redacted
from services.settings import GatewaySettings, Settings, StoreSettings

SECRETS = ("st0re-pass", "ap1-key")
TREE = Settings(
    store=StoreSettings(url="redis://user:in-the-url@store:6379/0", password=SECRETS[0]),
    gateway=GatewaySettings(api_key=SECRETS[1]),
)


def test_what_a_log_says_has_no_secret_in_it() -> None:
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(RedactingFormatter("%(message)s", TREE.secrets()))
    log = logging.Logger("test")
    log.addHandler(handler)
    try:
        raise ValueError(f"AUTH failed with {SECRETS[0]}")
    except ValueError:
        log.exception("cannot reach %s as %s", TREE.store.url, SECRETS[1])
    log.info("Authorization: Bearer abc.def-123")
    written = sink.getvalue()
    assert not any(secret in written for secret in (*SECRETS, "in-the-url", "abc.def-123"))
    assert "ValueError: AUTH failed" in written
    assert "redis://user:" in written


def test_settings_do_not_show_them() -> None:
    assert TREE.secrets() == SECRETS
    for text in (repr(TREE), str(TREE), json.dumps(shown(TREE))):
        assert not any(secret in text for secret in SECRETS)
    assert "in-the-url" not in json.dumps(shown(TREE))
    assert all(secret in TREE.to_json() for secret in SECRETS), "a child process needs them"


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("http://127.0.0.1:8000/v1", "redis://store:6379/0", "unix:///tmp/a@b", "a basic", "12:30@noon"):
        assert redacted(text) == text
