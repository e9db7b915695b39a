"""`headrace key`: a new API key for a tenant. The key is shown once; the configuration gets its sha256 alone."""

import hashlib
import secrets
from typing import Annotated

import typer

PREFIX = "hr-"
"""Tells people, and tools that look for secrets in files, what it is."""

_BYTES = 32


def key(tenant: Annotated[str, typer.Argument(help="whose key it will be")] = "NAME") -> None:
    """Make an API key. The first line is the key, for the client; the second is what the configuration needs."""
    made = new_key()
    print(made)
    print(f"--set 'tenants.{tenant}.keys=[{digest_of(made)}]'")


def new_key() -> str:
    """256 random bits: nothing that could be guessed from its sha256."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest_of(made: str) -> str:
    """What is configured of a key: its sha256, in hex."""
    return hashlib.sha256(made.encode()).hexdigest()
