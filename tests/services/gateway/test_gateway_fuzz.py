"""Whatever JSON is sent: a documented status, one error shape, never a 500, and no reader left open."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.body import GenerationBody
from services.gateway.refused import REFUSED
from tests.services.gateway.world import CHAT, app_over, fake

FIELDS = sorted({*GenerationBody.model_fields, *REFUSED, "max_completion_tokens", "anything"})
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, 2, 0.5, 1.0])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
EXTRA = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", 3])},
    optional={"content": JSON, "name": JSON, "tool_calls": JSON},
)
MESSAGES = JSON | st.lists(MESSAGE | JSON, max_size=3)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(subject=MESSAGES | JSON, extra=EXTRA)
async def test_any_json_gets_a_documented_answer(path: str, subject: Any, extra: dict[str, Any]) -> None:
    field = {CHAT: "messages", "/v1/completions": "prompt", "/tokenize": "prompt", "/detokenize": "tokens"}[path]
    coordinator = fake()
    transport = httpx.ASGITransport(app_over(coordinator), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        body = json.dumps({field: subject, **extra})
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 3000
    assert coordinator.open_streams == 0
