"""A fake target."""

from __future__ import annotations

import asyncio

from services.settings import Settings
from tests.services.ray_roles import worker


async def run(settings: Settings, stop: asyncio.Event) -> None:
    await worker.run("target", settings, stop)
