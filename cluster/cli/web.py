"""One GET from a router, as our own commands ask: no proxy, and the certificates that the configuration names."""

import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from cluster.core.access import PublicTlsSettings
from cluster.tls import client_context


class NoAnswer(OSError):
    """Nobody answered, or not in HTTP."""


class NotBelieved(NoAnswer):
    """Somebody answered, whose certificate is not one that we believe for that name. Trying again does not help."""


class _Named(http.client.HTTPSConnection):
    """Expects a certificate for `name`, whatever the address is."""

    def __init__(self, host: str, port: int | None, tls: PublicTlsSettings, within_s: float) -> None:
        super().__init__(host, port, timeout=within_s)
        self._certificates = client_context(tls)
        self._name = tls.server_name or host

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._certificates.wrap_socket(self.sock, server_hostname=self._name)


def get(
    url: str, tls: PublicTlsSettings, *, within_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body. Raises NoAnswer, NotBelieved; ConfigError when the certificates cannot be used."""
    parts = urlsplit(url)
    host, target = parts.hostname or "", parts.path + (f"?{parts.query}" if parts.query else "")
    connection = (
        _Named(host, parts.port, tls, within_s)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=within_s)
    )
    try:
        connection.request("GET", target, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except ssl.SSLCertVerificationError as error:
        raise NotBelieved(error.verify_message) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error
    finally:
        connection.close()
