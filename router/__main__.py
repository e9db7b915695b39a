"""`python -m router --config FILE --name router-0 [--supervised]`"""

import sys

from cluster.program import run
from router.server import serve

if __name__ == "__main__":
    sys.exit(run("router", serve))
