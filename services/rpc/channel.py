"""gRPC channels and servers with the limits every service of ours shares.

A peer that was killed is found in milliseconds (the socket closes). A peer that hangs is found only by
`grpc.http2.ping_timeout_ms`: keepalive alone leaves the ping's own 60 s timer in charge. Servers must allow pings that
frequent, or they answer GOAWAY "too_many_pings".
"""

from __future__ import annotations

import grpc

from services.rpc import tls

MAX_MESSAGE_BYTES = 64 * 2**20
PING_MS = 1000

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_MS),
    ("grpc.http2.ping_timeout_ms", PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # A worker that comes back on its old port must be tried again soon, not after a grown backoff (minimum: also the
    # time one attempt may take).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels to one address must not share a connection: a closed channel means a closed socket.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, never a silent second server
]


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`, as `tls.py` says. Create it in the loop that uses it, after any fork."""
    credentials = tls.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=[*CLIENT_OPTIONS, *tls.channel_options()])


def new_server() -> grpc.aio.Server:
    """A server without services or ports yet."""
    return grpc.aio.server(options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind, and return the address really bound (`port` 0 takes a free one). Raises RuntimeError if it is taken."""
    credentials = tls.server_credentials()
    if credentials is None:
        return f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
    return f"{host}:{server.add_secure_port(f'{host}:{port}', credentials)}"
