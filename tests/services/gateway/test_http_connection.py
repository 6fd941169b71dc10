"""A client that sends too much of a header, or too slowly, costs a bounded buffer for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from services.gateway import http_connection
from services.gateway.http_connection import MAX_HEADER_BYTES, BoundedConnection
from tests.services.gateway.live import serving
from tests.services.gateway.world import CHAT, MESSAGES, fake, script

HEALTH = b"GET /health HTTP/1.1\r\nHost: gateway\r\n"
POST = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"messages": MESSAGES}).encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
ENDLESS = {
    "a header's value": (HEALTH + b"X-A: ", b"a" * 8192),
    "a header's name": (HEALTH, b"a" * 8192),
    "headers": (HEALTH, b"X-A: b\r\n" * 1024),
    "a path": (b"GET /", b"a" * 8192),
    "a trailer's value": (CHUNKED + b"X-A: ", b"a" * 8192),
    "trailers": (CHUNKED, b"X-A: b\r\n" * 1024),
    "a chunk's extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n5;", b"a" * 8192),
}


class Wire:
    """A bare connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> bytes:
        """The next answer's status line and headers; its body, if any, stays to be read."""
        return await self._reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """All that comes until the gateway closes the connection."""
        return await self._reader.read()


@contextlib.asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            yield Wire(reader, writer)
    finally:
        writer.close()


async def is_served(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url) as client:
        return (await client.get("/health")).status_code == 200


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(BoundedConnection, "headers_within_s", 0.5)
    monkeypatch.setattr(BoundedConnection, "body_within_s", 0.5)


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_cut_off_with_431(what: str) -> None:
    beginning, more = ENDLESS[what]
    async with serving(fake()) as url, wire(url) as link:
        await link.send(beginning)
        for _ in range(
            6 * MAX_HEADER_BYTES // len(more)
        ):  # the gateway reads 4 times the bound at once, and counts then
            await link.send(more)
        assert (await link.rest()).startswith(b"HTTP/1.1 431 ")
        assert await is_served(url)


async def test_who_goes_on_sending_after_the_answer_is_cut_off() -> None:
    beginning, more = ENDLESS["a header's value"]
    async with serving(fake()) as url, wire(url) as link:
        await link.send(beginning)
        with pytest.raises(ConnectionError):
            while True:
                await link.send(more)
        assert await is_served(url)


@pytest.mark.parametrize("garbage", [b"\x00" * 8192, b"GET / HTTP/1.1\r\nHost\r\n\r\n" + b"a" * 8192])
async def test_the_answer_reaches_a_client_that_still_sends(garbage: bytes) -> None:
    async with serving(fake()) as url, wire(url) as link:
        for _ in range(8):
            await link.send(garbage)
        assert (await link.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_does_not_hang_up_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.1)
    async with serving(fake()) as url, wire(url) as link:
        await link.send(b"\x00")
        assert (await link.rest()).startswith(b"HTTP/1.1 400 ")  # half closed: no more to read, and sending still works
        with pytest.raises(ConnectionError):
            while True:
                await link.send(b"a")
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("num_bytes", "status"), [(MAX_HEADER_BYTES - 1024, b"200"), (MAX_HEADER_BYTES + 1, b"431")])
async def test_headers_that_come_whole_have_the_same_bound(num_bytes: int, status: bytes) -> None:
    async with serving(fake()) as url, wire(url) as link:
        await link.send(HEALTH + b"X-A: " + b"a" * num_bytes + b"\r\n\r\n")
        assert (await link.head()).split()[1] == status


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("beginning", [HEALTH + b"X-A: ", b"GET /", POST + b"Content-Length: 100\r\n\r\n{"])
async def test_a_request_that_drips_is_given_up_with_408(beginning: bytes) -> None:
    coordinator = fake()
    async with serving(coordinator) as url, wire(url) as link:
        answer = asyncio.create_task(link.rest())
        await link.send(beginning)
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                await link.send(b"a")
            await asyncio.sleep(0.01)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert coordinator.open_streams == 0
        assert await is_served(url)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("asked_before", [False, True])
async def test_a_connection_that_asks_nothing_is_closed(asked_before: bool) -> None:
    async with serving(fake()) as url, wire(url) as link:
        if asked_before:
            await link.send(HEALTH + b"\r\n")
            assert b" 200 " in await link.head()
            await link.send(b"\r\n")  # no request yet, and it ends the server's own clock for an idle connection
        assert not (await link.rest()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("short")
async def test_deadlines_do_not_cut_an_answer() -> None:
    """Nor does the half of a next request, sent meanwhile: that one's time begins when the answer has ended."""
    slow = fake(script(*"hello world"), delay_s=0.1)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    async with serving(slow) as url, wire(url) as link:
        await link.send(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) + HEALTH)
        told = await link.rest()
    assert b"data: [DONE]" in told
    assert told.rpartition(b"\r\n0\r\n\r\n")[2].startswith(b"HTTP/1.1 408 ")


async def test_requests_share_a_connection() -> None:
    async with serving(fake()) as url, wire(url) as link:
        await link.send((HEALTH + b"\r\n") * 2)
        for _ in range(2):
            assert b" 200 " in await link.head()
        await asyncio.sleep(0)
        await link.send(HEALTH + b"\r\n")
        assert b" 200 " in await link.head()
