"""Keeps Ray's GCS running on this machine, where its tables are in Redis. No Ray here: a `Gcs` acts.

Ray never starts its GCS again by itself: its answer is to replace the head node, which would end every program on it.
While the GCS is away nothing can be scaled or placed anew, and nothing else stops: actors, the controller and the
supervisors talk to each other directly, programs do not talk to Ray at all.

1. wait     for the GCS process to end
2. back off longer after each early death, as for programs
3. look     until Redis answers and still holds the tables. A GCS on empty tables would be another cluster: everything
            that Ray runs would end itself on meeting it. So without the tables it stays away, and streams go on
4. start    the same command on the same port; everybody reconnects
"""

import logging
from collections.abc import Callable
from typing import Protocol

from cluster.controller import LaunchFailed
from cluster.core.clock import Clock
from cluster.store import StoreUnavailable
from cluster.supervisor import STEADY_S, backoff_s

LOOK_S = 1.0
_log = logging.getLogger(__name__)

Pause = Callable[[float], bool]
"""Waits so many seconds; True as soon as the cluster is leaving."""


class Gcs(Protocol):
    """The GCS process."""

    def wait(self) -> int | None:
        """Return once no GCS runs: its exit status, None when it could not be started."""

    def start(self) -> None:
        """Start it once more. Raises LaunchFailed."""


class Tables(Protocol):
    """What the GCS keeps in Redis."""

    def there(self) -> bool:
        """Whether this cluster's tables are there. Raises StoreUnavailable."""


class GcsKeeper:
    """`run` in a thread that lives as long as the head: Linux ends the GCS with the thread that started it."""

    def __init__(self, gcs: Gcs, tables: Tables | None, clock: Clock, pause: Pause) -> None:
        """`tables`: None when the GCS keeps everything in memory; then its death is only told."""
        self._gcs = gcs
        self._tables = tables
        self._clock = clock
        self._pause = pause
        self._obstacle: str | None = None

    def run(self) -> None:
        """Until the cluster leaves, or the GCS cannot be started again."""
        early = 0
        while True:
            began = self._clock.now()
            code = self._gcs.wait()
            if self._pause(0.0):
                return
            if self._tables is None:
                _log.error("Ray's GCS ended with %s and had no Redis (ray.redis_url): Ray ends within a minute", code)
                return
            early = 0 if self._clock.now() - began >= STEADY_S else early + 1
            _log.warning("Ray's GCS ended with %s", code)
            if self._pause(backoff_s(early)) or not self._await_tables(self._tables):
                return
            try:
                self._gcs.start()
                _log.warning("Ray's GCS was started again")
            except LaunchFailed as error:
                _log.error("cannot start Ray's GCS: %s", error)
            except Exception:  # the guard of this loop: with this thread the GCS would end, for good
                _log.exception("cannot start Ray's GCS")

    def _await_tables(self, tables: Tables) -> bool:
        """False when the cluster leaves first."""
        while (obstacle := _obstacle(tables)) is not None:
            if obstacle != self._obstacle:
                _log.error("Ray's GCS stays away: %s", obstacle)
            self._obstacle = obstacle
            if self._pause(LOOK_S):
                return False
        self._obstacle = None
        return True


def _obstacle(tables: Tables) -> str | None:
    try:
        there = tables.there()
    except StoreUnavailable as error:
        return str(error)
    return None if there else "Redis has lost its tables; streams go on, a restart of the cluster heals it"
