"""Thousands of malformed bodies and frames: a documented refusal each, no 5xx, no crash, and the next caller is served.

Mutations are drawn from a seed, so a failure can be had again. None of them may be remembered: memory is measured once
half of them have warmed every cache. `SEQMTP_FUZZ=1000` runs fewer of them, and then does not look at resident memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import starlette.requests
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from seqmtp_serve.ports import FeedRows, StepPlan, Verify
from seqmtp_serve.request import Ref, Request, SamplingParams
from seqmtp_serve.tasks import end_tasks
from services.gateway.guard import MAX_BODY_DEPTH, MAX_VALUES, fullness_problem, nesting_problem
from services.proposer.servicer import ProposerServicer
from services.proposer.worker import PassLoop
from services.rpc import channel
from services.rpc.convert import to_wire
from services.rpc.wire import coordinator as messages
from services.rpc.wire import proposer, proposer_rpc, target, target_rpc
from services.store.embedded import EmbeddedValkey
from tests.services.coordinators import a_request, nodes
from tests.services.gateway.world import CHAT, MESSAGES, app_over, fake, http
from tests.services.growth import Growth
from tests.services.test_target_link import Group

NUM_BODIES = NUM_FRAMES = int(os.environ.get("SEQMTP_FUZZ", "10000"))  # frames: of each kind
MTP = mtp_tensors(target_tensors(TINY), TINY, draft_vocab_size=80)
SEED = (
    b'{"messages": [{"role": "user", "content": "h\\u00e9 \\"q\\""}], "n": 1, "stop": ["a", {"b": [1e3, -0.5, null]}]}'
)
TOKENS = [
    b"[" * 70,
    b'{"a":' * 70,
    b"\xff\xfe",
    b"\x00",
    b"1e999",
    b"-",
    b"NaN",
    b'"\\ud800"',
    b"\\u",
    b"}",
    b"true",
    b"9" * 400,
]


INTEGERS = [0, 1, 7, 2**31 - 1]
FLOATS = [0.0, -1.0, 1.5, 1e300, float("inf"), float("nan")]
NASTY = {
    FieldDescriptor.CPPTYPE_INT32: [*INTEGERS, -1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [*INTEGERS, -1, 2**63 - 1],
    FieldDescriptor.CPPTYPE_UINT32: [*INTEGERS, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [*INTEGERS, 2**64 - 1],
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 99],
    FieldDescriptor.CPPTYPE_STRING: [b"", b"x", b"\xff" * 31, b"y" * 300],
}  # protobuf counts bytes and strings as one
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


def mutated(draws: random.Random, seed: bytes) -> bytes:
    """The seed with a few bytes flipped, cut, doubled, or replaced by something nasty."""
    body = bytearray(seed)
    for _ in range(draws.randint(1, 4)):
        at = draws.randrange(len(body) + 1)
        match draws.randrange(5):
            case 0:
                body[at : at + 1] = bytes([draws.randrange(256)])
            case 1:
                del body[at : at + draws.randint(1, 20)]
            case 2:
                body[at:at] = body[at : at + draws.randint(1, 20)]
            case 3:
                body[at : at + draws.randint(0, 3)] = draws.choice(TOKENS)
            case 4:
                body = body[:at] or body
    return bytes(body)


async def test_malformed_bodies_are_refused_and_nothing_stays_open() -> None:
    draws, coordinator_, seen = random.Random(2026), fake(), dict[int, int]()
    transport = httpx.ASGITransport(app_over(coordinator_), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(NUM_BODIES):
            if number == NUM_BODIES // 2:
                growth = Growth()
            body = mutated(draws, SEED)
            path = draws.choice((CHAT, CHAT, "/v1/completions", "/tokenize", "/detokenize"))
            kind = draws.choice(("application/json", "application/json", "text/plain", "", "multipart/form-data"))
            answer = await client.post(path, content=body, headers={"content-type": kind})
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (number, path, body, answer.text)
            assert len(answer.content) < 4000, (number, len(answer.content))
            assert answer.status_code == 200 or "message" in answer.json()["error"]
        growth.check(NUM_BODIES - NUM_BODIES // 2, "bodies")
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200
    assert coordinator_.open_streams == 0
    assert seen[400] > NUM_BODIES / 2, seen


@pytest.mark.parametrize("body", [b"[" * 10_000, b'{"messages":' * 5000, b'{"a":[' * 100_000, b"[]," * 200_000])
async def test_deep_nesting_is_refused_before_it_is_parsed(body: bytes) -> None:
    transport = httpx.ASGITransport(app_over(fake()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "nested" in answer.json()["error"]["message"] or "brackets" in answer.json()["error"]["message"]


def test_nesting_is_counted_outside_strings_only() -> None:
    deep = "[" * MAX_BODY_DEPTH + "]" * MAX_BODY_DEPTH
    brackets = json.dumps({"content": '[{"' * 500 + "\\"}).encode()
    assert nesting_problem([deep.encode()]) is None
    assert nesting_problem([f"[{deep}]".encode()]) is not None
    assert nesting_problem([brackets[:700], brackets[700:]]) is None, "wherever the body is cut"
    assert nesting_problem([b'{"a": [' * 40, b"1"]) is not None


@pytest.mark.parametrize("form", ['{"prompt": [%s1]}', '{"prompt": [[1], [%s1]]}', '{"max_tokens": 1, "stop": [%s2]}'])
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    parsed = list[object]()
    parse = starlette.requests.Request.json

    async def counted(request: starlette.requests.Request) -> Any:
        parsed.append(request)
        return await parse(request)

    monkeypatch.setattr(starlette.requests.Request, "json", counted)
    kind = {"content-type": "application/json"}
    async with http() as client:
        answer = await client.post("/v1/completions", content=form % ("1," * MAX_VALUES), headers=kind)
        assert not parsed
        await client.post("/v1/completions", content=form % "1,", headers=kind)
        assert parsed
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"The body has more than {MAX_VALUES} values."


def test_values_are_counted_outside_strings_only() -> None:
    separators = "," * (MAX_VALUES - 1)
    assert fullness_problem([f"[1{separators.replace(',', ',1')}]".encode()]) is None, "exactly as many"
    assert fullness_problem([f"[{separators},".encode(), b"1]"]) is not None, "wherever the body is cut"
    texts = [separators * 2, f'",{separators}"', "\\", '",', '",']
    for text in texts:
        assert fullness_problem([json.dumps({"content": text * 2, separators: texts}).encode()]) is None
    assert fullness_problem([json.dumps([texts[-1]] * (MAX_VALUES + 1)).encode()]) is not None
    assert fullness_problem([json.dumps([*texts, [1] * (MAX_VALUES + 1)]).encode()]) is not None


def frames(message: Message, number: int) -> list[bytes]:
    """Half of them with bytes that changed, half with other values in their fields, which all parse."""
    draws, whole = random.Random(number), message.SerializeToString()
    return [tweaked(draws, message) if draws.random() < 0.5 else mutated(draws, whole) for _ in range(number)]


def tweaked(draws: random.Random, message: Message) -> bytes:
    """The message with one to three values exchanged for something nasty, or parts of it repeated or left out."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draws.randint(1, 3)):
        _tweak(draws, copy)
    return copy.SerializeToString()


def _tweak(draws: random.Random, message: Message) -> None:
    field = draws.choice(message.DESCRIPTOR.fields)
    held = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        message.ClearField(field.name)
    elif field.message_type is not None and not field.is_repeated:
        message.ClearField(field.name) if draws.random() < 0.1 else _tweak(draws, held)
    elif field.message_type is not None:
        if not held or draws.random() < 0.2:
            held.add()
        elif draws.random() < 0.2:
            held.add().CopyFrom(draws.choice(held))
        else:
            _tweak(draws, draws.choice(held))
    else:
        value = draws.choice(NASTY[field.cpp_type])
        if field.type == FieldDescriptor.TYPE_STRING:
            value = value.decode(errors="replace")
        if not field.is_repeated:
            setattr(message, field.name, value)
        elif held and draws.random() < 0.5:
            held[draws.randrange(len(held))] = value
        else:
            held.extend([value] * draws.choice((1, 1, 40)))


async def survives(call, message: Message) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """(streams ended with a status, frames that parsed). Only the statuses that refuse a frame are allowed."""
    ended = parsed = 0
    for number, frame in enumerate(frames(message, NUM_FRAMES)):
        if number == NUM_FRAMES // 2:
            growth = Growth()
        try:
            type(message).FromString(frame)
            parsed += 1
        except Exception:
            continue  # gRPC would refuse it before it is ours: below, with raw bytes
        stream = call()
        try:
            await stream.write(frame)
            await stream.done_writing()
            async with asyncio.timeout(60):
                async for _ in stream:
                    pass
        except grpc.aio.AioRpcError as failure:
            ended += 1
            if failure.code() not in REFUSALS:
                raise AssertionError(f"{frame!r}: {failure}") from failure
    growth.check(NUM_FRAMES - NUM_FRAMES // 2, type(message).__name__)
    return ended, parsed


def test_what_keeps_something_of_each_call_is_noticed() -> None:
    growth, kept = Growth(), []
    for number in range(1000):
        kept.append(b"%d" % number)
    with pytest.raises(AssertionError, match="blocks"):
        growth.check(len(kept), "a leak")


def raw(link: grpc.aio.Channel, method: str):  # type: ignore[no-untyped-def]
    return link.stream_stream(method, request_serializer=None, response_deserializer=None)


async def test_a_target_survives_any_frame() -> None:
    ref = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
    message = to_wire(StepPlan(step_id=1, verify=(Verify(ref=ref, depth=2),)))
    async with target_group() as group, channel.connect(group.address) as link:
        _, parsed = await survives(raw(link, "/seqmtp.v1.Target/Step"), message)
        assert parsed > NUM_FRAMES / 3
        garbage = raw(link, "/seqmtp.v1.Target/Step")()
        await garbage.write(b"\xff" * 100)
        with pytest.raises(grpc.aio.AioRpcError):
            await garbage.read()
        info = await target_rpc.TargetStub(link).Info(target.TargetInfoRequest(), timeout=60)
        assert info.group_id == "g"
        assert not group.engine.held
        assert not group.steps.failed.is_set()


@contextlib.asynccontextmanager
async def proposing() -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """A proposer's address, and its engine's loop."""
    passes = PassLoop(ProposerEngine(EngineConfig(weights="fp32", page_size=8, num_pages=64), TINY, MtpConfig(), MTP))
    running, server = asyncio.create_task(passes.run()), channel.new_server()
    proposer_rpc.add_ProposerServicer_to_server(ProposerServicer(passes, proposer.ProposerInfo()), server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield address, running
    finally:
        await server.stop(None)
        await end_tasks(running)


@contextlib.asynccontextmanager
async def target_group() -> AsyncIterator[Group]:
    """A target group that is stopped whatever happens."""
    group = Group()
    await group.start()
    try:
        yield group
    finally:
        await group.stop()


async def test_a_proposer_survives_any_frame() -> None:
    """The real engine, on a small made-up module: what parses and cannot be fed is refused; others are drafted for."""
    params = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9)
    rows = FeedRows(
        ref=Ref(request_id="r", epoch=1, version=1, digest=bytes(16)),
        first_base=0,
        hidden=torch.zeros(2, TINY.hidden_size),
        next_ids=(1, 2),
        depth=2,
        reset=True,
        request=Request(request_id="r", prompt_ids=(5, 1), params=params),
    )
    message = proposer.FeedFrame(feeds=[to_wire(rows)], closed=["x"])
    async with proposing() as (address, running), channel.connect(address) as link:
        call = raw(link, "/seqmtp.v1.Proposer/Propose")
        ended, parsed = await survives(call, message)
        assert parsed > NUM_FRAMES / 3
        assert ended > 0
        assert not running.done(), "the engine's loop runs on"
        honest = call()
        await honest.write(message.SerializeToString())
        assert len(proposer.DraftFrame.FromString(await honest.read()).drafts[0].tokens) == 2
        honest.cancel()


async def test_a_coordinator_survives_any_request(tmp_path: Path) -> None:
    """Real driver, real store, the toy target: what can be served is, the rest is refused by a documented status."""
    message = messages.GenerateRequest(request=to_wire(a_request("r", max_tokens=4)), meta={"user": "u"})
    draws, ended = random.Random(11), dict[str, int]()
    with EmbeddedValkey(tmp_path) as valkey:
        async with nodes(valkey, "a", delay_s=0.0) as (node,), node.stub() as stub:
            for number in range(min(NUM_FRAMES // 2, 1000)):
                frame = messages.GenerateRequest.FromString(tweaked(draws, message))
                frame.request.request_id = f"r-{number}"
                try:
                    async with asyncio.timeout(60):
                        await stub.Start(frame)
                        outcome = "started"
                except grpc.aio.AioRpcError as failure:
                    outcome = failure.code().name
                ended[outcome] = ended.get(outcome, 0) + 1
                await stub.Cancel(messages.CancelRequest(request_id=frame.request.request_id))
            assert ended.keys() <= {"started", "INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED"}, ended
            assert min(ended["started"], ended["INVALID_ARGUMENT"]) > 20, ended
            rows = [row async for row in node.generate(a_request("after", max_tokens=20))]
            assert rows[-1].finish is not None
            async with asyncio.timeout(60):
                while node.driver.status().gauges["requests_live"]:
                    await asyncio.sleep(0.01)


async def test_bytes_that_are_no_http2_do_not_hurt_a_server() -> None:
    draws = random.Random(7)
    async with target_group() as group:
        host, port = group.address.split(":")
        for opening in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", draws.randbytes(4096)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(opening + draws.randbytes(256))
            writer.close()
            del reader
        async with channel.connect(group.address) as link:
            info = await target_rpc.TargetStub(link).Info(target.TargetInfoRequest(), timeout=60)
            assert info.group_id == "g"
