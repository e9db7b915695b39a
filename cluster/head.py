"""The head process of a cluster on this machine: `python -m cluster.head`, started by `headrace up`.

1. lock      one head per run directory; its pid is in the lock
2. start     Ray and the controller (cluster/ray_launcher.py)
3. relay     every status as one JSON line on stdout, for `up` to show; nobody needs to read them
4. stop      on SIGTERM or, tied, at the end of stdin: programs first, then Ray; nothing is left.
             With --keep, where Ray spans several machines (cluster/node.py), SIGTERM means this process alone: another
             head goes on with what runs. `headrace down` then says SIGINT
"""

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from cluster.controller import ClusterStatus
from cluster.core.errors import HeadraceError
from cluster.logs import setup_logging
from cluster.pipe import Role
from cluster.ray_launcher import Head
from cluster.run_dir import RunDir

ALREADY_RUNNING = 3
_log = logging.getLogger(__name__)


def main() -> int:
    """Returns 0 after an orderly stop, 3 when the cluster runs already, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Headrace: the head process of a cluster")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--modules", required=True, help="JSON: role -> entry point")
    parser.add_argument("--tied", action="store_true", help="stop at the end of stdin")
    parser.add_argument("--keep", action="store_true", help="leave programs and Ray alone on SIGTERM")
    options = parser.parse_args()
    run_dir = RunDir(options.run_dir)
    config = run_dir.config()
    setup_logging("head", config.log_level, config.log_format)
    if (lock := run_dir.hold()) is None:
        _log.error("the cluster is running already")
        return ALREADY_RUNNING

    relay = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Ray prints to stdout; that belongs into the log

    def tell(status: ClusterStatus) -> None:
        relay.write(msgspec.json.encode(status) + b"\n")

    with lock, relay:
        try:
            return Head(run_dir, msgspec.json.decode(options.modules, type=dict[Role, str])).run(
                tell, tied=options.tied, keep=options.keep
            )
        except HeadraceError as error:
            _log.error("%s", error)
            return 1


if __name__ == "__main__":
    sys.exit(main())
