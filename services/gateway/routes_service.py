"""For operators: /health, /ready, /version, /metrics, and the chat page at /."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from seqmtp_serve.errors import SeqMTPError
from services.gateway.coordinators import CoordinatorStatus
from services.gateway.gateway import Gateway
from services.gateway.live_board import LiveBoard, Part, live_board
from services.gateway.scrape import Scrape

BOARD_AGE_S = 0.2
PAGE = Path(__file__).parent / "ui"
PAGE_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Readiness(BaseModel):
    """Target and MTP apart: without MTP the service answers, at depth 0."""

    ready: bool
    model: str | None
    target: Part
    mtp: Part
    store: Part
    coordinators: list[str]
    draining: bool = False


class Version(BaseModel):
    """The release."""

    version: str


def readiness(statuses: list[CoordinatorStatus], name: str | None) -> Readiness:
    """One verdict over all coordinators: each side is ready if it is for one that is. Pure."""
    best = max(statuses, key=lambda status: (status.ready, status.mtp_ready), default=None)
    if best is None:
        away = Part(ready=False, detail="no coordinator answers")
        return Readiness(ready=False, model=None, target=away, mtp=away, store=away, coordinators=[])
    return Readiness(
        ready=best.ready,
        model=name,
        target=Part(ready=best.target_ready, detail=best.target_detail),
        mtp=Part(ready=best.mtp_ready, detail=best.mtp_detail),
        store=Part(ready=best.store_ready, detail=best.store_detail),
        coordinators=[status.coordinator_id for status in statuses],
    )


def service_routes(gateway: Gateway, scrape: Scrape) -> APIRouter:
    """The routes over one gateway and its metrics."""
    routes = APIRouter(tags=["service"])

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        """200 with an empty body while this process serves."""
        return Response()

    @routes.get("/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not ready."}})
    async def ready() -> JSONResponse:
        """Whether a request would be served now; target and MTP apart."""
        statuses = list(await gateway.board.statuses(max_age_s=0.2))
        try:
            name = gateway.board.name_of(await gateway.board.serving())
        except SeqMTPError:
            name = None
        verdict = readiness(statuses, name)
        if gateway.drain.begun:
            verdict = verdict.model_copy(update={"ready": False, "draining": True})
        return JSONResponse(verdict.model_dump(), 200 if verdict.ready else 503)

    @routes.get("/board")
    async def board() -> LiveBoard:
        """What the live board shows: each coordinator's totals, and who is registered."""
        statuses = await gateway.board.statuses(max_age_s=BOARD_AGE_S)
        name = gateway.board.name_of(statuses[0]) if statuses else None
        return live_board(name or None, statuses, await gateway.coordinator.workers())

    @routes.get("/version")
    async def version() -> Version:
        """The release that runs."""
        return Version(version=gateway.version)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text of the whole service: gateways, coordinators, targets, proposers, the store."""
        return Response(await scrape.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @routes.get("/ui/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        file = PAGE / name
        if file.suffix not in PAGE_TYPES or file.parent != PAGE or not file.is_file():
            return Response(status_code=404)
        return FileResponse(file, media_type=PAGE_TYPES[file.suffix], headers=PAGE_HEADERS)

    return routes
