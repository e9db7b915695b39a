"""A reader doubts blocks that were offered: what this worker says of them after looking again (DESIGN §4.8)."""

from collections import Counter

from cluster.stubs.link_pb2 import Recheck, RecheckedBlock, RecheckResult
from engine.blocks import BlockBooks


def vouch(books: BlockBooks, counters: Counter[str], recheck: Recheck, digests: list[bytes]) -> RecheckResult:
    """Which of the blocks are still what was offered. One whose bytes changed leaves the prefix index.

    `digests`: those of the blocks' bytes as they are now, of blocks within the pool alone, in order.
    """
    found = iter(digests)
    answers = []
    for ref in recheck.blocks:
        current = 0 <= ref.block < books.num_blocks
        if current:
            digest = next(found)
            current = books.is_kept(ref.block, ref.generation)
            if current and books.is_published(ref.block) and books.digest_of(ref.block) != digest:
                counters["block_corrupt"] += 1
                books.withdraw(ref.block)
                current = False
            else:
                counters["block_vouched_for" if current else "block_stale"] += 1
        answers.append(RecheckedBlock(block=ref.block, generation=ref.generation, current=current))
    return RecheckResult(attempt=recheck.attempt, blocks=answers)
