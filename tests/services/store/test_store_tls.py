"""The store behind TLS: `rediss://` with certificates, mutual; who shows none, or trusts another CA, is not served."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqmtp_serve.errors import StoreUnreachable
from services.settings import RpcSettings, StoreSettings
from services.store.client import RedisFrontierStore
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENT
from tests.services.coordinators import a_request
from tests.services.rpc.test_tls import Authority

QUICK = StoreSettings(deadline_s=0.3)


@contextlib.asynccontextmanager
async def terminated(valkey: EmbeddedValkey, own: RpcSettings) -> AsyncIterator[int]:
    """A port that speaks TLS as the store's does, in front of a server that was built without."""
    assert own.tls_certificate is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(own.tls_ca))
    context.load_cert_chain(own.tls_certificate, own.tls_key)
    context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(valkey.socket))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def url(port: int, files: RpcSettings, *, certificate: bool = True) -> str:
    """As the manifests write it."""
    shown = f"&ssl_certfile={files.tls_certificate}&ssl_keyfile={files.tls_key}" if certificate else ""
    return f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.tls_ca}{shown}"


async def works(address: str, settings: StoreSettings = QUICK) -> bool:
    store = RedisFrontierStore(address, settings)
    try:
        await store.acquire(a_request("r"), "me", 10.0)
        return (await store.snapshot("r")) is not None
    except StoreUnreachable:
        return False
    finally:
        await store.close()


async def test_only_peers_of_the_same_authority_reach_the_store(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    own, gateway = ours.issue(tmp_path / "s", "store"), ours.issue(tmp_path / "g", "gateway")
    stranger = theirs.issue(tmp_path / "t", "stranger")
    with EmbeddedValkey(tmp_path / "valkey") as valkey:
        async with terminated(valkey, own) as port:
            assert await works(url(port, gateway), PATIENT)
            assert not await works(url(port, gateway, certificate=False))
            assert not await works(url(port, stranger)), "it does not trust our CA either"
            assert not await works(url(port, stranger).replace("/t/ca.pem", "/g/ca.pem"))
            assert not await works(f"redis://127.0.0.1:{port}/0"), "plaintext"


async def test_a_renewed_certificate_is_taken_up_by_the_next_connection(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    files = old.issue(tmp_path / "g", "gateway")
    with EmbeddedValkey(tmp_path / "valkey") as valkey:
        store: RedisFrontierStore | None = None
        for authority in (old, new):
            authority.issue(tmp_path / "g", "gateway")  # the files change under the running client
            async with terminated(valkey, authority.issue(tmp_path / "s", "store")) as port:
                address = url(port, files)
                if store is None:
                    store = RedisFrontierStore(address, PATIENT)
                else:
                    (pooled,) = store.redis.connection_pool._available_connections
                    pooled.port = port  # the same connection, made again
                await store.ping()
                await store.redis.connection_pool.disconnect()
        assert store is not None
        await store.close()


@pytest.mark.parametrize("missing", ["ssl_ca_certs", "ssl_certfile"])
async def test_a_file_that_is_not_there_is_no_plaintext(missing: str, tmp_path: Path) -> None:
    files = Authority("ours").issue(tmp_path / "g", "gateway")
    with EmbeddedValkey(tmp_path / "valkey") as valkey:
        async with terminated(valkey, files) as port:
            assert not await works(url(port, files).replace(f"{missing}=", f"{missing}=/nowhere"))
