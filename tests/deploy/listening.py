"""What listens where, by every process that this one sees. As a program it says so: a pod has a network of its own,
so the question is asked in there.
"""

import contextlib
import json
import sys
from collections.abc import Iterator

import psutil


def listening() -> Iterator[tuple[list[str], str, int]]:
    """Command line, address and port of each listening TCP socket and each bound UDP one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            for one in process.net_connections("inet"):
                if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    yield words, one.laddr.ip.removeprefix("::ffff:"), one.laddr.port


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(listening())))
