"""How our own commands reach routers elsewhere: whom they believe, and what they show (`generate`, `explain`)."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.core.access import PublicTlsSettings
from cluster.core.errors import ConfigError
from cluster.run_dir import RunDir
from cluster.tls import Believed, ClientTls, named_tls

CaFile = Annotated[Path | None, typer.Option("--ca-file", help="PEM: believe these; the connection is TLS")]
CertFile = Annotated[Path | None, typer.Option("--cert-file", help="PEM: show this certificate (mTLS)")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="PEM: the key of --cert-file")]
ServerName = Annotated[str | None, typer.Option("--server-name", help="the certificate's name, if not the address")]


def asked_tls(
    ca_file: Path | None = None, cert_file: Path | None = None, key_file: Path | None = None, name: str | None = None
) -> PublicTlsSettings | None:
    """What the options say; None when nothing was said. Raises ConfigError."""
    files = [None if file is None else str(file) for file in (ca_file, cert_file, key_file)]
    if not any(files) and name is None:
        return None
    try:
        return PublicTlsSettings(ca_file=files[0], cert_file=files[1], key_file=files[2], server_name=name)
    except ValueError:
        raise ConfigError("--cert-file and --key-file go together") from None


def public_tls(run_dir: RunDir, asked: PublicTlsSettings | None, *, given: bool) -> PublicTlsSettings:
    """How routers are asked: as the options say, else as the cluster here is configured; at an address that was
    given too, if a cluster was ever started here. Raises ConfigError."""
    if asked is not None:
        return asked
    if given and not run_dir.config_file.exists():
        return PublicTlsSettings()
    return run_dir.config().tls.public


def grpc_tls(settings: PublicTlsSettings, *, encrypted: bool) -> ClientTls | None:
    """Of a gRPC connection. `encrypted`: also where no certificate is shown. Raises ConfigError."""
    shown = named_tls(settings)
    return Believed(settings.ca_file, settings.server_name) if shown is None and encrypted else shown
