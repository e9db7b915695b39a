"""Fault points of a worker's server (cluster/core/faults.py): its streams, its watches, its own life.

Each `make_...` gives the plain thing unless a fault is set for it.
"""

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio

from cluster.core.clock import sleep
from cluster.core.faults import Faults, Stages, Trigger
from cluster.streams import ServerStream
from cluster.stubs.watch_pb2 import WatchHello
from cluster.watch import SnapshotProvider, StatusProvider, WatchPublisher

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Any)


def make_stages(faults: Faults) -> Stages:
    """Frozen: the event loop stands still, as in a process that does not run; killed: SIGKILL."""
    return Stages(faults, kill=lambda: os.kill(os.getpid(), signal.SIGKILL), freeze=sleep)


def make_stream(
    context: grpc.aio.ServicerContext[Incoming, Outgoing],
    breaks: Trigger | None,
    stages: Stages,
    join: Callable[[list[Outgoing]], Outgoing] | None = None,
) -> ServerStream[Incoming, Outgoing]:
    """One accepted stream. `breaks` is shared by all streams of a worker: it counts the messages of all."""
    if breaks is None and not stages:
        return ServerStream(context, join=join)
    return _FaultyStream(context, breaks, stages, join)


class _FaultyStream(ServerStream[Incoming, Outgoing]):
    def __init__(
        self,
        context: grpc.aio.ServicerContext[Incoming, Outgoing],
        breaks: Trigger | None,
        stages: Stages,
        join: Callable[[list[Outgoing]], Outgoing] | None,
    ) -> None:
        super().__init__(context, join=join)
        self._breaks = breaks
        self._stages = stages

    def send(self, message: Outgoing) -> None:
        self._stages.passed(message.WhichOneof("message") or "")
        if self._breaks is not None and self._breaks.hit() is not None:
            self.cut()
        else:
            super().send(message)


def make_publisher(
    hello: WatchHello, snapshot: SnapshotProvider, status: StatusProvider, heartbeat_s: float, faults: Faults
) -> WatchPublisher:
    """What routers that watch this worker are told."""
    drop = faults.trigger("watch.drop")
    if drop is None:
        return WatchPublisher(hello, snapshot, status, heartbeat_s=heartbeat_s)
    return _DroppingPublisher(drop, hello, snapshot, status, heartbeat_s)


class _DroppingPublisher(WatchPublisher):
    def __init__(
        self,
        drop: Trigger,
        hello: WatchHello,
        snapshot: SnapshotProvider,
        status: StatusProvider,
        heartbeat_s: float,
    ) -> None:
        super().__init__(hello, snapshot, status, heartbeat_s=heartbeat_s)
        self._drop = drop

    def publish_status(self) -> None:
        if self._drop.hit() is not None:
            self.drop_all()
        else:
            super().publish_status()
