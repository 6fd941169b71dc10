"""GET /v1/requests/{id}/ledger: what each round of an answer cost and earned, and why it had its depth."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from seqmtp_serve.errors import RequestNotFound
from services.gateway.gateway import Gateway
from services.gateway.openapi import problems
from services.gateway.request_ledger import Ledger, ledger_of


def ledger_routes(gateway: Gateway) -> APIRouter:
    """The route over one gateway."""
    routes = APIRouter(tags=["answers"])

    @routes.get("/v1/requests/{id}/ledger", responses=problems(400, 401, 404, 500, 503))
    async def ledger(id: str) -> Ledger:
        """The rounds of an answer, running or over, for as long as its record is kept."""
        try:
            records = await gateway.find(id)
        except RequestNotFound:
            problem = f"There is no answer '{id[:128]}' here, or its replay window has passed."
            raise RequestNotFound(problem, param="id") from None
        ids = [record.request.request_id for record in records]
        return ledger_of(id, await asyncio.gather(*map(gateway.coordinator.ledger, ids)))

    return routes
