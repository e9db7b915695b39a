"""What listens where. As a program it tells of every process that it sees: a pod has a network of its own, so the
question is asked in there.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil


class Listening(NamedTuple):
    """A listening TCP socket or a bound UDP one, and the command line of the process that has it."""

    words: list[str]
    host: str
    port: int

    def what(self, names: Iterable[str]) -> str:
        """The first of these names that is in its command line; else all of that."""
        return next((name for name in names if any(name in word for word in self.words)), " ".join(self.words))


def listening(processes: Iterable[psutil.Process]) -> Iterator[Listening]:
    """Every such socket of these processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            for one in process.net_connections("inet"):
                if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    yield Listening(words, one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(listening(psutil.process_iter()))))
