"""Proof at use: prefix hits are digested again before a sequence builds on them (`verify: full`, DESIGN §4)."""

from collections.abc import Sequence as Seq

from engine.blocks import BlockBooks
from engine.sequence import Sequence


def keep_right_hits(
    books: BlockBooks, sequence: Sequence, hits: int, digests: Seq[bytes]
) -> tuple[int, bool, list[int]]:
    """Compare the first `hits` blocks of a sequence with the digests they were published with.

    From the first wrong one on, the sequence gets fresh blocks instead, and the wrong one leaves the index with what
    may have been computed from it. Returns how many are right, whether there was room for the fresh ones (without
    it the sequence keeps only what was right), and the blocks that left the index: others may be building on them. A
    block of which nobody else had hold is free by that, and may be one of the fresh ones: it has another life then.
    """
    blocks = sequence.blocks[:hits]
    right = 0
    while right < hits and books.is_published(blocks[right]) and digests[right] == books.digest_of(blocks[right]):
        right += 1
    if right == hits:
        return right, True, []
    doubted = books.withdraw(blocks[right])
    books.release(blocks[right:], sequence.owner)
    fresh = books.allocate(hits - right, sequence.owner)
    sequence.blocks[right:hits] = fresh or []
    return right, fresh is not None, [block for block in doubted if block not in (fresh or [])]
