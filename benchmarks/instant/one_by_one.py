"""`python -m benchmarks.instant.one_by_one`: every token in a message of its own, as in decoding."""

import sys

from benchmarks.instant.worker import serve
from cluster.program import run

if __name__ == "__main__":
    sys.exit(run("decode", lambda context: serve(context, per_message=1)))
