"""`python -m benchmarks.instant.stepped`: one token per step for everybody, a step in one message, as in decoding."""

import sys

from benchmarks.instant.worker import serve
from cluster.program import run

if __name__ == "__main__":
    sys.exit(run("decode", lambda context: serve(context, per_message=1, stepped=True)))
