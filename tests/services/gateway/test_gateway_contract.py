"""schemathesis reads the published OpenAPI document and holds the server to it: no 5xx, nothing undocumented."""

from __future__ import annotations

from functools import lru_cache

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from tests.services.gateway.world import CHAT, MESSAGES, app_over, fake

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
COORDINATOR = fake()
schema = schemathesis.openapi.from_asgi("/openapi.json", app_over(COORDINATOR))


@lru_cache
def known_answer() -> str:
    """The id of an answer that exists; asked for at another gateway, whose event loop is its own."""
    headers = {"Idempotency-Key": "known"}
    answer: str = (
        TestClient(app_over(COORDINATOR)).post(CHAT, json={"messages": MESSAGES}, headers=headers).json()["id"]
    )
    return answer


@schema.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_server_does_what_its_document_says(case: Case) -> None:
    """Every other case names the answer and the model that exist: random ones never get beyond 404."""
    if "id" in case.path_parameters and len(case.path_parameters["id"]) % 2:
        case.path_parameters["id"] = known_answer()
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2 == 0:
        case.body["model"] = "fake"
    case.call_and_validate(checks=CHECKS)
