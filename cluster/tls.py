"""Certificates of our listeners and clients, from PEM files; a file that changed counts from the next handshake on.

Connections that are up stay up: a handshake is all that certificates are for.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from cluster.core.access import InternalTlsSettings, PublicTlsSettings
from cluster.core.errors import ConfigError
from cluster.reread import Reread


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM bytes. `ca`: whom we believe; without one a server asks nobody for a certificate. `server`: made of them."""

    chain: bytes
    key: bytes
    ca: bytes | None
    server: ssl.SSLContext


class CertificateFiles:
    """The newest good content of some PEM files. Thread-safe: gRPC asks from threads of its own."""

    def __init__(self, cert_file: str, key_file: str, ca_file: str | None) -> None:
        """Raises ConfigError when they cannot be used."""
        self._cert, self._key, self._ca = Path(cert_file), Path(key_file), Path(ca_file) if ca_file else None
        files = (self._cert, self._key, *(() if self._ca is None else (self._ca,)))
        try:
            self._newest = Reread(files, self._read)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls: {', '.join(map(str, files))} cannot be used: {error}") from error

    @property
    def wants_clients(self) -> bool:
        """Whether clients need a certificate too (mTLS)."""
        return self._ca is not None

    def current(self) -> Certificates:
        """The same object until a file changes; the old ones go on where new ones cannot be used. Never raises."""
        return self._newest.current()

    def _read(self) -> Certificates:
        """TLS 1.2 or newer. Raises OSError (ssl.SSLError is one): not certificates, or not of one pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert, self._key, password="")  # never asks a terminal for one
        if self._ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._ca)
        ca = None if self._ca is None else self._ca.read_bytes()
        return Certificates(self._cert.read_bytes(), self._key.read_bytes(), ca, context)


class ClientTls(Protocol):
    """What a gRPC client needs. `name`: what the server's certificate must have; None: the address dialled."""

    @property
    def name(self) -> str | None: ...

    def credentials(self) -> grpc.ChannelCredentials:
        """For one new connection."""


@dataclass(frozen=True, slots=True)
class NamedTls:
    """Of a client that shows a certificate too: the files, and the name that the server's must have."""

    files: CertificateFiles
    name: str | None

    def credentials(self) -> grpc.ChannelCredentials:
        """See ClientTls."""
        now = self.files.current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.chain)


class Believed:
    """Of a client that shows no certificate: whom it believes alone."""

    def __init__(self, ca_file: str | None, name: str | None) -> None:
        """PEM; None: those whom everybody believes. Raises ConfigError when it cannot be used."""
        try:
            ssl.create_default_context(cafile=ca_file)
            self._ca = None if ca_file is None else Path(ca_file).read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{ca_file}: no certificates that can be believed: {error}") from error
        self.name = name

    def credentials(self) -> grpc.ChannelCredentials:
        """See ClientTls."""
        return grpc.ssl_channel_credentials(self._ca)


def named_tls(settings: InternalTlsSettings | PublicTlsSettings) -> NamedTls | None:
    """Of a client, which shows a certificate too: a member's of internal streams, or our own commands' at the routers'
    gRPC doors, which are shown the routers' own. None when not configured. Raises ConfigError.
    """
    files = _files(settings, settings.ca_file)
    return None if files is None else NamedTls(files, settings.server_name)


def public_files(settings: PublicTlsSettings) -> CertificateFiles | None:
    """Of the routers' doors. None when not configured. Raises ConfigError."""
    return _files(settings, settings.client_ca_file)


def _files(settings: InternalTlsSettings | PublicTlsSettings, ca_file: str | None) -> CertificateFiles | None:
    if settings.cert_file is None or settings.key_file is None:
        return None
    return CertificateFiles(settings.cert_file, settings.key_file, ca_file)


def client_context(settings: PublicTlsSettings) -> ssl.SSLContext:
    """The same for HTTP. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None and settings.key_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file, password="")
    except OSError as error:
        raise ConfigError(f"tls.public: the certificates cannot be used: {error}") from error
    return context


def rpc_server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """For a gRPC server, asked again on every handshake."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = files.current()
        return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.ca)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, files.wants_clients)


def web_context(files: CertificateFiles) -> ssl.SSLContext:
    """For an HTTP server. Each handshake goes on in a context of the files as they are then."""

    def choose(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = files.current().server

    context = files.current().server
    context.sni_callback = choose  # called without a name too
    return context
