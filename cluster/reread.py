"""Files that are read again when they change: certificates, tenants. The newest content that can be used counts.

1. look   at the files' times whenever somebody asks, which costs microseconds; nothing watches
2. read   all of them, and again if one was replaced meanwhile
3. keep   the last good content while the new one cannot be used, and say so once
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from cluster.core.errors import HeadraceError

_TRIES = 3  # who replaces several files does not take longer
_log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]


class Reread(Generic[T]):
    """What `read` makes of `files`, now. Thread-safe."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """Raises what `read` raises (OSError, ValueError, HeadraceError) when they cannot be used."""
        self._files = tuple(files)
        self._read = read
        self._lock = threading.Lock()
        self._seen, self._current = self._read_whole()

    def __str__(self) -> str:
        return ", ".join(str(file) for file in self._files)

    def current(self) -> T:
        """The same object until a file changes. Never raises: the old content goes on where the new one cannot."""
        with self._lock:
            stamp = self._stamp()  # before they are read: what is put right meanwhile is seen next time
            if stamp != self._seen:
                self._seen = stamp  # said once, until they change again
                try:
                    self._seen, self._current = self._read_whole()
                    _log.info("read again: %s", self)
                except (OSError, ValueError, HeadraceError) as error:
                    _log.error("%s cannot be used, what was read before goes on: %s", self, error)
            return self._current

    def _stamp(self) -> Stamp:
        return tuple(_times(file) for file in self._files)

    def _read_whole(self) -> tuple[Stamp, T]:
        for _ in range(_TRIES):
            before = self._stamp()
            content = self._read()
            if self._stamp() == before:
                return before, content
        raise ValueError("they change all the time")


def _times(file: Path) -> tuple[int, int, int]:
    """Of what a link leads to: a mounted secret is one."""
    try:
        stat = os.stat(file)
    except OSError:  # reading says so
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
