"""What a program and its supervisor say to each other: JSON lines over the program's stdin and stdout.

    program -> supervisor   {"ready": {"name", "role", "address", "epoch", "http", "pids"}}   once it can take calls
    supervisor -> program   {"members": [{"name", "role", "address", "epoch"}, ...]}          the whole list, every time
    end of stdin            the supervisor is gone: stop in order

The program's log goes to stderr.
"""

from typing import Literal

import msgspec

from cluster.core.errors import HeadraceError

Role = Literal["router", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "router")
MODULES: dict[Role, str] = {"prefill": "prefill_worker", "decode": "decode_worker", "router": "router"}
"""The entry point of each role: `python -m <module>`."""

MAX_LINE_BYTES = 4 * 1024 * 1024


class PipeError(HeadraceError):
    """The other end of the pipe said something that is not in the protocol."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One running program of the cluster. `address` is host:port of its gRPC server."""

    name: str
    role: Role
    address: str
    epoch: int


class Ready(Member, frozen=True, kw_only=True):
    """What a program reports once it can take calls. `pids` are all its processes.

    `http` and `admin` are a router's base URLs: for clients, and for who looks after it.
    """

    http: str | None = None
    admin: str | None = None
    pids: tuple[int, ...] = ()

    def member(self) -> Member:
        """The part that other programs need to know."""
        return Member(name=self.name, role=self.role, address=self.address, epoch=self.epoch)


class ReadyLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line from a program."""

    ready: Ready


class MembersLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line to a program."""

    members: tuple[Member, ...]


_encoder = msgspec.json.Encoder()
_ready = msgspec.json.Decoder(ReadyLine)
_members = msgspec.json.Decoder(MembersLine)


def encode(line: ReadyLine | MembersLine) -> bytes:
    """One line, newline included."""
    return _encoder.encode(line) + b"\n"


def decode_ready(line: bytes) -> Ready:
    """A program's line. Raises PipeError."""
    try:
        return _ready.decode(line).ready
    except msgspec.MsgspecError as error:
        raise PipeError(f"not a ready line: {error}") from error


def decode_members(line: bytes) -> tuple[Member, ...]:
    """A supervisor's line. Raises PipeError."""
    try:
        return _members.decode(line).members
    except msgspec.MsgspecError as error:
        raise PipeError(f"not a members line: {error}") from error


def role_of(name: str) -> Role:
    """The role in a program's name, `decode-0` -> decode. Raises PipeError."""
    role, dash, index = name.rpartition("-")
    if role in ROLES and dash and index.isdecimal():
        return role
    raise PipeError(f"{name!r} is not the name of a program: expected one like decode-0")
