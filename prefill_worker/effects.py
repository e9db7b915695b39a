"""What the prefill core wants done. The shell (prefill_worker/server.py) carries it out; the core never does I/O."""

from dataclasses import dataclass

from cluster.stubs.link_pb2 import FromPrefill
from engine.messages import Command


@dataclass(frozen=True, slots=True)
class ToEngine:
    """To every rank of this worker."""

    command: Command


@dataclass(frozen=True, slots=True)
class ToDecode:
    """Over the link of one decode worker."""

    link: str
    message: FromPrefill


@dataclass(frozen=True, slots=True)
class Lost:
    """This worker cannot go on: tell everybody and exit."""

    reason: str


Effect = ToEngine | ToDecode | Lost
