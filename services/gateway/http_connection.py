"""One client's HTTP connection: uvicorn's, with bounds on what it buffers and on how long a request may take to arrive.

uvicorn by itself holds headers of any size, and a connection that sends a byte now and then for ever. Under Ray Serve
the proxy in front of the replicas has the connections, and bounds of its own.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Protocol, TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10
HEADERS_WITHIN_S = 15.0  # of the connection's start, or of the request's first byte on one that is kept alive
BODY_WITHIN_S = 60.0  # of the headers' end
LINGER_S = 2.0
LINGER_BYTES = 2**20

_TOO_LARGE = f"The headers are larger than {MAX_HEADER_BYTES} bytes."


class TooLarge(Exception):
    """Headers, the URL or a trailer; the parser hands it on as an error of its own."""


class Lingering(Protocol):
    """A refused connection: the answer is under way, and what still comes is dropped until the client hangs up.

    To close while the client sends would reset the connection, and a reset can overtake the answer. At most `LINGER_S`
    and `LINGER_BYTES`, as with nginx's `lingering_close`.
    """

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        self._transport = transport
        self._num_bytes = 0
        self._deadline = loop.call_later(LINGER_S, transport.close)
        transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > LINGER_BYTES:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()


class BoundedConnection(HttpToolsProtocol):
    """Refuses headers beyond `MAX_HEADER_BYTES` with 431 and a request that does not arrive in time with 408."""

    headers_within_s = HEADERS_WITHIN_S
    body_within_s = BODY_WITHIN_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0  # of this request, as parsed
        self._unparsed_bytes = 0  # since the parser last had something to tell: it keeps a line until the line ends
        self._deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # uvicorn narrows it too
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wait_for_headers()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEADER_BYTES and not self._is_over():
            self._refuse(431, _TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says of a request that it cannot read, unless the reason is ours."""
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, _TOO_LARGE)
        else:
            self._refuse(400, msg)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._wait_for_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._arrive_within(self.body_within_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._has_arrived()
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise TooLarge

    def _wait_for_headers(self) -> None:
        if self._deadline is None:
            self._arrive_within(self.headers_within_s)

    def _arrive_within(self, seconds: float) -> None:
        self._has_arrived()
        self._deadline = self.loop.call_later(seconds, self._is_late, seconds)

    def _has_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self, seconds: float) -> None:
        if self._is_over():
            return
        if self.flow.read_paused or self._is_answering():  # it is we who do not read, or an answer would be cut
            self._arrive_within(seconds)
        elif self.scope is None:
            self.transport.close()  # connected in advance, as browsers do, and not used
        else:
            self._refuse(408, f"The request did not arrive within {seconds:g} seconds.")

    def _is_over(self) -> bool:
        return self.parser is None or self.transport.is_closing()

    def _is_answering(self) -> bool:
        """A request of this connection has arrived, and its answer has not ended."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _refuse(self, status: int, problem: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            text = problem.encode()
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(text) + text)
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.flow.resume_reading()
        self.transport.set_protocol(Lingering(self.transport, self.loop))
        self._unset_keepalive_if_required()
        self.connection_lost(ConnectionAbortedError(problem))  # what waits for the rest of this request waits no longer
