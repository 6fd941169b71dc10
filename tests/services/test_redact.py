"""Secrets are not in logs, in tracebacks, in `config show`, or in the settings' own repr."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

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


def test_what_files_hold_is_known_too(tmp_path: Path) -> None:
    password, keys = tmp_path / "password", tmp_path / "keys"
    password.write_text("fr0m-a-file\n")
    keys.write_text("# callers\nk3y-one name=chat\n\nk3y-two\n")
    tree = Settings(store=StoreSettings(password_file=password), gateway=GatewaySettings(api_key_file=keys))
    assert tree.secrets() == ("fr0m-a-file", "k3y-one", "k3y-two")
    keys.unlink()
    assert tree.secrets() == ("fr0m-a-file",)


BREAKS = """
import asyncio, sys
from services.entry import set_up_process
from services.gateway.main import Server, http_config
from tests.services.test_redact import TREE

async def app(scope, receive, send):
    raise ValueError("AUTH failed with st0re-pass")

async def main():
    config = http_config(app)
    config.port = 0
    server = Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
    assert b" 500 " in await reader.read()
    await server.shutdown()

set_up_process("gateway", TREE)
asyncio.run(main())
"""


def test_the_http_server_logs_through_the_same_formatter() -> None:
    done = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "gateway ERROR uvicorn.error: Exception in ASGI application" in done.stderr
    assert "AUTH failed with ****" in done.stderr
    assert "st0re-pass" not in done.stdout + done.stderr
