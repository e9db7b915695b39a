"""Continuous batching: turns runnable sequences into numbered plans and plans' reports into progress.

    1. `next_step`: choose (engine/scheduler.py), reserve the block each row may need, build the Step.
    2. the engine runs it.
    3. `on_done`: positions count as computed, full blocks are published, drawn tokens go to the caller.
One plan is in flight at a time. A sequence removed in mid-plan is forgotten; its late results are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.errors import IntegrityError
from engine.blocks import BlockBooks
from engine.messages import Fill, FilledBlock, Row, RowError, Sampled, Scored, Step, StepDone
from engine.rates import Work
from engine.scheduler import StepBudget, choose
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row brought: `filled` are blocks completed by it (block index in the sequence), `error` a bad row.

    `scored`: of the prompt's tokens from `sequence.scoring.next` on. `written`: positions it computed.
    """

    sequence: Sequence
    sampled: list[Sampled]
    filled: list[tuple[int, FilledBlock]]
    error: RowError | None
    scored: Scored | None = None
    written: int = 0


class Batcher:
    """The sequences of one worker and the plan in flight."""

    def __init__(
        self, books: BlockBooks, block_size: int, budget: StepBudget, *, make_room: Callable[[Sequence], bool]
    ) -> None:
        """`make_room(sequence)` is asked when a row finds no block: True when it freed some."""
        self.books = books
        self.block_size = block_size
        self.budget = budget
        self.sequences: dict[int, Sequence] = {}
        self.plan = 0
        self.plan_sent_at = 0.0
        self._make_room = make_room
        self._in_flight: list[tuple[Sequence, Row]] | None = None
        self._drop: list[int] = []
        self._next_id = 1

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def in_flight_tokens(self) -> int:
        """Positions in the plan in flight."""
        return sum(s.in_flight for s, _ in self._in_flight or [])

    @property
    def in_flight_work(self) -> Work:
        """The plan in flight as what it costs: prompts that are read, and streams."""
        rows = [(sequence, row.start) for sequence, row in self._in_flight or []]
        streams = [start + 1 for sequence, start in rows if start + 1 >= len(sequence.tokens)]
        reads = tuple((start, s.in_flight) for s, start in rows if start + 1 < len(s.tokens))
        return Work(reads, len(streams), sum(streams))

    def new_id(self) -> int:
        """An id for a sequence, never used before on this engine."""
        self._next_id += 1
        return self._next_id

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks. Valid at any time, twice as well."""
        sequence.release(self.books)
        if self.sequences.pop(sequence.id, None) is not None and sequence.last_plan:
            self._drop.append(sequence.id)

    def next_step(self, now: float) -> Step | None:
        """The next plan, or None while one is in flight or nothing can run."""
        if self._in_flight is not None:
            return None
        rows: list[tuple[Sequence, Row]] = []
        before = -1
        while not rows and before != len(self.sequences):  # who made room may have been all who were chosen
            before = len(self.sequences)
            rows = self._rows()
        if not rows:
            return None
        self.plan += 1
        self.plan_sent_at = now
        for sequence, row in rows:
            sequence.last_plan = self.plan
            sequence.in_flight = len(row.tokens or [0])
            sequence.known_blocks = len(sequence.blocks)
            sequence.knows_rules |= row.start_rules is not None
        self._in_flight = rows
        self.books.plan_sent(self.plan)
        drop, self._drop = self._drop, []
        return Step(plan=self.plan, rows=[row for _, row in rows], drop=drop)

    def on_done(self, done: StepDone) -> list[RowResult]:
        """Account for a plan that came back. Rows of removed sequences yield nothing."""
        if self._in_flight is None or done.plan != self.plan:
            raise IntegrityError(f"plan {done.plan} came back, {self.plan} was expected")
        rows, self._in_flight = self._in_flight, None
        filled: dict[int, list[FilledBlock]] = {}
        for block in done.filled:
            filled.setdefault(block.sequence, []).append(block)
        results = []
        for number, (sequence, row) in enumerate(rows):
            sequence.in_flight = 0
            if sequence.id not in self.sequences:
                continue
            error = done.errors.get(number)
            complete = [] if error else self._advance(sequence, row, filled.get(sequence.id, []))
            sampled, scored = ([], None) if error else (done.samples[number], done.scored.get(number))
            written = len(row.tokens or [0]) if row.write and not error else 0
            results.append(RowResult(sequence, sampled, complete, error, scored, written))
        self.books.plan_back(done.plan)
        return results

    def _rows(self) -> list[tuple[Sequence, Row]]:
        """The rows of a plan, each with its blocks, without those that had to make room for others."""
        rows = []
        for sequence, share in choose(self.sequences.values(), self.budget):
            if self._fit(sequence, share):
                rows.append((sequence, self._row(sequence, share)))
        return [(s, row) for s, row in rows if s.id in self.sequences]

    def _fit(self, sequence: Sequence, share: int) -> bool:
        """Own the blocks that this row writes; ask for room as long as that helps."""
        end = min(sequence.computed + share, len(sequence.tokens))
        while sequence.id in self.sequences and sequence.runnable:
            if sequence.reserve(self.books, end, self.block_size):
                return True
            if not self._make_room(sequence):
                return False
        return False

    def _row(self, sequence: Sequence, share: int) -> Row:
        write = sequence.computed < len(sequence.tokens)
        start = sequence.computed if write else len(sequence.tokens) - 1
        end = start + share
        first, last = start // self.block_size, end // self.block_size
        fills = [Fill(b, self.books.generation(b)) for b in sequence.blocks[first:last]] if write else []
        samples = sequence.draws if end == len(sequence.tokens) else []
        return Row(
            sequence=sequence.id,
            start=start,
            tokens=sequence.tokens[start:end],
            table_from=sequence.known_blocks,
            new_blocks=sequence.blocks[sequence.known_blocks :],
            write=write,
            fills=fills,
            samples=samples,
            start_rules=sequence.start_rules() if samples else None,
            score=sequence.scoring.share(start, sequence.tokens, end) if sequence.scoring else None,
        )

    def _advance(self, sequence: Sequence, row: Row, filled: list[FilledBlock]) -> list[tuple[int, FilledBlock]]:
        if row.write:
            sequence.computed = row.start + len(row.tokens or [])
        keys = sequence.keys()
        complete = []
        for block in filled:
            at = sequence.blocks.index(block.block, row.start // self.block_size)
            self.books.publish(block.block, block.generation, keys, at, block.digest)
            complete.append((at, block))
        return complete
