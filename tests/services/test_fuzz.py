"""Thousands of malformed bodies and frames: a documented refusal each, no 5xx, no crash, and the next caller is served.

Mutations are drawn from a seed, so a failure can be had again; `SEQMTP_FUZZ=10000` runs more of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import grpc
import httpx
import pytest

from seqmtp_serve.ports import StepPlan, Verify
from seqmtp_serve.request import Ref
from services.gateway.guard import MAX_BODY_DEPTH, nesting_problem
from services.proposer.servicer import ProposerServicer
from services.proposer.worker import PassLoop
from services.rpc import channel
from services.rpc.convert import to_wire
from services.rpc.wire import proposer, proposer_rpc, target, target_rpc
from tests.services.gateway.world import CHAT, MESSAGES, app_over, fake
from tests.services.test_proposer_link import CountingEngine
from tests.services.test_target_link import Group

NUM_BODIES = int(os.environ.get("SEQMTP_FUZZ", "2000"))
NUM_FRAMES = NUM_BODIES // 4
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
            body = mutated(draws, SEED)
            path = draws.choice((CHAT, CHAT, "/v1/completions", "/tokenize", "/detokenize"))
            kind = draws.choice(("application/json", "application/json", "text/plain", "", "multipart/form-data"))
            answer = await client.post(path, content=body, headers={"content-type": kind})
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (number, path, body, answer.text)
            assert len(answer.content) < 4000, (number, len(answer.content))
            assert answer.status_code == 200 or "message" in answer.json()["error"]
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


def frames(message: bytes, number: int) -> list[bytes]:
    draws = random.Random(number)
    return [mutated(draws, message) for _ in range(number)]


async def survives(call, message: bytes, kind: type) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """(streams ended with a status, frames that parsed). Only the statuses that refuse a frame are allowed."""
    ended = parsed = 0
    for frame in frames(message, NUM_FRAMES):
        try:
            kind.FromString(frame)
            parsed += 1
        except Exception:
            continue  # gRPC would refuse it before it is ours: below, with raw bytes
        stream = call()
        try:
            await stream.write(frame)
            await stream.done_writing()
            async with asyncio.timeout(10):
                async for _ in stream:
                    pass
        except grpc.aio.AioRpcError as failure:
            ended += 1
            if failure.code() not in REFUSALS:
                raise AssertionError(f"{frame!r}: {failure}") from failure
    return ended, parsed


def raw(link: grpc.aio.Channel, method: str):  # type: ignore[no-untyped-def]
    return link.stream_stream(method, request_serializer=None, response_deserializer=None)


async def test_a_target_survives_any_frame() -> None:
    group = Group()
    await group.start()
    ref = Ref(request_id="r", epoch=1, version=1, digest=bytes(16))
    message = to_wire(StepPlan(step_id=1, verify=(Verify(ref=ref, depth=2),))).SerializeToString()
    async with channel.connect(group.address) as link:
        _, parsed = await survives(raw(link, "/seqmtp.v1.Target/Step"), message, target.StepPlan)
        assert parsed > NUM_FRAMES / 20
        garbage = raw(link, "/seqmtp.v1.Target/Step")()
        await garbage.write(b"\xff" * 100)
        with pytest.raises(grpc.aio.AioRpcError):
            await garbage.read()
        info = await target_rpc.TargetStub(link).Info(target.TargetInfoRequest(), timeout=10)
        assert info.group_id == "g"
    assert not group.engine.held
    assert not group.steps.failed.is_set()
    await group.stop()


async def test_a_proposer_survives_any_frame() -> None:
    passes = PassLoop(CountingEngine())
    running, server = asyncio.create_task(passes.run()), channel.new_server()
    proposer_rpc.add_ProposerServicer_to_server(ProposerServicer(passes, proposer.ProposerInfo()), server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    feed = proposer.FeedRows(first_base=0, next_ids=[1, 2], depth=2, reset=True)
    feed.ref.request_id, feed.ref.version, feed.ref.digest = "r", 1, bytes(16)
    feed.hidden.data, feed.hidden.dtype = bytes(32), 1
    feed.hidden.shape.extend([2, 4])
    message = proposer.FeedFrame(feeds=[feed], closed=["x"]).SerializeToString()
    async with channel.connect(address) as link:
        ended, parsed = await survives(raw(link, "/seqmtp.v1.Proposer/Propose"), message, proposer.FeedFrame)
        assert parsed > NUM_FRAMES / 20
        assert ended > 0
        assert (await proposer_rpc.ProposerStub(link).Info(proposer.ProposerInfoRequest(), timeout=10)) is not None
    assert not running.done(), "the engine's loop runs on"
    await server.stop(None)
    running.cancel()


async def test_bytes_that_are_no_http2_do_not_hurt_a_server() -> None:
    group = Group()
    await group.start()
    host, port = group.address.split(":")
    draws = random.Random(7)
    for opening in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", draws.randbytes(4096)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(opening + draws.randbytes(256))
        writer.close()
        del reader
    async with channel.connect(group.address) as link:
        assert (await target_rpc.TargetStub(link).Info(target.TargetInfoRequest(), timeout=10)).group_id == "g"
    await group.stop()
