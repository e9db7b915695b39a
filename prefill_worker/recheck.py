"""A reader doubts blocks that were offered: what this worker says of them after looking again (DESIGN §4.8)."""

from collections import Counter

from cluster.stubs.link_pb2 import Recheck, RecheckedBlock, RecheckResult
from engine.blocks import BlockBooks


def vouch(
    books: BlockBooks, counters: Counter[str], recheck: Recheck, digests: list[bytes]
) -> tuple[RecheckResult, list[int]]:
    """Which of the blocks are still what was offered.

    One whose bytes changed leaves the prefix index, with all that was computed from it. These are returned as well:
    jobs may be building on them.

    `digests`: those of the blocks' bytes as they are now, of blocks within the pool alone, in order.
    """
    found = iter(digests)
    answers = []
    doubted: list[int] = []
    for ref in recheck.blocks:
        current, corrupt = 0 <= ref.block < books.num_blocks, False
        if current:
            digest = next(found)
            current = books.is_kept(ref.block, ref.generation)
            if current and books.is_published(ref.block) and books.digest_of(ref.block) != digest:
                counters["block_corrupt"] += 1
                doubted += books.withdraw(ref.block)
                current, corrupt = False, True
            else:
                counters["block_vouched_for" if current else "block_stale"] += 1
        told = RecheckedBlock(block=ref.block, generation=ref.generation, current=current, corrupt=corrupt)
        answers.append(told)
    return RecheckResult(attempt=recheck.attempt, blocks=answers), doubted
