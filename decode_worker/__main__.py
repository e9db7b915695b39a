"""`python -m decode_worker --config FILE --name decode-0 [--supervised]`"""

import sys

from cluster.program import run
from decode_worker.server import serve

if __name__ == "__main__":
    sys.exit(run("decode", serve))
