"""What becomes of verified blocks of a hand-off: into the prefix index in prompt order, and out of it again."""

from decode_worker.state import State
from decode_worker.transfer import Transfer


def publish(state: State, transfer: Transfer, digests: dict[int, bytes], now: float) -> None:
    """Enter blocks into the prefix index in prompt order, so that a published block is never recomputed over."""
    transfer.digests.update(digests)
    prompt = transfer.attempt.prompt
    assert prompt is not None
    while transfer.published < transfer.handoff.verified_blocks:
        index = transfer.published
        block = prompt.blocks[index]
        generation = state.books.generation(block)
        digest = transfer.digests.pop(index)
        state.books.publish(block, generation, transfer.handoff.keys, index, digest)
        transfer.published += 1
    transfer.timeline.published(bool(transfer.digests), now)


def distrust(state: State, transfer: Transfer, first: int) -> list[int]:
    """Forget what the holder offered from block `first` on. What of that is published already leaves the index, and is
    returned with all that may have been computed from it: nobody may go on with these blocks, this attempt included."""
    missing = transfer.handoff.distrust(first)
    for index in missing:
        transfer.digests.pop(index, None)
    assert transfer.attempt.prompt is not None
    published = [transfer.attempt.prompt.blocks[i] for i in missing if i < transfer.published]
    return published + [each for block in published for each in state.books.withdraw(block)]


def close(state: State, transfer: Transfer, rest: str) -> None:
    """The hand-off is over, and so is its job. Each block it wanted is verified, or in the `rest`, and so counted."""
    transfer.closed = True
    handoff, counters = transfer.handoff, state.counters
    counters[f"kv_blocks_{rest}"] += len(handoff.keys) - handoff.verified_blocks
    counters["kv_blocks_behind_a_gap"] += handoff.behind_a_gap
