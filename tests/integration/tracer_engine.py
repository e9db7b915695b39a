"""An engine process for tests: `python -m tests.integration.tracer_engine --fd N`, with the in-process transport."""

import sys

from cluster.core.clock import SystemClock
from engine.process import main
from engine.wire import Transport
from kv_transfer.transports.inprocess import InProcessNetwork, InProcessTransport

_NETWORK = InProcessNetwork()


def make_transport(kind: str, options: dict[str, str], agent: str) -> Transport:
    """Only "inprocess": the engine can read its own pool as a peer of itself."""
    if kind != "inprocess":
        raise ValueError(f"this test engine has no transport {kind!r}")
    return InProcessTransport(_NETWORK, agent, SystemClock())


if __name__ == "__main__":
    sys.exit(main(make_transport))
