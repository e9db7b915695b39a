"""The workers last heard of, in a file: where a router looks that starts when nobody can tell it who is there.

Each list that a supervisor tells is kept; a list without a worker teaches nothing. What is read are addresses only, and
only hints: a worker is known by its live Hello (router/workers.py), and the first list that comes replaces them all.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

_MAX_BYTES = 1024 * 1024
_log = logging.getLogger(__name__)


class WorkersFile:
    """Shared by the routers of one machine, replaced as a whole. No path: nothing is kept."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path is not None else None
        self._kept: tuple[str, ...] = ()

    def load(self) -> tuple[str, ...]:
        """Addresses, none when there are none or they cannot be understood."""
        if self._path is None or not self._path.exists():
            return ()
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("cannot read %s: %s", self._path, error)
            return ()
        if not isinstance(found, list) or not all(isinstance(address, str) for address in found):
            _log.warning("%s is no list of addresses", self._path)
            return ()
        return tuple(found)

    def keep(self, addresses: Sequence[str]) -> None:
        """Replace the list, if it is another one. A file that cannot be written is only a pity."""
        kept = tuple(sorted(addresses))
        if self._path is None or not kept or kept == self._kept:
            return
        self._kept = kept
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            scratch.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            scratch.replace(self._path)
        except OSError as error:
            _log.warning("cannot write %s: %s", self._path, error)
