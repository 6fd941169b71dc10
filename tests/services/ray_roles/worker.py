"""A worker that only registers its process id. `SEQMTP_FAKE_<ROLE>=incomplete`: its checkpoint cannot be served."""

from __future__ import annotations

import asyncio
import os
from uuid import uuid4

from seqmtp_serve.errors import MtpIncomplete, TargetIncomplete
from services.registry import Registry
from services.settings import Settings
from services.store.connection import connect


async def run(role: str, settings: Settings, stop: asyncio.Event) -> None:
    if os.environ.get(f"SEQMTP_FAKE_{role.upper()}") == "incomplete":
        raise (MtpIncomplete if role == "proposer" else TargetIncomplete)(f"{role} says why it cannot run")
    assert settings.store.url is not None
    redis = connect(settings.store.url)
    async with Registry(redis).announce(role, uuid4().hex, "127.0.0.1:1", lambda: {"pid": str(os.getpid())}):
        await stop.wait()
    await redis.aclose()
