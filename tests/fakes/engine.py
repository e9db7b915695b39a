"""An engine without a process: its bytes are real, and whoever owns it calls `handle` instead of sending."""

from cluster.core.clock import ManualClock
from cluster.core.config import ClusterConfig
from cluster.core.errors import TransferError
from engine.messages import (
    AddPeer,
    Command,
    Copy,
    CopyDone,
    Digest,
    DigestDone,
    PeerAdded,
    Poison,
    Read,
    ReadDone,
    ReadFailed,
    Report,
    Step,
)
from engine.model.base import Model
from engine.pool import HostMemory
from engine.stepper import Stepper
from kv_transfer.transports.ranges import check_read


class FakeEngine:
    """One engine's bytes: the real stepper, memory and model, driven message by message."""

    def __init__(
        self,
        config: ClusterConfig,
        model: Model,
        num_blocks: int,
        clock: ManualClock,
        memories: dict[str, HostMemory],
    ) -> None:
        self.model = model
        layout = self.model.layout
        self.memory = HostMemory(layout, num_blocks, 2 * config.handoff.slots, config.handoff.slot_bytes)
        self.memory.poison_all()
        self.model.bind(self.memory.pool)
        self.stepper = Stepper(self.model, self.memory, clock)
        self._memories = memories

    def handle(self, command: Command) -> Report | None:
        if isinstance(command, Step):
            return self.stepper.run(command)
        if isinstance(command, Copy):
            self.memory.copy_in(command.slot, command.blocks)
            return CopyDone(command.id, self.memory.digests(command.blocks), 0.0)
        if isinstance(command, Digest):
            return DigestDone(command.id, self.memory.digests(command.blocks))
        if isinstance(command, Poison):
            self.memory.poison(command.blocks)
            return None
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
            at = 0
            for address, size in command.ranges:
                offset = address - remote.pool_address
                self.memory.staging[command.slot, at : at + size] = remote.pool.reshape(-1)[offset : offset + size]
                at += size
            return ReadDone(command.id, 0.0)
        return None
