"""Proof at use: prefix hits are digested again before a sequence builds on them (`verify: full`, DESIGN §4)."""

from collections.abc import Sequence as Seq

from engine.blocks import BlockBooks
from engine.sequence import Sequence


def keep_right_hits(books: BlockBooks, sequence: Sequence, hits: int, digests: Seq[bytes]) -> int | None:
    """Compare the first `hits` blocks of a sequence with the digests they were published with.

    Returns how many are right. From the first wrong one on, the sequence gets fresh blocks instead, and the wrong one
    leaves the index; None when there is no room for the fresh ones (the sequence then keeps only what was right).
    """
    blocks = sequence.blocks[:hits]
    right = 0
    while right < hits and books.is_published(blocks[right]) and digests[right] == books.digest_of(blocks[right]):
        right += 1
    if right == hits:
        return right
    books.withdraw(blocks[right])
    books.release(blocks[right:], sequence.owner)
    fresh = books.allocate(hits - right, sequence.owner)
    sequence.blocks[right:hits] = fresh or []
    return right if fresh is not None else None
