"""A stream that reads and writes at once ends with its status, whatever was on its way."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from seqmtp_serve.errors import InvalidField
from services.rpc import channel, status
from services.rpc.duplex import write_while

CHUNK = bytes(1 << 20)  # more than the network takes from a writer whose reader does not read


async def drained(stream: grpc.aio.StreamStreamCall) -> int:
    received = 0
    async for chunk in stream:
        received += len(chunk)
    return received


async def call(handler, use) -> None:  # type: ignore[no-untyped-def]
    """A server with one raw stream-stream method, `/t/M`."""
    server = channel.new_server()
    method = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"M": method}),))
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with channel.connect(address) as link:
            await use(link.stream_stream("/t/M"))
    finally:
        await server.stop(None)


async def test_a_refusal_waits_for_the_write_on_its_way() -> None:
    async def handler(_, context):  # type: ignore[no-untyped-def]
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        async def reading() -> None:
            while (frame := await context.read()) is not grpc.aio.EOF:
                if frame == b"bad":
                    raise ValueError("bad")
                frames.put_nowait(CHUNK)

        try:
            await write_while(reading(), frames, context.write)
        except ValueError as error:
            await status.abort(context, InvalidField(str(error), param="frame"))

    async def run(method) -> None:  # type: ignore[no-untyped-def]
        for pause in range(10):  # the refusal meets the write at another moment each time
            stream = method()
            await stream.write(b"good")
            await asyncio.sleep(0.002 * pause)
            await stream.write(b"bad")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with asyncio.timeout(30):
                    await drained(stream)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    await call(handler, run)


async def test_what_is_queued_is_written_before_the_end() -> None:
    async def handler(_, context):  # type: ignore[no-untyped-def]
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        async def reading() -> None:
            while (frame := await context.read()) is not grpc.aio.EOF:
                frames.put_nowait(frame)

        await write_while(reading(), frames, context.write)

    async def run(method) -> None:  # type: ignore[no-untyped-def]
        stream = method()
        for _ in range(5):
            await stream.write(b"x" * 10)
        await stream.done_writing()
        async with asyncio.timeout(30):
            assert await drained(stream) == 50

    await call(handler, run)


async def test_a_handler_that_is_cancelled_ends_its_reader() -> None:
    ended = asyncio.Event()

    async def reading() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def write(_: bytes) -> None:
        raise AssertionError("nothing was queued")

    writing = asyncio.create_task(write_while(reading(), asyncio.Queue(), write))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert ended.is_set()


async def test_a_reader_that_ends_with_the_queue_full_leaves_nothing_unwritten() -> None:
    frames: asyncio.Queue[int] = asyncio.Queue(2)
    written: list[int] = []

    async def reading() -> None:
        for number in range(6):
            await frames.put(number)

    async def write(number: int) -> None:
        await asyncio.sleep(0.001)
        written.append(number)

    async with asyncio.timeout(10):
        await write_while(reading(), frames, write)
    assert written == list(range(6))


async def test_a_reader_that_ends_while_nothing_is_queued_ends_the_writing() -> None:
    read = asyncio.Event()

    async def reading() -> None:
        await read.wait()
        raise ValueError("bad")

    async def write(_: int) -> None:
        raise AssertionError("nothing was queued")

    frames: asyncio.Queue[int] = asyncio.Queue()
    writing = asyncio.create_task(write_while(reading(), frames, write))
    await asyncio.sleep(0.01)  # it waits for a frame by now
    read.set()
    with pytest.raises(ValueError, match="bad"):
        async with asyncio.timeout(10):
            await writing
