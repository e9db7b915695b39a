"""The cluster secret: one random string. Whoever can prove to know it (credentials.py) is part of the cluster.

It is made by `headrace up` in a file that only its owner can read, or mounted, or given as HEADRACE_SECRET.
"""

import os
import secrets
import stat
from pathlib import Path

from cluster.config import secret_from_environment
from cluster.core.config import ClusterConfig
from cluster.core.errors import ConfigError

_BYTES = 32
_MIN_CHARACTERS = 16


def create_secret(path: Path) -> str:
    """The secret in `path`, made if the file is not there (mode 0600 from its first byte on). Raises ConfigError."""
    if path.exists():
        return read_secret(path)
    secret = secrets.token_hex(_BYTES)
    store_secret(path, secret)
    return secret


def store_secret(path: Path, secret: str) -> None:
    """Write `secret` to `path`, whole or not at all, with mode 0600 from its first byte on. Raises ConfigError."""
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secret + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the secret file {path}: {error}") from error
    read_secret(path)


def read_secret(path: Path) -> str:
    """The secret in `path`. Raises ConfigError when it is missing, too short, or readable by others."""
    try:
        mode = path.stat().st_mode
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"secret_file: cannot read {path}: {error}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):  # a mounted Kubernetes secret is readable by its group
        raise ConfigError(f"secret_file: {path} is open to others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")
    if len(secret) < _MIN_CHARACTERS or not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"secret_file: {path} must hold at least {_MIN_CHARACTERS} printable ASCII characters")
    return secret


def cluster_secret(config: ClusterConfig) -> str:
    """The secret a program of this cluster uses: the environment's, else the file's. Raises ConfigError."""
    if secret := secret_from_environment():
        return secret
    if config.secret_file is None:
        raise ConfigError("secret_file: not set, nor is HEADRACE_SECRET; a program of the cluster needs one of them")
    return read_secret(Path(config.secret_file))
