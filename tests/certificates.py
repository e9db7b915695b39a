"""Certificates for tests, made on the spot: a CA of one's own, and PEM files signed by it."""

from dataclasses import dataclass
from pathlib import Path

import trustme


class Authority:
    """A CA that nobody else knows."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self._ca.cert_pem.bytes()

    def issue(self, *names: str) -> tuple[bytes, bytes]:
        """Certificate and key for these names or addresses."""
        made = self._ca.issue_cert(*names)
        return b"".join(part.bytes() for part in made.cert_chain_pems), made.private_key_pem.bytes()


@dataclass(frozen=True, slots=True)
class Files:
    """Certificate, key and CA in one folder, replaced whole."""

    folder: Path

    @property
    def cert(self) -> str:
        return str(self.folder / "tls.crt")

    @property
    def key(self) -> str:
        return str(self.folder / "tls.key")

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.crt")

    def write(self, chain: bytes, key: bytes, ca: bytes) -> "Files":
        """Each file appears whole, as tools that renew certificates see to."""
        self.folder.mkdir(exist_ok=True)
        for path, content in ((self.cert, chain), (self.key, key), (self.ca, ca)):
            scratch = Path(path + ".new")
            scratch.write_bytes(content)
            scratch.replace(path)
        return self


def files(folder: Path, authority: Authority, *names: str, believed: bytes | None = None) -> Files:
    """Signed by `authority`, for `names`; `believed`: the content of the CA's file, by default that authority."""
    chain, key = authority.issue(*names)
    return Files(folder).write(chain, key, believed or authority.pem)
