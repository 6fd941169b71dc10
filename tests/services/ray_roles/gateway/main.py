"""A fake gateway: /ready says which workers the registry knows."""

from __future__ import annotations

from fastapi import FastAPI

from services.registry import Registry
from services.settings import Settings
from services.store.connection import connect


def build_app(settings: Settings) -> FastAPI:
    assert settings.store.url is not None
    registry = Registry(connect(settings.store.url))
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> dict[str, object]:
        peers = [peer for kind in ("target", "proposer", "coordinator") for peer in await registry.list(kind)]
        found = {peer.kind: {"ready": True, "detail": peer.meta["pid"]} for peer in peers}
        return {"ready": True, "model": "fake", "mtp": found.get("proposer", {}), "store": {"ready": True}, **found}

    return app
