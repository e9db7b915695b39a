"""The watch stream to one worker (proto/watch.proto): what it is, how it is, what it caches."""

import random
from collections.abc import Callable

from cluster.core.clock import Clock
from cluster.credentials import Credentials
from cluster.rpc import channel, proof_metadata
from cluster.stubs.watch_pb2 import WatchEvent, WatchRequest
from cluster.stubs.watch_pb2_grpc import WatchStub
from router.effects import StreamClosed
from router.links import OnFailure, StreamKeeper, answered, connect

OnWatch = Callable[[str, WatchEvent | StreamClosed], None]


class WatchClient(StreamKeeper):
    """Reports every event to `on_event`, on the event loop."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        clock: Clock,
        rng: random.Random,
        failed: OnFailure,
        *,
        epoch: int,
        on_event: OnWatch,
    ) -> None:
        super().__init__(address, credentials, clock, rng, failed)
        self._epoch = epoch
        self._on_event = on_event

    async def serve(self) -> str:
        async with channel(self.address, self._credentials.tls) as connection:
            await connect(connection)
            proof = self._credentials.proof(self.address)
            call = WatchStub(connection).Open(WatchRequest(router_epoch=self._epoch), metadata=proof_metadata(proof))
            await answered(call, proof)
            while isinstance(event := await call.read(), WatchEvent):
                if not self.current:
                    return "dropped"
                self._on_event(self.address, event)
            return "the worker ended the watch"

    def report_closed(self, event: StreamClosed) -> None:
        self._on_event(self.address, event)
