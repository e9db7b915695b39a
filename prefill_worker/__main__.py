"""`python -m prefill_worker --config FILE --name prefill-0 [--supervised]`"""

import sys

from cluster.program import run
from prefill_worker.server import serve

if __name__ == "__main__":
    sys.exit(run("prefill", serve))
