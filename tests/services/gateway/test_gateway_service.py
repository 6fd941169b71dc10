"""Routes for operators and for clients that look around first."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.coordinator_metrics import name_of
from services.gateway.fake import STATUS
from services.gateway.routes_service import PAGE
from services.gateway.routes_tokens import MAX_TOKENS
from services.settings import GatewaySettings, ModelSettings, Settings
from tests.services.gateway.live import serving
from tests.services.gateway.world import CHAT, EOS, MESSAGES, TOKENIZER, fake, http, ids

KEYED = Settings(gateway=GatewaySettings(api_key="s3cret"))


async def test_models_say_root_and_context() -> None:
    async with http() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/fake")).json()
        missing = await client.get("/v1/models/some/other")
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["root"], one["max_model_len"], one["object"]) == ("fake", "/models/fake-root", 2048, "model")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_served_name_hides_the_checkpoints_own() -> None:
    settings = Settings(model=ModelSettings(served_name="public"))
    async with http(settings=settings) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "public"
        assert (await client.post(CHAT, json={"messages": MESSAGES, "model": "public"})).json()["model"] == "public"
        assert (await client.post(CHAT, json={"messages": MESSAGES, "model": "fake"})).status_code == 404


READY = replace(STATUS, target_detail="1 group", mtp_detail="1 proposer")


@pytest.mark.parametrize(
    ("statuses", "code", "sides"),
    [
        ([READY], 200, (True, True, True)),
        ([replace(READY, mtp_ready=False, mtp_detail="no proposer")], 200, (True, False, True)),
        ([replace(READY, target_ready=False)], 503, (False, True, True)),
        ([replace(READY, store_ready=False)], 503, (True, True, False)),
        ([replace(READY, coordinator_id="a", target_ready=False), READY], 200, (True, True, True)),
        ([], 503, (False, False, False)),
    ],
)
async def test_ready_tells_target_and_mtp_apart(statuses: list, code: int, sides: tuple[bool, ...]) -> None:  # type: ignore[type-arg]
    async with http(fake(status=statuses)) as client:
        answer = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
    body = answer.json()
    assert answer.status_code == code
    assert body["ready"] == (code == 200)
    assert tuple(body[side]["ready"] for side in ("target", "mtp", "store")) == sides
    assert body["coordinators"] == [status.coordinator_id for status in statuses]


@pytest.mark.parametrize("statuses", [[], [replace(STATUS, max_model_len=0)]])
async def test_before_any_target_was_seen_requests_are_503(statuses: list) -> None:  # type: ignore[type-arg]
    async with http(fake(status=statuses)) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "not_ready"
        assert (await client.get("/v1/models")).status_code == 503


async def test_without_a_proposer_requests_are_served() -> None:
    async with http(fake(status=[replace(STATUS, mtp_ready=False)])) as client:
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with http() as client:
        found = (await client.post("/tokenize", json={"prompt": "hello 😀", "return_token_strs": True})).json()
        assert found["tokens"] == ids("hello 😀")
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
        assert len(found["token_strs"]) == found["count"]
        back = await client.post("/detokenize", json={"tokens": found["tokens"]})
        assert back.json() == {"prompt": "hello 😀"}
        chat = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
        tools = [{"type": "function", "function": {"name": "f"}}]
        told = (await client.post("/tokenize", json={"messages": MESSAGES, "tools": tools})).json()
        assert told["count"] > chat["count"] + 100, "the model is told of tools"
        assert TOKENIZER.decode(chat["tokens"], skip_special_tokens=False).endswith(f"hi{EOS}\n")
        for body in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 3}):
            assert (await client.post("/tokenize", json=body)).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [10**6]})).json()["error"]["param"] == "tokens"
        too_many = await client.post("/detokenize", json={"tokens": [0] * (MAX_TOKENS + 1)})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "tokens")
        assert (await client.post("/detokenize", json={"tokens": ids("a") * MAX_TOKENS})).json() == {
            "prompt": "a" * MAX_TOKENS
        }


OPEN = {"/health", "/ready", "/board", "/version", "/metrics", "/", "/ui/{name}", "/openapi.json"}


async def test_without_a_key_only_what_shows_the_service_is_open() -> None:
    async with http(settings=KEYED) as client:
        described = (await client.get("/openapi.json")).json()["paths"]
        asked = [(path, method) for path, methods in described.items() for method in methods if path not in OPEN]
        assert {"/tokenize", "/detokenize", "/tokenizer_info", CHAT} <= {path for path, _ in asked}
        for path, method in asked:
            assert (await client.request(method, path)).status_code == 401, path


async def test_the_key_is_asked_for_and_must_be_whole() -> None:
    async with http(settings=KEYED) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cret"},
            {"authorization": "Bearer é"},
        ):
            raw = {name: value.encode() for name, value in headers.items()}
            answer = await client.post(CHAT, json={"messages": MESSAGES}, headers=raw)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "x-request-id" in answer.headers
        good = {"authorization": "Bearer s3cret"}
        assert (await client.post(CHAT, json={"messages": MESSAGES}, headers=good)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("//v1/models")).status_code in (401, 404)
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_request_ids_come_back_and_odd_ones_are_replaced() -> None:
    async with http() as client:
        assert (await client.get("/health", headers={"x-request-id": "abc"})).headers["x-request-id"] == "abc"
        for odd in ("", "a b", "x" * 129):
            given = (await client.get("/health", headers={"x-request-id": odd})).headers["x-request-id"]
            assert len(given) == 32


async def test_other_origins_are_not_let_in_unless_named() -> None:
    ask = {"origin": "https://else.where", "access-control-request-method": "POST"}
    async with http() as client:
        assert "access-control-allow-origin" not in (await client.get("/version", headers=ask)).headers
    named = Settings(gateway=GatewaySettings(allowed_origins=("https://else.where",), api_key="k"))
    async with http(settings=named) as client:
        assert (await client.options(CHAT, headers=ask)).headers["access-control-allow-origin"] == "https://else.where"


async def test_a_body_over_the_bound_is_refused() -> None:
    async with http() as client:
        declared = await client.post(CHAT, content=b"x" * (9 * 2**20), headers={"content-type": "application/json"})

        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(9):
                yield b" " * 2**20

        streamed = await client.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    assert (declared.status_code, streamed.status_code) == (400, 400)


async def test_head_is_answered_as_get_is_without_the_body() -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/", "/ui/page.js", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/x"):
            got, headed = await client.get(path), await client.head(path)
            assert (headed.status_code, headed.content) == (got.status_code, b"")
            assert headed.headers.get("content-type") == got.headers.get("content-type")
        for path in (CHAT, f"{CHAT}/chatcmpl-1", "/tokenize"):
            assert (await client.head(path)).status_code == 405


async def test_unknown_routes_and_methods_have_the_error_shape() -> None:
    async with http() as client:
        for method, path, code in (("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
            answer = await client.request(method, path)
            assert answer.status_code == code
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels, but the gateway's. Raises ValueError for text that is not Prometheus'."""
    return {
        (sample.name, tuple(sorted(pair for pair in sample.labels.items() if pair[0] != "gateway"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_have_the_names_that_vllms_tools_read() -> None:
    counters = {"rounds": 13.0, "rounds.accepted": 4.0, "rounds.rejected": 6.0, "rounds.plain": 3.0}
    counters |= {"drafted": 30.0, "accepted": 18.0, "accepted.pos0": 9.0, "accepted.pos1": 6.0}
    statuses = [replace(STATUS, running=2, waiting=1, counters=counters), replace(STATUS, coordinator_id="fake-1")]
    async with http(fake(status=statuses)) as client:
        await client.post(CHAT, json={"messages": MESSAGES})
        await client.post(CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 2})
        scrape = await client.get("/metrics")
    assert scrape.headers["content-type"].startswith("text/plain")
    found = samples(scrape.text)
    engine = (("engine", "fake-0"), ("model_name", "fake"))
    model = (("model_name", "fake"),)
    assert found["vllm:num_requests_running", engine] == 2
    assert found["vllm:num_requests_waiting", engine] == 1
    assert found["vllm:spec_decode_num_drafts_total", engine] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total", engine] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total", engine] == 18
    per_position = [
        found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*engine, ("position", str(position)))]
        for position in (0, 1)
    ]
    assert per_position == [9, 6]
    assert found["seqmtp_rounds_plain_total", engine] == 3
    assert found["vllm:generation_tokens_total", model] == 9
    assert found["vllm:prompt_tokens_total", model] == 40
    assert found["vllm:time_to_first_token_seconds_count", model] == 2
    assert found["vllm:request_time_per_output_token_seconds_count", model] == 2
    assert found["vllm:e2e_request_latency_seconds_count", model] == 2
    assert found["vllm:request_success_total", (("finished_reason", "stop"), *model)] == 1
    assert found["vllm:request_success_total", (("finished_reason", "length"), *model)] == 1


async def test_failures_are_counted_by_code_and_restarts_keep_their_label() -> None:
    from seqmtp_serve.errors import Overloaded

    async with http(fake(error=Overloaded("full"))) as client:
        await client.post(CHAT, json={"messages": MESSAGES})
        found = samples((await client.get("/metrics")).text)
    assert found["seqmtp_request_failures_total", (("code", "overloaded"), ("model_name", "fake"))] == 1
    assert found["seqmtp_open_requests", ()] == 0


def test_any_counter_key_has_a_name_prometheus_takes() -> None:
    assert name_of("replays") == ("seqmtp_replays", None)
    assert name_of("finished.stop") == ("seqmtp_finished_stop", None)
    assert name_of("drafted.pos2") == ("seqmtp_drafted_per_pos", "2")


async def test_the_page_is_whole_loads_nothing_from_elsewhere_and_runs_no_inline_script() -> None:
    async with http() as client:
        page = await client.get("/")
        named = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
        assert {"/ui/icon.svg", "/ui/page.css", "/ui/page.js"} <= named
        named |= {f"/ui/{file.name}" for file in PAGE.glob("*.js")}
        for name in named:
            answer = await client.get(name)
            assert answer.status_code == 200
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in answer.text
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        assert re.findall(r"<script(?![^>]*src=)|<style|style=|\son\w+=", page.text) == []
        scripts = "".join(file.read_text() for file in PAGE.glob("*.js"))
        imported = set(re.findall(r'from "./([\w.-]+)"', scripts))
        assert imported <= {file.name for file in PAGE.glob("*.js")}
        wanted = set(re.findall(r'\bat\("([\w-]+)"\)', scripts))
        assert wanted <= set(re.findall(r'id="([\w-]+)"', page.text))
        for outside in ("/ui/../app.py", "/ui/..%2fapp.py", "/ui/nothing.js", "/ui/index.html"):
            assert (await client.get(outside)).status_code == 404
