"""The batcher with its scheduler and books, on an engine of paper; and what is thought of a silent engine (I2, I9)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from cluster.core.keys import KeyChain, root_key
from engine.batcher import Batcher
from engine.blocks import BlockBooks
from engine.messages import RowError, SampleSpec, Step, StepDone
from engine.overdue import GRACE_S, LATE_S, OverdueWatch
from engine.scheduler import StepBudget
from engine.sequence import Sequence
from tests.stateful import long, quick
from tests.unit.machines.paper import B, PaperEngine, answer, draw

BLOCKS = 12
LONGEST = 3 * B  # of what a sequence writes after its prompt
PATIENCE = 40  # plans in which everybody who may run got something done, at the latest

prompts = st.integers(1, 4 * B).flatmap(lambda n: st.lists(st.integers(0, 3), min_size=n, max_size=n))


class Batching(RuleBasedStateMachine):
    """Sequences come, read, write, and leave at any moment; when blocks are short the youngest makes room."""

    @initialize(chunk=st.sampled_from([2, 5, 9]), batch=st.integers(1, 3), share=st.sampled_from([0.5, 1.0]))
    def begin(self, chunk: int, batch: int, share: float) -> None:
        self.budget = StepBudget(chunk, batch, share)
        self.books = BlockBooks(BLOCKS)
        self.batcher = Batcher(self.books, B, self.budget, make_room=self.make_room)
        self.engine = PaperEngine(BLOCKS)
        self.prompts: dict[int, list[int]] = {}
        self.waited: dict[int, int] = {}
        self.flight: tuple[Step, list[list[int]]] | None = None

    def make_room(self, wanting: Sequence) -> bool:
        victim = max(self.batcher.sequences.values(), key=lambda s: s.id)
        self.drop(victim)
        return True

    def drop(self, sequence: Sequence) -> None:
        self.batcher.remove(sequence)
        self.prompts.pop(sequence.id, None)
        self.waited.pop(sequence.id, None)

    @rule(prompt=prompts, hit=st.booleans())
    def add(self, prompt: list[int], hit: bool) -> None:
        """A prompt, with whatever prefix of it is in the index already."""
        number = self.batcher.new_id()
        chain = KeyChain(root_key(b"weights"), B)
        sequence = Sequence(number, list(prompt), chain, [SampleSpec(0, 7, 0.0, 1.0, 0, -1)], arrival=float(number))
        hits = self.books.match(chain.extend(prompt)[: (len(prompt) - 1) // B]) if hit else []
        self.books.share(hits, sequence.owner)
        sequence.blocks, sequence.computed = list(hits), len(hits) * B
        sequence.runnable = True
        self.batcher.add(sequence)
        self.prompts[number], self.waited[number] = list(prompt), 0

    @precondition(lambda self: self.batcher.sequences)
    @rule(data=st.data(), twice=st.booleans())
    def remove(self, data: st.DataObject, twice: bool) -> None:
        """At any time, in mid-plan too, twice as well."""
        sequence = self.batcher.sequences[data.draw(st.sampled_from(sorted(self.batcher.sequences)))]
        for _ in range(1 + twice):
            self.drop(sequence)

    @precondition(lambda self: self.flight is None)
    @rule()
    def send(self) -> None:
        step = self.batcher.next_step(1.0)
        if step is None:
            assert not self.batcher.sequences, "work is left, and nothing is planned"
            return
        known = self.batcher.sequences
        self.engine.poison(self.books.take_recycled())
        truths = [known[row.sequence].tokens[: row.start + len(row.tokens or [])] for row in step.rows]
        self.flight = (step, truths)
        decoding = [row for row in step.rows if known[row.sequence].decoding]
        assert len(decoding) <= self.budget.max_batch + 1, "more decoding rows than the batch takes"
        assert sum(len(row.tokens or []) for row in step.rows) <= max(
            self.budget.chunk_tokens, len(decoding) + self.budget.least_tokens
        )
        for number in self.waited:
            self.waited[number] = 0 if number in {row.sequence for row in step.rows} else self.waited[number] + 1
        assert self.batcher.next_step(1.0) is None, "two plans in flight"

    @precondition(lambda self: self.flight is not None)
    @rule(data=st.data(), bad=st.sampled_from([False, False, True]))
    def come_back(self, data: st.DataObject, bad: bool) -> None:
        assert self.flight is not None
        (step, truths), self.flight = self.flight, None
        done = self.engine.step(step, truths)
        errors = {data.draw(st.integers(0, len(step.rows) - 1)): RowError("cannot")} if bad else {}
        results = self.batcher.on_done(StepDone(step.plan, done.samples, done.filled, errors, 0.0))
        assert {r.sequence.id for r in results} <= set(self.batcher.sequences)
        for result in results:
            sequence = result.sequence
            if result.error is not None:
                self.drop(sequence)
            elif result.sampled:
                prompt = self.prompts[sequence.id]
                sequence.tokens.append(result.sampled[0].token)
                assert sequence.tokens[-1] == draw(sequence.tokens[:-1], 0, 7)
                right = answer(prompt, 0, 7, len(sequence.tokens) - len(prompt))
                if len(sequence.tokens) - len(prompt) >= min(len(right), LONGEST):
                    self.drop(sequence)

    @rule(plan=st.sampled_from([-1, 0, 1, 10**6]))
    def another_plan_comes_back(self, plan: int) -> None:
        """Illegal: it raises, and the plan in flight is still in flight."""
        if self.flight is not None and plan == self.flight[0].plan:
            return
        before = (self.batcher.plan, self.batcher.in_flight, self.books.available, self.books.in_use)
        with pytest.raises(IntegrityError):
            self.batcher.on_done(StepDone(plan, [], [], {}, 0.0))
        assert before == (self.batcher.plan, self.batcher.in_flight, self.books.available, self.books.in_use)

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "books"):
            return
        self.books.check_integrity()
        assert set(self.batcher.sequences) == set(self.prompts)
        assert self.batcher.in_flight == (self.flight is not None)
        assert all(plans <= PATIENCE for plans in self.waited.values()), f"passed over too often: {self.waited}"
        for sequence in self.batcher.sequences.values():
            assert len(sequence.blocks) * B >= sequence.computed
            assert sequence.owner in self.books._owners[sequence.blocks[0]] if sequence.blocks else True
        if not self.prompts and self.flight is None:
            assert self.books.in_use == 0

    def teardown(self) -> None:
        """Left alone, everybody reads and writes to the end."""
        if not hasattr(self, "books"):
            return
        for _ in range(600):
            if self.flight is None:
                self.send()
            if self.flight is None:
                break
            step, truths = self.flight
            self.flight = None
            for result in self.batcher.on_done(self.engine.step(step, truths)):
                if result.sampled:
                    result.sequence.tokens.append(result.sampled[0].token)
                    if len(result.sequence.tokens) >= len(self.prompts[result.sequence.id]) + LONGEST:
                        self.drop(result.sequence)
        self.audit()
        assert not self.prompts, "somebody never came to an end"


class Silence(RuleBasedStateMachine):
    """OverdueWatch against the plainest reckoning: since when has something been owed, and for how much work."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = OverdueWatch()
        self.now = 100.0
        self.plan: tuple[float, int] | None = None  # sent at, positions
        self.asked: float | None = None  # when a tick first saw it
        self.owes = False

    @precondition(lambda self: self.plan is None)
    @rule(tokens=st.sampled_from([1, 16, 500]))
    def send(self, tokens: int) -> None:
        self.plan = (self.now, tokens)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def comes_back(self) -> None:
        assert self.plan is not None
        (sent, tokens), self.plan = self.plan, None
        self.watch.done(tokens, self.now - sent)
        assert self.watch.predict(0) == 0
        assert self.watch.predict(10) > 0

    @rule()
    def ask(self) -> None:
        self.owes = True

    @rule(all_answered=st.booleans())
    def hear(self, all_answered: bool) -> None:
        self.watch.heard()
        self.asked = None
        self.owes = self.owes and not all_answered

    @rule(seconds=st.floats(0, 1000))
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.plan is not None:
            self.plan = (self.plan[0] + seconds, self.plan[1])
        if self.asked is not None:
            self.asked += seconds
        self.watch.slept(seconds)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.4, 3.0, 9.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.asked = (self.now if self.asked is None else self.asked) if self.owes else None
        since = min([at for at in (self.plan and self.plan[0], self.asked) if at is not None], default=self.now)
        waited, tokens = self.now - since, self.plan[1] if self.plan else 0
        verdict = self.watch.check(self.now, self.plan and self.plan[0], tokens, asked=self.owes)
        usual = self.watch.predict(tokens)
        assert (verdict is not None) == (waited > max(GRACE_S, 20 * usual))
        assert verdict is None or verdict == pytest.approx(waited)
        assert self.watch.is_late == (waited > max(LATE_S, 6 * usual))
        assert self.plan is not None or self.owes or not self.watch.is_late, "late with nothing owed"


TestBatching = quick(Batching, examples=50, steps=40)
TestBatchingLong = long(Batching, examples=400, steps=60)
TestSilence = quick(Silence, examples=40, steps=25)
TestSilenceLong = long(Silence, examples=500, steps=50)
