"""TLS between the services, mutual when a CA is named: files in, gRPC credentials out.

One set of files a process, given once at its start (`secure`); without them gRPC is plaintext, for loopback or a
network of its own. A server reads its files again at each handshake after they changed, a client at each new
connection: a certificate that is renewed (cert-manager) needs no restart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from seqmtp_serve.errors import InvalidField
from services.settings import RpcSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. With `ca` peers must show a certificate it signed, in both directions; `server_name` is the name that
    servers' certificates carry when it is not the address dialled.
    """

    certificate: Path
    key: Path
    ca: Path | None = None
    server_name: str | None = None

    def stamp(self) -> tuple[int, ...]:
        """Changes when any of the files does."""
        return tuple(one.stat().st_mtime_ns for one in (self.certificate, self.key, self.ca) if one is not None)

    def pair(self) -> tuple[bytes, bytes]:
        """(private key, certificate chain)."""
        return self.key.read_bytes(), self.certificate.read_bytes()

    def authority(self) -> bytes | None:
        """What peers' certificates are judged by."""
        return None if self.ca is None else self.ca.read_bytes()


_files: TlsFiles | None = None


def secure(rpc: RpcSettings) -> None:
    """Use the files that the settings name from now on in this process; none named: plaintext.

    Raises InvalidField if one cannot be read.
    """
    global _files
    if rpc.tls_certificate is None or rpc.tls_key is None:
        _files = None
        return
    named = rpc.tls_server_name
    files = TlsFiles(certificate=rpc.tls_certificate, key=rpc.tls_key, ca=rpc.tls_ca, server_name=named)
    try:
        files.pair(), files.authority()
    except OSError as error:
        raise InvalidField(f"cannot read {error.filename}: {error.strerror}", param="rpc.tls_certificate") from error
    _files = files


def channel_credentials() -> grpc.ChannelCredentials | None:
    """A client's, as the files are now. None: plaintext."""
    if _files is None:
        return None
    key, chain = _files.pair()
    return grpc.ssl_channel_credentials(_files.authority() or chain, key, chain)


def channel_options() -> Sequence[tuple[str, str]]:
    """What a client must be told besides."""
    name = None if _files is None else _files.server_name
    return [] if name is None else [("grpc.ssl_target_name_override", name)]


def server_credentials() -> grpc.ServerCredentials | None:
    """A server's, which follow the files. None: plaintext."""
    if (files := _files) is None:
        return None
    seen = files.stamp()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([files.pair()], files.authority())

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            if (now := files.stamp()) != seen:
                found, seen = configuration(), now
                log.info("TLS certificates read again")
                return found
        except OSError as error:
            log.error("TLS certificates stay as they were: %s", error)
        return None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # None says that nothing changed: gRPC documents it, its stubs leave it out
        require_client_authentication=files.ca is not None,
    )
