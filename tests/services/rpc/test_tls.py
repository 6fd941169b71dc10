"""gRPC between the services under TLS: who has no certificate of ours is not served, and a renewed one is taken up."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from seqmtp_serve.errors import InvalidField
from services.rpc import channel, tls
from services.rpc.wire import coordinator as messages
from services.rpc.wire import coordinator_rpc
from services.settings import RpcSettings

DAY = datetime.timedelta(days=1)


@dataclass
class Authority:
    """A CA that signs certificates for 127.0.0.1."""

    name: str

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        self.certificate = self._sign(self._subject, self._key.public_key(), is_ca=True)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self._subject, subject, key, x509.random_serial_number(), now - DAY, now + DAY
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        return builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())

    def issue(self, folder: Path, name: str) -> RpcSettings:
        """Files of a peer; written over those of the same name."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        (folder / "ca.pem").write_bytes(_pem(self.certificate))
        (folder / f"{name}.pem").write_bytes(_pem(self._sign(subject, key.public_key(), is_ca=False)))
        plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{name}.key").write_bytes(key.private_bytes(*plain))
        return RpcSettings(
            tls_certificate=folder / f"{name}.pem", tls_key=folder / f"{name}.key", tls_ca=folder / "ca.pem"
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class Servicer(coordinator_rpc.CoordinatorServicer):
    async def Owns(self, request, context):  # type: ignore[no-untyped-def]
        return messages.OwnsReply(live=True)


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    tls.secure(RpcSettings())


async def started() -> tuple[grpc.aio.Server, str]:
    server = channel.new_server()
    coordinator_rpc.add_CoordinatorServicer_to_server(Servicer(), server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    return server, address


async def asked(address: str) -> bool:
    """Whether a client with the certificate in force now is answered."""
    async with channel.connect(address) as link:
        try:
            reply = await coordinator_rpc.CoordinatorStub(link).Owns(messages.OwnsRequest(request_id="r"), timeout=30)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return bool(reply.live)


async def test_only_peers_of_the_same_authority_are_served(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    tls.secure(ours.issue(tmp_path / "ours", "coordinator"))
    server, address = await started()
    tls.secure(ours.issue(tmp_path / "ours", "gateway"))
    assert await asked(address)
    tls.secure(theirs.issue(tmp_path / "theirs", "intruder"))
    assert not await asked(address)
    tls.secure(RpcSettings())
    assert not await asked(address), "plaintext"
    stranger = RpcSettings(tls_certificate=tmp_path / "theirs/intruder.pem", tls_key=tmp_path / "theirs/intruder.key")
    (tmp_path / "theirs/ca.pem").write_bytes(_pem(ours.certificate))  # it trusts us; we do not know it
    tls.secure(stranger.model_copy(update={"tls_ca": tmp_path / "theirs/ca.pem"}))
    assert not await asked(address)
    await server.stop(None)


async def test_a_renewed_certificate_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    tls.secure(old.issue(tmp_path / "server", "coordinator"))
    server, address = await started()
    tls.secure(old.issue(tmp_path / "old", "gateway"))
    assert await asked(address)
    new.issue(tmp_path / "server", "coordinator")  # the files change under the running server
    tls.secure(new.issue(tmp_path / "new", "gateway"))
    assert await asked(address)
    tls.secure(old.issue(tmp_path / "old", "gateway"))
    assert not await asked(address)
    await server.stop(None)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="belong together"):
        RpcSettings(tls_certificate=tmp_path / "a")
    with pytest.raises(ValueError, match="plaintext"):
        RpcSettings(tls_ca=tmp_path / "a")
    with pytest.raises(InvalidField, match="cannot read"):
        tls.secure(RpcSettings(tls_certificate=tmp_path / "a", tls_key=tmp_path / "b"))
