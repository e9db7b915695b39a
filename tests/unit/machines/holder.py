"""A prefill worker as a decode worker sees it: memory, jobs, and what an honest one says of them next."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.ids import agent_name
from cluster.core.keys import KeyChain, root_key
from cluster.stubs.common_pb2 import WorkerAddress
from cluster.stubs.link_pb2 import (
    First,
    FirstToken,
    FromPrefill,
    Job,
    JobDone,
    Offer,
    OfferedBlock,
    PrefillHello,
    Recheck,
)
from tests.unit.machines.paper import EMPTY, LAYOUT, B, Content, contents, digest_of, draw, identity

POOL = 1 << 20  # where every holder's pool begins


@dataclass
class Work:
    """One job on a holder: which of its blocks are in which block there, how many were offered, what was said."""

    job: Job
    blocks: list[int]
    keys: list[bytes]
    offered: int = 0
    drawn: bool = False
    done: bool = False


@dataclass
class Holder:
    """A prefill worker: memory and jobs."""

    name: str
    memory: dict[int, Content] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    rechecks: list[Recheck] = field(default_factory=list)

    @property
    def peer(self) -> str:
        return agent_name(self.name, 1)

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, epoch=1, address=self.name)

    def hello(self) -> PrefillHello:
        return PrefillHello(
            identity=identity(self.name, "prefill"),
            agent=self.peer,
            agent_metadata=b"m",
            pool_address=POOL,
            block_bytes=LAYOUT.block_bytes,
        )

    def take(self, job: Job) -> None:
        assert job.attempt not in self.works, "the same job twice"
        blocks = []
        for content in contents(job.tokens):
            blocks.append(len(self.memory))
            self.memory[blocks[-1]] = content
        keys = KeyChain(root_key(b"weights", salt=job.salt), B).extend(list(job.tokens))
        self.works[job.attempt] = Work(job, blocks, keys, job.first_position // B)

    def next_word(self, attempt: str, count: int) -> FromPrefill:
        """What an honest worker would say next of a job: blocks, then the first tokens, then that it is done."""
        work = self.works[attempt]
        if work.offered < len(work.blocks):
            offer = self.offer(attempt, work.offered, count)
            work.offered += len(offer.blocks)
            return FromPrefill(offer=offer)
        if work.job.sample_indices and not work.drawn:
            work.drawn = True
            tokens = [
                FirstToken(index=i, id=draw(work.job.tokens, i, work.job.sampling.seed))
                for i in work.job.sample_indices
            ]
            return FromPrefill(first=First(attempt=attempt, tokens=tokens))
        work.done = True
        return FromPrefill(done=JobDone(attempt=attempt))

    def offer(self, attempt: str, start: int, count: int) -> Offer:
        work = self.works[attempt]
        right = contents(work.job.tokens)
        blocks = [
            OfferedBlock(block=work.blocks[i], generation=1, key=work.keys[i], digest=digest_of(right[i]))
            for i in range(start, min(start + count, len(work.blocks)))
        ]
        return Offer(attempt=attempt, first_position=start * B, blocks=blocks)

    def bytes_at(self, ranges: Sequence[tuple[int, int]]) -> list[Content]:
        """What a read brings now."""
        size = LAYOUT.block_bytes
        wanted = [address for at, length in ranges for address in range(at, at + length, size)]
        return [self.memory.get((address - POOL) // size, EMPTY) for address in wanted]
