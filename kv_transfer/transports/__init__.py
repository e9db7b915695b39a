"""Transports: what moves KV bytes between engines (the border is engine/wire.py). One is chosen at start."""

from cluster.core.clock import SystemClock
from cluster.core.errors import TransferError
from engine.wire import Transport


def make_transport(kind: str, options: dict[str, str], agent: str) -> Transport:
    """The transport of an engine process. `options` as in NixlTransport.

    Raises TransferError when the kind is unknown or the machine lacks what the options require.
    """
    # Imported here: who moves bytes within one process needs no NIXL, and the servers load neither.
    if kind == "nixl":
        from kv_transfer.transports.nixl import NixlTransport

        return NixlTransport(agent, options, SystemClock())
    if kind == "inprocess":
        from kv_transfer.transports.inprocess import PROCESS, InProcessTransport

        return InProcessTransport(PROCESS, agent, SystemClock())
    raise TransferError(f"transport {kind!r} is not one of nixl, inprocess")
