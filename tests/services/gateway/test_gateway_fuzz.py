"""Whatever JSON is sent: a documented status, one error shape, never a 500, and no reader left open."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.chat_body import ChatBody
from services.gateway.refused import REFUSED
from services.gateway.responses_body import ResponsesBody
from tests.services.gateway.world import CHAT, app_over, fake

FIELDS = sorted({*ChatBody.model_fields, *ResponsesBody.model_fields, *REFUSED, "anything"} - {"messages", "input"})
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, 2, 0.5, 1.0])
TEXT = st.text(st.characters(), max_size=8)  # halves of surrogate pairs with it, which JSON can spell
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "name": st.just("f"),
            "parameters": JSON,
            "strict": st.booleans(),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "!"])}, optional={"parameters": JSON, "strict": st.booleans()}
            ),
        },
    ),
    max_size=2,
)
CHOICES = JSON | st.sampled_from(["required", "auto", {"type": "function", "function": {"name": "f"}}])
EXTRA = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3) | st.fixed_dictionaries(
    {"tools": TOOLS}, optional={"tool_choice": CHOICES, "parallel_tool_calls": JSON, "text": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", 3])},
    optional={"content": JSON, "name": JSON, "tool_calls": JSON},
)
MESSAGES = JSON | st.lists(MESSAGE | JSON, max_size=3)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
@settings(max_examples=60)
@given(subject=MESSAGES | JSON, extra=EXTRA)
async def test_any_json_gets_a_documented_answer(path: str, subject: Any, extra: dict[str, Any]) -> None:
    field = {CHAT: "messages", "/detokenize": "tokens", "/v1/responses": "input"}.get(path, "prompt")
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
