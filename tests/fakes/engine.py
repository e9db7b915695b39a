"""An engine without a process: its bytes are real, and whoever owns it calls `handle` instead of sending."""

from cluster.core.clock import ManualClock
from cluster.core.config import ClusterConfig
from cluster.core.errors import TransferError
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    Digest,
    PeerAdded,
    Poison,
    Prepare,
    Read,
    ReadDone,
    ReadFailed,
    Report,
    Step,
)
from engine.model.base import Model
from engine.pool import HostMemory
from kv_transfer.transports.ranges import check_read
from simulation.local_engine import LocalEngine, pieces
from simulation.vocabulary import tracer_vocabulary_of


class FakeEngine(LocalEngine):
    """One engine's bytes, driven message by message; its reads take no time."""

    def __init__(
        self,
        config: ClusterConfig,
        model: Model,
        num_blocks: int,
        clock: ManualClock,
        memories: dict[str, HostMemory],
    ) -> None:
        slots, vocabulary = 2 * config.handoff.slots, tracer_vocabulary_of(model.vocab_size)
        super().__init__(model, num_blocks, slots, config.handoff.slot_bytes, clock, vocabulary)
        self._memories = memories

    def handle(self, command: Command) -> Report | None:
        if isinstance(command, Step | Copy | Digest | Poison | Prepare):
            return self.compute(command)
        if isinstance(command, AddPeer):
            return PeerAdded(command.peer, False, 1.0)
        if isinstance(command, Read):
            remote = self._memories.get(command.peer)
            if remote is None:
                return ReadFailed(command.id, "the peer is gone")
            try:
                check_read(command.ranges, remote.pool_address, remote.pool.nbytes, self.memory.staging, command.slot)
            except TransferError as error:
                return ReadFailed(command.id, str(error))
            self.land(command.slot, 0, pieces(remote, remote.pool_address, command.ranges))
            return ReadDone(command.id, 0.0)
        return None
