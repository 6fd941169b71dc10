"""The published OpenAPI document says what the server does: its statuses, its error shape, its streams."""

from __future__ import annotations

import json

import pytest

from tests.services.gateway.world import CHAT, app_over, fake, http

DOCUMENT = app_over(fake()).openapi()


def test_no_route_claims_a_422() -> None:
    assert "422" not in json.dumps(DOCUMENT)
    assert "ValidationError" not in json.dumps(DOCUMENT)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_generation_documents_every_status_and_the_stream(path: str) -> None:
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    assert set(responses) == {"200", "204", "400", "401", "404", "409", "429", "500", "503"}
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    for status in ("400", "401", "404", "409", "429", "500", "503"):
        schema = responses[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}


def test_every_reference_resolves() -> None:
    names = set(DOCUMENT["components"]["schemas"])
    used = {part.split('"')[0] for part in json.dumps(DOCUMENT).split("#/components/schemas/")[1:]}
    assert used <= names


async def test_the_document_is_served() -> None:
    async with http() as client:
        assert (await client.get("/openapi.json")).json() == json.loads(json.dumps(DOCUMENT))
        assert (await client.get("/docs")).status_code == 404  # FastAPI's page would load scripts from elsewhere
