"""One engine step: rows in, tokens and digests out. What is wrong with a row ends that row alone (I8, FAULTS C29).

1. Forget the sequences that the plan drops.
2. For each row apply its block-table delta and check it: token ids, positions, table, fills. A bad row is an error.
3. One forward over the good rows. When it raises and there are several, run them one by one, so that only the guilty
   row fails; running a row again writes the same bytes to the same places. Whether the guilt is the row's own or this
   engine's, which may be out of memory, cannot be told from here.
   What is asked of a prompt's own tokens (engine/scorer.py) is taken from the logits while they are there.
4. Draw each row's samples, under its rules (engine/rules.py). A row whose logits are not finite fails alone.
   What a client asked for and no engine can do - token ids, rules, grammars - is refused: see RowError.
5. Digest the blocks that the surviving rows filled.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.core.clock import Clock
from cluster.core.errors import GrammarError, ModelError
from engine.grammars import Grammars
from engine.messages import FilledBlock, Row, RowError, Sampled, Score, Scored, Step, StepDone
from engine.model.base import ForwardRow, Model
from engine.pool import Memory
from engine.rules import Fold
from engine.sampler import BadLogits, sample_row
from engine.scorer import Scorer

# What a forward may raise for one row and not for others. IntegrityError and everything unheard-of end the process.
ROW_FAILURES = (ValueError, IndexError, RuntimeError, ArithmeticError, MemoryError, ModelError)


class BadRow(ValueError):
    """A row that cannot be run as it stands: it contradicts this engine's books."""


class Refused(BadRow):
    """A row that asks for what no engine can do."""


@dataclass(slots=True)
class SequenceState:
    """What the engine remembers of a sequence between steps: its block table, the token it last drew, its rules."""

    table: list[int] = field(default_factory=list)
    last: int | None = None
    fold: Fold | None = None


class Stepper:
    """Runs plans on one model and one block pool. Used by the compute thread only."""

    def __init__(self, model: Model, memory: Memory, clock: Clock, grammars: Grammars | None = None) -> None:
        self._model = model
        self._memory = memory
        self._clock = clock
        self._grammars = grammars or Grammars(None)
        self._sequences: dict[int, SequenceState] = {}

    def run(self, step: Step) -> StepDone:
        """Run one plan. Never raises for what a row carries: see `StepDone.errors`."""
        started = self._clock.now()
        for sequence in step.drop:
            self._sequences.pop(sequence, None)
        errors: dict[int, RowError] = {}
        forwards: dict[int, ForwardRow] = {}
        for index, row in enumerate(step.rows):
            try:
                forwards[index] = self._prepare(row)
            except BadRow as error:
                errors[index] = RowError(str(error), refused=isinstance(error, Refused))
        scored: dict[int, Scored] = {}
        scores = {index: step.rows[index].score for index in forwards}
        logits = self._forward(forwards, scores, scored, errors)
        samples = [self._draw(index, row, forwards, logits, errors) for index, row in enumerate(step.rows)]
        filled = [block for index, row in enumerate(step.rows) if index not in errors for block in self._digest(row)]
        return StepDone(step.plan, samples, filled, errors, self._clock.now() - started, scored)

    def _prepare(self, row: Row) -> ForwardRow:
        """Apply the row's table delta and check it against the model and the pool. Raises BadRow, Refused."""
        state = self._sequences.setdefault(row.sequence, SequenceState())
        if not 0 <= row.table_from <= len(state.table):
            raise BadRow(f"a table delta from entry {row.table_from} of a table of {len(state.table)}")
        known = len(self._memory.pool)
        if any(not 0 <= block < known for block in row.new_blocks):
            raise BadRow(f"blocks {row.new_blocks} are not all within the pool of {known}")
        state.table[row.table_from :] = row.new_blocks
        tokens = self._tokens(row, state)
        end = row.start + len(tokens)
        if row.start < 0 or end > self._model.max_context:
            raise BadRow(f"positions {row.start}..{end - 1} are not within the context of {self._model.max_context}")
        size = self._memory.layout.block_size
        if end > len(state.table) * size:
            raise BadRow(f"position {end - 1} is beyond a table of {len(state.table)} blocks of {size}")
        completed = set(state.table[row.start // size : end // size]) if row.write else set()
        strangers = [fill.block for fill in row.fills if fill.block not in completed]
        if strangers:
            raise BadRow(f"blocks {strangers} are not filled by positions {row.start}..{end - 1}")
        self._follow(row, tokens, state)
        scored = self._scored(row.score, len(tokens)) if row.score is not None else range(0)
        return ForwardRow(tokens, row.start, state.table.copy(), row.write, bool(row.samples), scored)

    def _scored(self, score: Score, tokens: int) -> range:
        """Which of the row's tokens are scored. Raises BadRow, Refused."""
        if not 0 <= score.first <= score.first + len(score.targets) <= tokens or not score.targets:
            raise BadRow(f"{len(score.targets)} targets from {score.first} of a row of {tokens} tokens")
        if not 0 <= score.top <= self._model.vocab_size:
            raise Refused(f"the {score.top} most likely of {self._model.vocab_size} tokens")
        self._check_tokens(score.targets)
        return range(score.first, score.first + len(score.targets))

    def _follow(self, row: Row, tokens: list[int], state: SequenceState) -> None:
        """Start the fold of the row's rules, or take it further. Raises BadRow, Refused."""
        try:
            if row.start_rules is not None:
                rules, history = row.start_rules.rules, row.start_rules.history
                if history[row.start :] != tokens:
                    raise BadRow("the history does not end with the tokens of the row")
                self._check_tokens(history)
                matcher = None if rules.grammar is None else self._grammars.matcher(rules.grammar)
                vocab, ends = self._model.vocab_size, self._model.eos_ids
                state.fold = Fold(rules, history, vocab_size=vocab, eos_ids=ends, matcher=matcher)
            elif state.fold is not None:
                state.fold.follow(row.start, tokens)
        except BadRow:
            raise
        except ValueError as error:
            asked = row.start_rules is not None or isinstance(error, GrammarError)
            raise (Refused if asked else BadRow)(str(error)) from error

    def _tokens(self, row: Row, state: SequenceState) -> list[int]:
        if row.tokens is None:
            if state.last is None:
                raise BadRow(f"the last token of sequence {row.sequence}, which has drawn none")
            return [state.last]
        if not row.tokens:
            raise BadRow("no tokens")
        self._check_tokens(row.tokens)
        return row.tokens

    def _check_tokens(self, tokens: list[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._model.vocab_size:
            raise Refused(f"token id {low if low < 0 else high} is not within [0, {self._model.vocab_size})")

    def _forward(
        self,
        rows: dict[int, ForwardRow],
        scores: dict[int, Score | None],
        scored: dict[int, Scored],
        errors: dict[int, RowError],
    ) -> dict[int, NDArray[np.float32]]:
        """Run rows by their index. Returns logits [V] of those that want them; adds to `scored`, and to `errors`."""
        if not rows:
            return {}
        wanted = {index: score for index in rows if (score := scores[index]) is not None}
        scorer = Scorer(list(wanted.values()))
        try:
            logits = self._model.run(list(rows.values()), scorer.take)
        except ROW_FAILURES as error:
            if len(rows) == 1:
                (index,) = rows
                errors[index] = RowError(f"{type(error).__name__}: {error}")
                return {}
            results: dict[int, NDArray[np.float32]] = {}
            for index, row in rows.items():
                results.update(self._forward({index: row}, scores, scored, errors))
            return results
        scored.update(zip(wanted, scorer.results(), strict=True))
        return dict(zip([index for index, row in rows.items() if row.logits], logits, strict=True))

    def _draw(
        self,
        index: int,
        row: Row,
        forwards: dict[int, ForwardRow],
        logits: dict[int, NDArray[np.float32]],
        errors: dict[int, RowError],
    ) -> list[Sampled]:
        if index not in logits:
            return []
        fold = self._sequences[row.sequence].fold
        try:
            shaped = None if fold is None else fold.shape(logits[index])
            drawn = sample_row(logits[index], row.samples, row.start + len(forwards[index].tokens), shaped)
        except ValueError as error:
            errors[index] = RowError(str(error), refused=not isinstance(error, BadLogits))
            return []
        self._sequences[row.sequence].last = drawn[0].token
        return drawn

    def _digest(self, row: Row) -> list[FilledBlock]:
        digests = self._memory.digests(fill.block for fill in row.fills)
        return [
            FilledBlock(fill.block, row.sequence, fill.generation, digest)
            for fill, digest in zip(row.fills, digests, strict=True)
        ]
