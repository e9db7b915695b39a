"""`python -m benchmarks.instant.at_once`: an answer's tokens all in one message."""

import sys

from benchmarks.instant.worker import serve
from cluster.program import run

if __name__ == "__main__":
    sys.exit(run("decode", lambda context: serve(context, per_message=1 << 20)))
