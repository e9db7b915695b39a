"""A supervisor's way to the controller, in a thread of its own: when nobody answers, this thread waits.

The supervisor's thread never does: a program that died is started again whatever has become of the controller.
"""

import logging
import queue
import threading
from collections.abc import Callable

from cluster.supervisor import ProgramStatus

_log = logging.getLogger(__name__)


class Reporter:
    """`tell` says one status to the controller, and whether that heard it."""

    def __init__(self, tell: Callable[[ProgramStatus], bool]) -> None:
        self._tell = tell
        self._news: queue.SimpleQueue[ProgramStatus] = queue.SimpleQueue()
        threading.Thread(target=self._keep_telling, name="report", daemon=True).start()

    def report(self, status: ProgramStatus) -> None:
        """Returns at once. Each status is the whole truth: those that a newer one overtakes are not sent."""
        self._news.put(status)

    def _keep_telling(self) -> None:
        while True:
            status = self._news.get()
            while not self._news.empty():
                status = self._news.get()
            if not self._tell(status) and not self._tell(status):  # twice: another controller may have the name now
                _log.warning("nobody to report to: the controller asks when it is back")
