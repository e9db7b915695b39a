"""A modelled decode worker: takes attempts, has prompts read elsewhere or reads them itself, writes tokens.

Its steps are not events of their own: between two changes of its batch all streams go on at the same pace, so only the
next end, or the next prompt that is read, is looked forward to. A prompt takes whole steps, however short it is, and
waits for the one that runs: half a step on average.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.modelled.hardware import Hardware
from benchmarks.modelled.prefill import ModelledPrefill
from benchmarks.modelled.traces import BLOCK, SCALE
from benchmarks.modelled.watch import Publisher, identity
from cluster.core.keys import BlockKey
from cluster.stubs import session_pb2 as pb
from cluster.stubs.watch_pb2 import LinkRate, PrefillRate, Rates, Status, StepTime
from engine.blocks import BlockBooks
from engine.rates import StepRates, Work, report_queue
from simulation.loop import Loop

LATENCY_S = 0.0005
TRIES = 2
Say = Callable[[pb.FromDecode], None]


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt. `output`: how many tokens the trace says it writes."""

    id: str
    submit: pb.Submit
    say: Say
    keys: list[BlockKey]
    output: int
    blocks: list[int] = field(default_factory=list)
    hits: int = 0
    prefill: ModelledPrefill | None = None
    cached: int = 0
    offered: int = 0  # positions read by the prefill worker so far
    arrived: float = 0.0  # when the last of its KV was or will be here
    left: float = 0.0  # positions of its prompt that this worker reads itself
    share: float = 0.0  # of them in each step, on average
    share_of: int = 0  # the chunk that `share` was reckoned for; 0: it has not begun
    started: float = 0.0
    over: bool = False

    @property
    def length(self) -> int:
        return len(self.submit.prompt)

    @property
    def owner(self) -> str:
        return f"attempt {self.id}"


class ModelledDecode:
    """One decode worker. `lookup` gives the keys of an attempt's prompt and how many tokens it writes."""

    role = "decode"

    def __init__(
        self,
        loop: Loop,
        name: str,
        epoch: int,
        hardware: Hardware,
        prefill: dict[str, ModelledPrefill],
        lookup: Callable[[str], tuple[list[BlockKey], int]],
    ) -> None:
        self.loop = loop
        self.name, self.epoch = name, epoch
        self.hardware = hardware
        self.books = BlockBooks(hardware.pool_positions // BLOCK)
        self.rates = StepRates()
        self.attempts: dict[str, Attempt] = {}
        self.publisher = Publisher(loop, self)
        self.local_reads = 0
        self._prefill = prefill
        self._lookup = lookup
        self._wire_free = 0.0
        self._pace = Pace(hardware)
        self._version = 0

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    def status(self) -> Status:
        """As decode_worker/status.py."""
        self._pace.advance(self.loop.now)
        queue = [round(a.left) for a in self._pace.reading]
        handing_off = len(self.attempts) - len(self._pace.streams) - len(queue)
        hardware = self.hardware
        return Status(
            ready=True,
            free_blocks=self.books.available,
            running=len(self._pace.streams),
            handing_off=handing_off,
            queued_tokens=sum(queue),
            queue=report_queue(queue),
            context_tokens=round(self._pace.context),
            rates=Rates(
                prefill=[PrefillRate(depth=d, tokens_per_s=r) for d, r in self.rates.prefill()],
                steps=[StepTime(batch=b, context_tokens=c, seconds=s) for b, c, s in self.rates.steps()],
                links=[LinkRate(epoch=p.epoch, gb_per_s=hardware.gb_per_s) for p in self._prefill.values()],
                chunk_tokens=hardware.chunk,
                local_chunk_tokens=self._pace.local_chunk,
            ),
        )

    def hear(self, message: pb.FromRouter, say: Say) -> None:
        """One message of a router's session."""
        match message.WhichOneof("message"):
            case "hello":
                say(pb.FromDecode(hello=identity(self)))
            case "submit":
                self._submit(message.submit, say)
            case "cancel":
                attempt = self.attempts.get(message.cancel.attempt)
                if attempt is not None:
                    self._leave(attempt)

    # -- admission --------------------------------------------------------------------------------------------------

    def _submit(self, submit: pb.Submit, say: Say) -> None:
        keys, output = self._lookup(submit.attempt)
        attempt = Attempt(submit.attempt, submit, say, keys, output)
        hits = self.books.match(keys[: (attempt.length - 1) // BLOCK])
        self.books.share(hits, attempt.owner)
        taken = self.books.allocate(-(-(attempt.length + output // SCALE) // BLOCK) - len(hits) + 1, attempt.owner)
        if taken is None:
            self.books.release(hits, attempt.owner)
            refused = pb.AttemptRefused(
                attempt=attempt.id, reason="full", free_blocks=self.books.available, retry_after_s=0.05
            )
            say(pb.FromDecode(refused=refused))
            return
        attempt.blocks, attempt.hits = hits + taken, len(hits)
        self.attempts[attempt.id] = attempt
        missing = attempt.length - attempt.hits * BLOCK
        if not submit.prefill or missing <= submit.local_max_tokens:
            self._read_here(attempt)
        else:
            self._ask(attempt, 0)

    def _ask(self, attempt: Attempt, number: int) -> None:
        """A job to the next prefill worker of the list; after two refusals it is given back."""
        if attempt.over:
            return
        if number >= min(TRIES, len(attempt.submit.prefill)):
            attempt.say(pb.FromDecode(no_prefill=pb.NoPrefill(attempt=attempt.id, retry_after_s=0.2)))
            self._leave(attempt)
            return
        worker = self._prefill[attempt.submit.prefill[number].worker]
        attempt.say(pb.FromDecode(prefill_on=pb.PrefillOn(attempt=attempt.id, worker=worker.name)))

        def arrive() -> None:
            if attempt.over:
                return
            attempt.prefill = worker
            cached = worker.accept(
                attempt.id,
                attempt.length,
                attempt.keys,
                lambda n: self._moved(attempt, n),
                lambda: self._first(attempt),
            )
            if cached is None:
                attempt.prefill = None
                self.loop.after(LATENCY_S, lambda: self._ask(attempt, number + 1))
            else:
                attempt.cached = cached

        self.loop.after(LATENCY_S, arrive)

    # -- hand-off ---------------------------------------------------------------------------------------------------

    def _moved(self, attempt: Attempt, positions: int) -> None:
        """A chunk is read there: its blocks move, behind whatever else comes in. What is here already does not."""
        attempt.offered += positions
        wanted = min(positions, attempt.offered - attempt.hits * BLOCK)
        if wanted > 0:
            self._wire_free = max(self._wire_free, self.loop.now) + self.hardware.move_s(wanted)
            attempt.arrived = self._wire_free

    def _first(self, attempt: Attempt) -> None:
        """The prompt is read there; its first token is told at once, decoding begins when all KV is here."""
        self.loop.after(LATENCY_S, lambda: self._tokens(attempt, 0, 1))
        self.loop.at(max(attempt.arrived, self.loop.now) + LATENCY_S, lambda: self._handed_off(attempt))

    def _handed_off(self, attempt: Attempt) -> None:
        if attempt.over:
            return
        if attempt.prefill is not None:
            attempt.prefill.leave(attempt.id)
        attempt.say(pb.FromDecode(handed_off=pb.HandedOff(attempt=attempt.id, cached_tokens=attempt.cached)))
        self._publish(attempt)
        self._stream(attempt)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _read_here(self, attempt: Attempt) -> None:
        self.local_reads += 1
        cached = attempt.hits * BLOCK
        attempt.say(pb.FromDecode(prefill_on=pb.PrefillOn(attempt=attempt.id, worker="local", cached_tokens=cached)))
        attempt.left = attempt.length - cached
        self._change(lambda: self._pace.read(attempt))

    def _stream(self, attempt: Attempt) -> None:
        if attempt.output <= 1:
            self._end(attempt)
        else:
            self._change(lambda: self._pace.write(attempt))

    def _change(self, change: Callable[[], None]) -> None:
        """The batch changes: look forward to its next event."""
        self._pace.advance(self.loop.now)
        change()
        self._version += 1
        version, wait = self._version, self._pace.next_s()
        work = self._pace.work()
        if work is not None:
            self.rates.done(work, self._pace.step_s())
        if wait is not None:
            self.loop.after(wait, lambda: self._due(version))

    def _due(self, version: int) -> None:
        if version != self._version:
            return
        self._pace.advance(self.loop.now)
        for attempt in self._pace.take_read():
            self._tokens(attempt, 0, 1)
            self._publish(attempt)
            if attempt.output <= 1:
                self._end(attempt)
            else:
                self._pace.write(attempt)
        for attempt in self._pace.take_written():
            self._end(attempt)
        self._change(lambda: None)

    def _end(self, attempt: Attempt) -> None:
        if attempt.output > 1:
            self._tokens(attempt, 1, attempt.output - 1)
        self._leave(attempt)

    def _tokens(self, attempt: Attempt, offset: int, count: int) -> None:
        if attempt.over:
            return
        end = "eos" if offset + count >= attempt.output else ""
        run = pb.TokenRun(attempt=attempt.id, index=0, offset=offset, ids=[1] * count, end=end)
        attempt.say(pb.FromDecode(tokens=pb.Tokens(runs=[run])))

    def _publish(self, attempt: Attempt) -> None:
        """The prompt's full blocks are in the prefix index from now on."""
        for index in range(attempt.hits, attempt.length // BLOCK):
            block = attempt.blocks[index]
            self.books.publish(block, self.books.generation(block), attempt.keys, index, b"")
        self.publisher.publish(*self.books.take_events())

    def _leave(self, attempt: Attempt) -> None:
        attempt.over = True
        del self.attempts[attempt.id]
        if attempt.prefill is not None:
            attempt.prefill.leave(attempt.id)
        self.books.release(attempt.blocks, attempt.owner)
        self.publisher.publish(*self.books.take_events())
        if self._pace.drop(attempt, self.loop.now):
            self._change(lambda: None)


class Pace:
    """Streams and prompts of one decode worker between two changes, at an even pace."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.local_chunk = max(1, int(hardware.chunk * hardware.local_share))
        self.streams: dict[str, Attempt] = {}
        self.reading: list[Attempt] = []
        self.context = 0.0
        self._steps = 0.0
        self._ends: list[tuple[float, str]] = []
        self._at = 0.0

    def step_s(self) -> float:
        """One step now: a token per stream, and a chunk of a prompt."""
        seconds = self.hardware.decode_s(len(self.streams), self.context) if self.streams else self.hardware.overhead_s
        if self.reading:
            head = self.reading[0]
            seconds += self.hardware.read_s(int(head.length - head.left), self._chunk())
        return seconds

    def work(self) -> Work | None:
        """What a step now computes."""
        if not self.streams and not self.reading:
            return None
        reads = [(int(a.length - a.left), self._chunk()) for a in self.reading[:1]]
        return Work(tuple(reads), len(self.streams), round(self.context))

    def next_s(self) -> float | None:
        """Until the next stream ends or the next prompt is read."""
        steps = [self._ends[0][0] - self._steps] if self._ends else []
        if self.reading:
            steps.append(self.reading[0].left / self._share())
        return max(0.0, min(steps)) * self.step_s() if steps else None

    def advance(self, now: float) -> None:
        """Time has passed."""
        if self.streams or self.reading:
            steps = (now - self._at) / self.step_s()
            self._steps += steps
            self.context += steps * len(self.streams) / SCALE
            if self.reading:
                head = self.reading[0]
                head.left -= steps * self._share()
        self._at = now

    def read(self, attempt: Attempt) -> None:
        """A prompt to be read here, shortest first."""
        self.reading.append(attempt)
        self.reading.sort(key=lambda a: a.left)

    def write(self, attempt: Attempt) -> None:
        """A stream: its first token is out."""
        self.streams[attempt.id] = attempt
        self.context += attempt.length
        attempt.started = self._steps
        heapq.heappush(self._ends, (self._steps + attempt.output - 1, attempt.id))

    def take_read(self) -> list[Attempt]:
        done = [a for a in self.reading if a.left <= 1e-6]
        self.reading = [a for a in self.reading if a.left > 1e-6]
        return done

    def take_written(self) -> list[Attempt]:
        done = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            attempt = self.streams.get(heapq.heappop(self._ends)[1])
            if attempt is not None:
                done.append(attempt)
        return done

    def drop(self, attempt: Attempt, now: float) -> bool:
        """It is over. Whether it took part."""
        self.advance(now)
        if self.streams.pop(attempt.id, None) is not None:
            written = (self._steps - attempt.started) / SCALE
            self.context = max(0.0, self.context - attempt.length - written) if self.streams else 0.0
            self._ends = [end for end in self._ends if end[1] != attempt.id]
            heapq.heapify(self._ends)
            return True
        if attempt in self.reading:
            self.reading.remove(attempt)
            return True
        return False

    def _chunk(self) -> int:
        return max(1, round(self._share()))

    def _share(self) -> float:
        """Positions of the first prompt that a step reads. It ends with a step, so all its steps share it evenly."""
        head = self.reading[0]
        most = self.local_chunk if self.streams else self.hardware.chunk
        if head.share_of != most:
            wait = 0.5 if self.streams and not head.share_of else 0.0
            head.share = max(head.left, 1e-6) / (math.ceil(max(head.left, 1e-6) / most) + wait)
            head.share_of = most
        return head.share
