"""Prefix hits that are not what they were: replaced, and taken for nothing else (engine/prefix.py)."""

from cluster.core.keys import KeyChain, root_key
from engine.blocks import BlockBooks
from engine.prefix import keep_right_hits
from engine.sequence import Sequence

RIGHT, WRONG = b"right", b"wrong"
BLOCK = 4
ROOT = root_key(b"weights")
KEYS = KeyChain(ROOT, BLOCK).extend(range(3 * BLOCK))


def cached(books: BlockBooks, blocks: int) -> list[int]:
    """So many blocks of one chain, in the index, with no owner."""
    chain = books.allocate(blocks, "first") or []
    for index, block in enumerate(chain):
        books.publish(block, books.generation(block), KEYS, index, RIGHT)
    books.release(chain, "first")
    return chain


def hit(books: BlockBooks, blocks: list[int], number: int) -> Sequence:
    """A sequence that has found these blocks."""
    sequence = Sequence(number, [], KeyChain(ROOT, BLOCK), [], 0.0, blocks=list(blocks))
    books.share(blocks, sequence.owner)
    return sequence


def test_a_rotten_block_that_is_free_at_once_is_doubted_in_nobodys_hands() -> None:
    """The pool has no other: the sequence gets blocks of the same numbers, to write into them anew."""
    books = BlockBooks(3)
    chain = cached(books, 3)
    sequence = hit(books, chain[:2], 1)
    right, room, doubted = keep_right_hits(books, sequence, 2, [RIGHT, WRONG])
    assert (right, room) == (1, True)
    assert sequence.blocks[0] == chain[0]
    assert sequence.blocks[1] in chain[1:]
    assert sequence.blocks[1] not in doubted, "who has it now does not build on what was in it"
    assert books.match(KEYS) == chain[:1]
    books.check_integrity()


def test_others_that_build_on_a_rotten_block_are_told_of_it() -> None:
    books = BlockBooks(3)
    chain = cached(books, 2)
    sequence, other = hit(books, chain, 1), hit(books, chain, 2)
    right, room, doubted = keep_right_hits(books, sequence, 2, [RIGHT, WRONG])
    assert (right, room, doubted) == (1, True, chain[1:])
    assert other.blocks == chain
    assert sequence.blocks[1] not in chain
    books.check_integrity()
