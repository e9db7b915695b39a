"""A modelled prefill worker: takes jobs within its window, reads them chunk by chunk, offers what is full."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.modelled.hardware import Hardware
from benchmarks.modelled.traces import BLOCK
from benchmarks.modelled.watch import Publisher
from cluster.core.keys import BlockKey, KeyChain
from cluster.stubs.watch_pb2 import PrefillRate, Rates, Status
from engine.blocks import BlockBooks
from engine.rates import StepRates, Work, report_queue
from engine.scheduler import StepBudget, choose
from engine.sequence import Sequence
from simulation.loop import Loop


@dataclass(slots=True, eq=False)
class Job:
    """A prompt that is read here. `read(positions)` is told of each chunk, `first()` when all is read."""

    sequence: Sequence
    keys: list[BlockKey]
    hits: int
    read: Callable[[int], None]
    first: Callable[[], None]
    published: int = 0


class ModelledPrefill:
    """One prefill worker."""

    role = "prefill"

    def __init__(self, loop: Loop, name: str, epoch: int, hardware: Hardware, window: int) -> None:
        self.loop = loop
        self.name, self.epoch = name, epoch
        self.hardware = hardware
        self.window = window
        self.books = BlockBooks(hardware.pool_positions // BLOCK)
        self.rates = StepRates()
        self.jobs: dict[str, Job] = {}
        self.busy_s = 0.0
        self.publisher = Publisher(loop, self)
        self._budget = StepBudget(hardware.chunk, max_batch=256)
        self._stepping = False
        self._plan = 0

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    def queue(self) -> list[int]:
        return [len(j.sequence.tokens) - j.sequence.computed for j in self.jobs.values()]

    def status(self) -> Status:
        """As prefill_worker/status.py."""
        queue = self.queue()
        return Status(
            ready=True,
            free_blocks=self.books.available,
            running=len(self.jobs),
            queued_tokens=sum(queue),
            queue=report_queue(queue),
            window_tokens=self.window,
            rates=Rates(
                prefill=[PrefillRate(depth=d, tokens_per_s=r) for d, r in self.rates.prefill()],
                chunk_tokens=self.hardware.chunk,
            ),
        )

    def accept(
        self, attempt: str, length: int, keys: list[BlockKey], read: Callable[[int], None], first: Callable[[], None]
    ) -> int | None:
        """Positions that are cached here; None when the job is refused (prefill_worker/core.py, `_reserve`)."""
        hits = self.books.match(keys[: (length - 1) // BLOCK])
        queued, need = sum(self.queue()), length - len(hits) * BLOCK
        if queued and self.window and queued + need > self.window:
            return None
        self._plan += 1
        sequence = Sequence(self._plan, [0] * length, KeyChain(b"", BLOCK), [], self.loop.now)
        self.books.share(hits, sequence.owner)
        sequence.blocks = list(hits)
        if not sequence.reserve(self.books, length, BLOCK):
            sequence.release(self.books)
            return None
        sequence.computed, sequence.runnable = len(hits) * BLOCK, True
        job = Job(sequence, keys, len(hits), read, first, published=len(hits))
        self.jobs[attempt] = job
        if hits:
            job.read(len(hits) * BLOCK)
        self._step()
        return len(hits) * BLOCK

    def leave(self, attempt: str) -> None:
        """Taken, or cancelled; twice as well."""
        job = self.jobs.pop(attempt, None)
        if job is not None:
            job.sequence.release(self.books)
            self._tell()

    def _step(self) -> None:
        if self._stepping:
            return
        rows = choose((j.sequence for j in self.jobs.values()), self._budget)
        if not rows:
            return
        self._stepping = True
        seconds = self.hardware.overhead_s + sum(self.hardware.read_s(s.computed, count) for s, count in rows)
        self.loop.after(seconds, lambda: self._done(rows, seconds))

    def _done(self, rows: list[tuple[Sequence, int]], seconds: float) -> None:
        self._stepping = False
        self.busy_s += seconds
        self.rates.done(Work(tuple((s.computed, count) for s, count in rows), 0, 0), seconds)
        counts = {sequence.id: count for sequence, count in rows}
        for job in list(self.jobs.values()):
            count = counts.get(job.sequence.id)
            if count is not None:
                self._advance(job, count)
        self._tell()
        self._step()

    def _advance(self, job: Job, count: int) -> None:
        sequence = job.sequence
        sequence.computed += count
        full = sequence.computed // BLOCK
        for index in range(job.published, full):
            block = sequence.blocks[index]
            self.books.publish(block, self.books.generation(block), job.keys, index, b"")
        job.published = full
        job.read(count)
        if sequence.computed >= len(sequence.tokens):
            sequence.runnable = False
            job.first()

    def _tell(self) -> None:
        self.publisher.publish(*self.books.take_events())
