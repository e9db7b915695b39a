"""One engine's bytes without a process around them: the real stepper, memory and model, driven command by command."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.core.clock import Clock
from cluster.core.errors import IntegrityError
from cluster.core.grammar import Vocabulary
from engine.grammars import Grammars
from engine.messages import Command, Copy, CopyDone, Digest, DigestDone, Poison, Prepare, Report, Step
from engine.model.base import Model
from engine.model.loader import converter
from engine.pool import HostMemory, run_copy
from engine.stepper import Stepper


class LocalEngine:
    """Pool, staging and model of one engine. The caller decides when a command runs and when bytes move."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        slots: int,
        slot_bytes: int,
        clock: Clock,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.model = model
        self.memory = HostMemory(model.layout, num_blocks, slots, slot_bytes, converter(model))
        self.memory.poison_all()
        model.bind(self.memory.pool)
        self.grammars = Grammars(vocabulary)
        self.stepper = Stepper(model, self.memory, clock, self.grammars)

    def compute(self, command: Command) -> Report | None:
        """What the compute thread does with a command. Raises IntegrityError for one that is not its business."""
        match command:
            case Step():
                return self.stepper.run(command)
            case Copy():
                digests, converted = run_copy(self.memory, command)
                return CopyDone(command.id, digests, 0.0, converted)
            case Digest():
                return DigestDone(command.id, self.memory.digests(command.blocks))
            case Prepare():
                return self.grammars.prepare(command)
            case Poison():
                self.memory.poison(command.blocks)
                return None
            case _:
                raise IntegrityError(f"{type(command).__name__} is not for the compute thread")

    def land(self, slot: int, at: int, sources: Sequence[NDArray[np.uint8]]) -> None:
        """Bytes arrive in a staging slot, back to back from offset `at`."""
        for source in sources:
            self.memory.staging[slot, at : at + source.nbytes] = source
            at += source.nbytes


def pieces(memory: HostMemory, start: int, ranges: Sequence[tuple[int, int]]) -> list[NDArray[np.uint8]]:
    """Views of (address, bytes) ranges of a pool that begins at `start`: they show what is there when looked at."""
    flat = memory.pool.reshape(-1)
    return [flat[address - start : address - start + size] for address, size in ranges]
