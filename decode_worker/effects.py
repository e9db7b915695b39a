"""What the decode core wants done. The shell (decode_worker/server.py) carries it out; the core never does I/O."""

from dataclasses import dataclass

from cluster.stubs.common_pb2 import WorkerAddress
from cluster.stubs.link_pb2 import FromDecodePeer
from cluster.stubs.session_pb2 import FromDecode
from engine.messages import Command


@dataclass(frozen=True, slots=True)
class ToEngine:
    """To every rank of this worker."""

    command: Command


@dataclass(frozen=True, slots=True)
class ToRouter:
    session: str
    message: FromDecode


@dataclass(frozen=True, slots=True)
class ToPrefill:
    """Over the link to one prefill worker, named by its agent (worker + epoch)."""

    peer: str
    message: FromDecodePeer


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link; `link_opened` or `link_closed` follows."""

    peer: str
    address: WorkerAddress


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close a link; nothing more is heard of it."""

    peer: str


@dataclass(frozen=True, slots=True)
class Lost:
    """This worker cannot go on: tell everybody and exit."""

    reason: str


Effect = ToEngine | ToRouter | ToPrefill | Dial | HangUp | Lost
