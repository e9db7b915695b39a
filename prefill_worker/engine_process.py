"""The engine process of a prefill worker: engine and transport are brought together here, and nowhere below."""

import sys

from engine.process import main
from kv_transfer.transports import make_transport

if __name__ == "__main__":
    sys.exit(main(make_transport))
