"""Plans: who is in the next one when blocks are short."""

from cluster.core.keys import KeyChain, root_key
from engine.batcher import Batcher
from engine.blocks import BlockBooks
from engine.messages import SampleSpec
from engine.scheduler import StepBudget
from engine.sequence import Sequence

B = 4


def decoding(batcher: Batcher, *, last_plan: int) -> Sequence:
    """A sequence whose next token needs a block of its own."""
    draws = [SampleSpec(0, 0, 0.0, 1.0, 0, -1)]
    number = batcher.new_id()
    sequence = Sequence(number, [1, 2, 3, 4, 5], KeyChain(root_key(b"w"), B), draws, float(number), computed=B)
    assert sequence.reserve(batcher.books, B, B)
    sequence.last_plan, sequence.runnable = last_plan, True
    batcher.add(sequence)
    return sequence


def test_who_makes_room_by_leaving_does_not_keep_the_others_waiting() -> None:
    """Nothing else would ask for a plan: with none in flight the engine reports nothing."""

    def youngest_leaves(wanting: Sequence) -> bool:
        batcher.remove(max(batcher.sequences.values(), key=lambda s: s.arrival))
        return True

    batcher = Batcher(BlockBooks(2), B, StepBudget(chunk_tokens=4, max_batch=1), make_room=youngest_leaves)
    older = decoding(batcher, last_plan=1)
    younger = decoding(batcher, last_plan=0)  # it is its turn
    step = batcher.next_step(1.0)
    assert younger.id not in batcher.sequences
    assert step is not None
    assert [row.sequence for row in step.rows] == [older.id]
