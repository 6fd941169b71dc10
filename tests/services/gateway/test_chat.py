"""Chat answers, whole and streamed: their shape, their order, and what they count."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway.cursor import parse_cursor
from tests.services.gateway.world import CHAT, EOS_ID, MESSAGES, fake, http, ids, script, streamed, strictly


async def test_a_whole_answer_has_openais_shape_and_counts_the_end_token() -> None:
    async with http() as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "model": "fake"})
    strictly(ChatCompletion, answer.text)
    body = answer.json()
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    num_output = len(ids("h") + ids("ello") + ids(" world")) + 1
    assert body["usage"]["completion_tokens"] == num_output
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + num_output


async def test_usage_says_how_much_of_the_prompt_was_found_in_a_cache() -> None:
    async with http(fake(cached=7)) as client:
        whole = (await client.post(CHAT, json={"messages": MESSAGES, "n": 2})).json()["usage"]
        stream = await streamed(client, stream_options={"include_usage": True})
    for usage in (whole, stream[-2][1]["usage"]):
        assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


async def test_a_stream_is_role_rows_finish_usage_done() -> None:
    async with http() as client:
        found = await streamed(client, stream_options={"include_usage": True})
    chunks = [data for _, data in found[:-1]]
    for chunk in chunks:
        strictly(ChatCompletionChunk, json.dumps(chunk))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "ello"},
        {"content": " world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert found[-1][1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_event_ids_name_the_answer_and_how_far_it_is() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        found = await streamed(client, stream_options={"include_usage": True})
    cursors = [parse_cursor(name) for name, _ in found]
    assert {cursor.job_id for cursor in cursors} == {coordinator.requests[0].request_id}
    places = [cursor.positions[0] for cursor in cursors]
    assert [(place.version, place.num_tokens, place.closed) for place in places if place] == [
        (0, 0, False),
        (1, 1, False),
        (2, 5, False),
        (3, 7, False),
        *[(3, 7, True)] * 3,
    ]
    assert [cursor.tail for cursor in cursors] == [""] * 5 + ["usage", "done"]
    assert [str(cursor) for cursor in cursors] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found[:-1]] == [0, 1, 2, 3, 3, 3]


async def test_no_usage_is_sent_unless_asked_for() -> None:
    async with http() as client:
        found = await streamed(client)
    assert all("usage" not in data for _, data in found[:-1])
    assert found[-2][1]["choices"][0]["finish_reason"] == "stop"


async def test_continuous_usage_counts_up_with_the_rows() -> None:
    async with http() as client:
        found = await streamed(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [data["usage"]["completion_tokens"] for _, data in found[:-1]]
    assert counts == [1, 1, 5, 7, 7, 7]


async def test_speculation_metrics_have_vllms_shape() -> None:
    async with http() as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES})
        found = await streamed(client, stream_options={"include_usage": True})
        several = await client.post(CHAT, json={"messages": MESSAGES, "n": 2})
    spec = answer.json()["metrics"]["speculative_decoding"]
    assert spec == {
        "mean_acceptance_length": 1 + 4 / 2,  # the bootstrap row is no round
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [0, 1, 0, 1],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_tokens": 3,
        "per_step_accepted": [3, 1],
        "per_step_drafted": [3, 3],
    }
    assert found[-2][1]["metrics"]["speculative_decoding"] == spec
    assert several.json()["metrics"]["speculative_decoding"] is None


async def test_choices_are_requests_of_their_own_that_differ_in_choice_only() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "n": 3, "seed": -1})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
    assert sorted(request.choice for request in coordinator.requests) == [0, 1, 2]
    assert len({request.request_id for request in coordinator.requests}) == 3
    assert {request.params.seed for request in coordinator.requests} == {2**64 - 1}
    assert all(request.params.seeded for request in coordinator.requests)
    assert answer.json()["usage"]["completion_tokens"] == 21
    assert answer.json()["usage"]["prompt_tokens"] == len(coordinator.requests[0].prompt_ids)


async def test_streams_of_several_choices_interleave_and_each_is_whole() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        found = await streamed(client, n=2)
    for index in (0, 1):
        mine = [(name, data) for name, data in found[:-1] if data["choices"][0]["index"] == index]
        assert "".join(data["choices"][0]["delta"].get("content", "") for _, data in mine) == "hello world"
        assert [data["sequence_number"] for _, data in mine] == [0, 1, 2, 3, 3]
        places = [parse_cursor(name).positions[index] for name, _ in mine]
        assert [place.version for place in places if place] == [0, 1, 2, 3, 3]


async def test_a_trace_says_where_each_token_came_from() -> None:
    async with http() as client:
        found = await streamed(client, speculation={"trace": True})
        plain = await streamed(client)
    traces = [data["seqmtp"] for _, data in found[:-1] if "seqmtp" in data]
    assert [trace["version"] for trace in traces] == [1, 2, 3]
    assert [trace["origins"] for trace in traces] == ["b", "aaan", "ac"]
    assert traces[-1]["tokens"][-1] == EOS_ID
    assert "".join(piece for trace in traces for piece in trace["pieces"]) == "hello world"
    assert all("seqmtp" not in data for _, data in plain[:-1])


async def test_depth_is_as_asked_at_most_the_servers_and_zero_when_off() -> None:
    coordinator = fake()
    cases = [(None, 3), ({"enabled": False}, 0), ({"max_depth": 1}, 1), ({"max_depth": 9}, 3), ({"enabled": True}, 3)]
    async with http(coordinator) as client:
        for asked, _ in cases:
            assert (await client.post(CHAT, json={"messages": MESSAGES, "speculation": asked})).status_code == 200
    assert [request.params.max_depth for request in coordinator.requests] == [depth for _, depth in cases]


@pytest.mark.covers(110)
async def test_a_row_cut_by_the_budget_is_length_and_counted_exactly() -> None:
    coordinator = fake(script("ab", "cdef", "ghij", eos=False))
    async with http(coordinator) as client:
        for budget in (1, 2, 3, 5, 8):
            body = (await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": budget})).json()
            assert body["choices"][0]["message"]["content"] == "abcdefghij"[:budget]
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == budget


async def test_newer_name_of_the_budget_wins() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 4})
        await client.post(CHAT, json={"messages": MESSAGES})
    limited, free = (request.params.max_tokens for request in coordinator.requests)
    assert limited == 4
    assert free == 2048 - len(coordinator.requests[1].prompt_ids)


async def test_content_parts_are_joined_and_developer_is_system() -> None:
    coordinator = fake()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]
    async with http(coordinator) as client:
        assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert list(coordinator.requests[0].prompt_ids) == ids(expected)


async def test_labels_reach_the_record_and_an_unknown_field_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = fake()
    fields = {"user": "u", "metadata": {"a": "b"}, "request_id": "mine", "store": True, "frobnicate": 1, "priority": -1}
    headers = {"x-request-id": "from-the-proxy", "traceparent": "00-1-2-01"}
    async with http(coordinator) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, **fields}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "from-the-proxy"
    labels = {name: value for name, value in coordinator.meta[0].items() if name not in ("answer", "body")}
    assert labels == {
        "http_request_id": "from-the-proxy",
        "caller_request_id": "mine",
        "traceparent": "00-1-2-01",
        "user": "u",
        "priority": "-1",
        "metadata": '{"a": "b"}',
    }
    assert coordinator.requests[0].request_id.startswith("chatcmpl-")  # never the caller's: it would join another's
    assert [record.getMessage() for record in caplog.records if record.name == "seqmtp.gateway"] == [
        "1 unknown request field(s) ignored: 'frobnicate'"
    ]


async def test_a_prediction_reaches_the_target_and_its_fate_is_in_the_usage() -> None:
    coordinator = fake(predicted=True)
    asked = {"messages": MESSAGES, "prediction": {"type": "content", "content": [{"type": "text", "text": "hello"}]}}
    async with http(coordinator) as client:
        whole = await client.post(CHAT, json=asked)
        off = (await client.post(CHAT, json={**asked, "speculation": {"enabled": False}})).json()
        plain = (await client.post(CHAT, json={"messages": MESSAGES})).json()
    strictly(ChatCompletion, whole.text)
    usage = whole.json()["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    assert usage["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert whole.json()["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert list(coordinator.requests[0].prediction_ids) == ids("hello")
    assert coordinator.requests[1].prediction_ids == ()
    assert "completion_tokens_details" not in off["usage"]
    assert "completion_tokens_details" not in plain["usage"]


async def test_a_templates_variables_come_with_the_request() -> None:
    coordinator = fake()
    async with http(coordinator) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "chat_template_kwargs": {"thinking": True}})
    assert answer.status_code == 200
