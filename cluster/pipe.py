"""What a program and its supervisor say to each other: JSON lines over the program's stdin and stdout.

    program -> supervisor   {"ready": {"name", "role", "address", "epoch", "http", "pids"}}   once it can take calls
    supervisor -> program   {"members": [{"name", "role", "address", "epoch"}, ...], "age_s", the whole list, every time
                             "desired": {"prefill": 1, "decode": 2, "router": 1}}             null: nobody knows
    router -> supervisor    {"ask": {"number", "wish": {"type": "drain", "program": "decode-0"}}}   for an operator
    supervisor -> router    {"answer": {"number", "problem"}}                                 what became of it
    end of stdin            the supervisor is gone: stop in order

The program's log goes to stderr.
"""

from typing import Annotated, Literal

import msgspec

from cluster.core.errors import HeadraceError

Role = Literal["router", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "router")
MODULES: dict[Role, str] = {"prefill": "prefill_worker", "decode": "decode_worker", "router": "router"}
"""The entry point of each role: `python -m <module>`."""

MAX_LINE_BYTES = 4 * 1024 * 1024
Age = Annotated[float, msgspec.Meta(ge=0)]


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


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain"):
    """Drain one program; its successor starts under the same name (docs/decisions/0008-drain.md)."""

    program: str


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scale"):
    """Change how many programs of one role there should be."""

    role: Role
    count: int


Wish = Drain | Scale
"""What an operator wants of the whole cluster. A router cannot do it, and asks whoever can through its supervisor."""


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wish, numbered by the program that asks."""

    number: int
    wish: Wish


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of the ask with this number. `problem` None: it was done."""

    number: int
    problem: str | None = None


class ReadyLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line from a program."""

    ready: Ready


class AskLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another line from a program: a router's."""

    ask: Ask


class AnswerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another line to a router."""

    answer: Answer


class MembersLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line to a program: who runs, and how many programs of each role there should be (None: that is not known).

    `age_s`: how long ago the supervisor was told that; a program that starts anew hears what may be old, and so may one
    that was frozen.
    """

    members: tuple[Member, ...]
    age_s: Age = 0.0
    desired: dict[Role, int] | None = None


class _FromProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of them."""

    ready: Ready | None = None
    ask: Ask | None = None


class _ToProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of them."""

    members: tuple[Member, ...] | None = None
    age_s: Age = 0.0
    desired: dict[Role, int] | None = None
    answer: Answer | None = None


_encoder = msgspec.json.Encoder()
_from_program = msgspec.json.Decoder(_FromProgram)
_to_program = msgspec.json.Decoder(_ToProgram)


def encode(line: ReadyLine | MembersLine | AskLine | AnswerLine) -> bytes:
    """One line, newline included."""
    return _encoder.encode(line) + b"\n"


def decode_from_program(line: bytes) -> Ready | Ask:
    """A program's line. Raises PipeError."""
    try:
        match _from_program.decode(line):
            case _FromProgram(ready=Ready() as ready, ask=None):
                return ready
            case _FromProgram(ready=None, ask=Ask() as ask):
                return ask
    except msgspec.MsgspecError as error:
        raise PipeError(f"not a program's line: {error}") from error
    raise PipeError("not a program's line: it says nothing, or two things")


def decode_to_program(line: bytes) -> MembersLine | Answer:
    """A supervisor's line: who runs, or an answer. Raises PipeError."""
    try:
        match _to_program.decode(line):
            case _ToProgram(members=tuple() as members, age_s=age_s, desired=desired, answer=None):
                return MembersLine(members, age_s, desired)
            case _ToProgram(members=None, desired=None, answer=Answer() as answer):
                return answer
    except msgspec.MsgspecError as error:
        raise PipeError(f"not a supervisor's line: {error}") from error
    raise PipeError("not a supervisor's line: it says nothing, or two things")


def role_of(name: str) -> Role:
    """The role in a program's name, `decode-0` -> decode. Raises PipeError."""
    role, dash, index = name.rpartition("-")
    if role in ROLES and dash and index.isdecimal():
        return role
    raise PipeError(f"{name!r} is not the name of a program: expected one like decode-0")
