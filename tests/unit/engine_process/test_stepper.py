"""A row that breaks the forward, or whose logits are NaN, fails alone. (What a real engine does: tests/integration.)"""

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.core.clock import ManualClock
from cluster.core.errors import IntegrityError
from engine.messages import DrawRules, Fill, Grammar, Row, RowError, SampleSpec, Start, Step
from engine.model.base import ForwardRow, OnLogits, ignore_logits
from engine.model.tracer import GREEDY, TracerModelRunner, reference_tokens
from engine.pool import HostMemory
from engine.stepper import Stepper
from tests.unit.engine_process.tracer_spec import SPEC

SIZE = 4
FORBIDDEN, NAN = 66, 77


class Fragile(TracerModelRunner):
    """A tracer whose forward breaks on one token, and gives NaN for another: what a kernel may do."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SPEC, SIZE)
        self._error = error
        self.batches: list[int] = []

    def run(self, rows: list[ForwardRow], on_logits: OnLogits = ignore_logits) -> NDArray[np.float32]:
        self.batches.append(len(rows))
        if any(FORBIDDEN in row.tokens for row in rows):
            raise self._error
        logits = super().run(rows, on_logits)
        logits[[NAN in row.tokens for row in rows if row.logits]] = np.nan
        return logits


def stepper(error: Exception) -> tuple[Stepper, Fragile, HostMemory]:
    model = Fragile(error)
    memory = HostMemory(model.layout, 16, 1, model.layout.block_bytes)
    model.bind(memory.pool)
    return Stepper(model, memory, ManualClock()), model, memory


def row(sequence: int, tokens: list[int], samples: list[SampleSpec] | None = None) -> Row:
    fills = [Fill(sequence, 7)] if len(tokens) >= SIZE else []
    table = [sequence, sequence + 8]
    return Row(sequence, 0, tokens, 0, table, True, fills, [GREEDY] if samples is None else samples)


@pytest.mark.parametrize("error", [RuntimeError("kernel"), IndexError("gather"), FloatingPointError("overflow")])
def test_only_the_guilty_row_of_a_broken_forward_fails(error: Exception) -> None:
    run, model, memory = stepper(error)
    done = run.run(Step(3, [row(0, [1, 2, 3, 4]), row(1, [5, FORBIDDEN, 6, 7]), row(2, [8], []), row(3, [9])], []))
    assert done.errors == {1: RowError(f"{type(error).__name__}: {error}")}
    assert model.batches == [4, 1, 1, 1, 1]
    assert [drawn[0].token if drawn else None for drawn in done.samples] == [
        reference_tokens([1, 2, 3, 4], 1, SPEC)[0], None, None, reference_tokens([9], 1, SPEC)[0],
    ]  # fmt: skip
    assert [(f.block, f.sequence, f.generation, f.digest) for f in done.filled] == [(0, 0, 7, memory.digests([0])[0])]


def test_nan_logits_fail_their_row_alone() -> None:
    run, _, _ = stepper(RuntimeError())
    done = run.run(Step(1, [row(0, [1]), row(1, [1, 2, 3, NAN]), row(2, [2])], []))
    assert done.errors == {1: RowError("the largest logit is nan")}
    assert [len(drawn) for drawn in done.samples] == [1, 0, 1]
    assert done.filled == []
    again = run.run(Step(2, [Row(1, 4, None, 2, [], True, [], [GREEDY])], []))
    assert "has drawn none" in again.errors[0].reason


def test_a_contradiction_in_our_books_is_not_a_row_error() -> None:
    run, _, _ = stepper(IntegrityError("books"))
    with pytest.raises(IntegrityError):
        run.run(Step(1, [row(0, [FORBIDDEN]), row(1, [1])], []))


def test_several_samples_of_one_row_and_the_last_token_is_the_first_of_them() -> None:
    run, _, _ = stepper(RuntimeError())
    specs = [SampleSpec(index, 5, 3.0, 1.0, 0, -1) for index in range(3)]
    done = run.run(Step(1, [row(0, [1, 2, 3], specs)], []))
    firsts = [reference_tokens([1, 2, 3], 1, SPEC, spec)[0] for spec in specs]
    assert [drawn.token for drawn in done.samples[0]] == firsts
    assert len(set(firsts)) > 1
    after = run.run(Step(2, [Row(0, 3, None, 2, [], True, [Fill(0, 1)], [GREEDY])], []))
    assert after.samples[0][0].token == reference_tokens([1, 2, 3, firsts[0]], 1, SPEC)[0]


def ruled(sequence: int, tokens: list[int], start: Start) -> Row:
    return Row(sequence, 0, tokens, 0, [sequence, sequence + 8], True, [], [GREEDY], start)


def test_rules_that_cannot_be_kept_end_their_row_alone() -> None:
    run, _, _ = stepper(RuntimeError())
    rules = DrawRules(1, presence=1.0)
    done = run.run(
        Step(
            1,
            [
                ruled(0, [1, 2], Start(rules, [1, 2])),
                ruled(1, [1, 2], Start(rules, [1, 3])),
                ruled(2, [1, 2], Start(rules, [10**6, 1, 2])),
                ruled(3, [1, 2], Start(DrawRules(1, bias={10**6: 1.0}), [1, 2])),
                ruled(4, [1, 2], Start(DrawRules(9), [1, 2])),
                ruled(5, [1, 2], Start(DrawRules(1, grammar=Grammar("regex", "a")), [1, 2])),
            ],
            [],
        )
    )
    assert {number: error.refused for number, error in done.errors.items()} == {
        1: False,  # a history of other tokens is our own contradiction, as is the next; others are what was asked for
        2: False,
        3: True,
        4: True,
        5: True,
    }
    assert len(done.samples[0]) == 1
    gap = run.run(Step(2, [Row(0, 3, [5], 2, [], True, [], [GREEDY])], []))
    assert "positions 2..2 are missing" in gap.errors[0].reason


def test_an_empty_plan_is_answered() -> None:
    run, model, _ = stepper(RuntimeError())
    done = run.run(Step(9, [], [1, 2]))
    assert (done.plan, done.samples, done.filled, done.errors) == (9, [], [], {})
    assert model.batches == []
