"""Block books: every rule of I2 by example, then by random histories against a plain model."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from engine.blocks import BlockBooks


def key(name: int) -> bytes:
    return name.to_bytes(16, "big")


def test_allocation_is_all_or_nothing() -> None:
    books = BlockBooks(4)
    assert books.allocate(5, "a") is None
    assert books.available == 4
    assert len(books.allocate(4, "a") or []) == 4
    assert books.allocate(1, "b") is None


def test_a_block_freed_in_mid_plan_waits_for_the_plan() -> None:
    books = BlockBooks(2)
    blocks = books.allocate(2, "a") or []
    books.plan_sent(1)
    books.release(blocks, "a")
    assert books.available == 0
    books.plan_back(1)
    assert books.available == 2
    books.check_integrity()


def test_a_cached_block_freed_in_mid_plan_is_matched_but_not_evicted_before_the_plan_is_back() -> None:
    books = BlockBooks(1)
    (block,) = books.allocate(1, "a") or []
    books.publish(block, 1, [key(1)], 0, b"d")
    books.plan_sent(1)
    books.release([block], "a")
    assert books.match([key(1)]) == [block]
    assert books.allocate(1, "b") is None
    books.plan_back(1)
    assert books.allocate(1, "b") == [block]
    assert books.match([key(1)]) == []
    assert books.take_events() == ([], [key(1)]), "its last state, not that it was ever there"


def test_a_late_report_about_a_former_life_is_ignored() -> None:
    books = BlockBooks(1)
    (block,) = books.allocate(1, "a") or []
    old = books.generation(block)
    books.release([block], "a")
    books.allocate(1, "b")
    assert not books.publish(block, old, [key(1)], 0, b"d")
    assert books.match([key(1)]) == []


def test_bytes_mean_something_only_in_the_life_they_were_written_in() -> None:
    """A second block of a key is never published: let go, it is free at once, and its generation stays as it was."""
    books = BlockBooks(2)
    first, second = books.allocate(2, "a") or []
    books.publish(first, 1, [key(1)], 0, b"d")
    books.release([first, second], "a")
    assert books.is_kept(first, 1), "cached"
    assert not books.is_kept(second, 1), "free, although nobody has written into it yet"
    books.share([first], "b")
    assert books.is_kept(first, 1)
    assert not books.is_kept(first, 2)


def test_the_first_publisher_of_a_key_wins() -> None:
    books = BlockBooks(2)
    first, second = books.allocate(2, "a") or []
    assert books.publish(first, 1, [key(1)], 0, b"d")
    assert not books.publish(second, 1, [key(1)], 0, b"d")
    books.release([first, second], "a")
    assert books.match([key(1)]) == [first]
    books.check_integrity()


def test_eviction_takes_the_tail_of_the_oldest_chain_first() -> None:
    books = BlockBooks(3)
    blocks = books.allocate(3, "a") or []
    for i, block in enumerate(blocks):
        books.publish(block, 1, [key(i)], 0, b"d")
    books.release(blocks, "a")
    assert books.allocate(1, "b") == [blocks[2]]
    assert books.match([key(0), key(1), key(2)]) == blocks[:2]


def test_sharing_what_is_free_or_releasing_what_is_foreign_is_a_bug() -> None:
    books = BlockBooks(2)
    with pytest.raises(IntegrityError, match="free"):
        books.share([0], "a")
    books.allocate(1, "a")
    with pytest.raises(IntegrityError, match="does not belong"):
        books.release([0], "b")
    with pytest.raises(IntegrityError, match="already"):
        books.share([0], "a")


def test_withdrawing_a_cached_block_frees_it_and_an_owned_one_stays_private() -> None:
    books = BlockBooks(2)
    first, second = books.allocate(2, "a") or []
    for i, block in enumerate((first, second)):
        books.publish(block, 1, [key(i)], 0, b"d")
    books.release([first], "a")
    books.withdraw(first)
    books.withdraw(second)
    assert books.match([key(0)]) == books.match([key(1)]) == []
    assert books.in_use == 1
    books.check_integrity()


def test_what_was_computed_from_a_withdrawn_block_leaves_with_it() -> None:
    """And nothing else: not what comes before it, and not another chain."""
    books = BlockBooks(6)
    blocks = books.allocate(6, "a") or []
    one, other = [key(i) for i in range(4)], [key(0), key(8), key(9)]
    for chain, at in ((one, 0), (one, 1), (one, 2), (one, 3), (other, 1), (other, 2)):
        books.publish(blocks[len(books.keys())], 1, chain, at, b"d")
    assert books.withdraw(blocks[1]) == blocks[1:4]
    assert books.match(one) == [blocks[0]]
    assert books.match(other) == [blocks[0], blocks[4], blocks[5]]
    assert books.withdraw(blocks[1]) == []
    books.check_integrity()


def test_a_block_behind_one_that_was_evicted_leaves_with_what_its_chain_was_computed_from() -> None:
    """Two sequences share a hit; one published the middle, the other the end; the middle is evicted first."""
    books, chain = BlockBooks(8), [key(i) for i in range(4)]
    hits = books.allocate(2, "first") or []
    for at, block in enumerate(hits):
        books.publish(block, 1, chain, at, b"d")
    for owner in ("one", "two"):
        books.share(hits, owner)
    books.release(hits, "first")
    [middle] = books.allocate(1, "one") or []
    private, end = books.allocate(2, "two") or []
    assert books.publish(middle, 1, chain, 2, b"d")
    assert not books.publish(private, 1, chain, 2, b"d")
    assert books.publish(end, 1, chain, 3, b"d")
    books.release([*hits, middle], "one")
    books.release([*hits, private, end], "two")
    while books.is_published(middle):
        assert books.allocate(1, "others")
    assert books.is_published(end)
    assert end in books.withdraw(hits[0])
    books.check_integrity()


class Histories(RuleBasedStateMachine):
    """Random allocate / share / publish / release / plan histories on a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.books = BlockBooks(6, routing_stride=2)
        self.told: set[bytes] = set()
        self.holds: list[tuple[str, list[int]]] = []
        self.plan = 0
        self.in_flight = False
        self.names = 0
        self.touched: set[int] = set()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        before = self.books.available
        self.names += 1
        blocks = self.books.allocate(count, f"o{self.names}")
        assert (blocks is None) == (count > before)
        if blocks:
            assert not self.touched & set(blocks), "a block that a plan in flight may touch was handed out"
            self.holds.append((f"o{self.names}", blocks))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, blocks = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.books.release(blocks, owner)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        _, blocks = data.draw(st.sampled_from(self.holds))
        block = data.draw(st.sampled_from(blocks))
        self.books.publish(block, self.books.generation(block), [key(i) for i in range(name + 1)], name, b"d")

    @rule(names=st.lists(st.integers(0, 5), unique=True))
    def match_and_share(self, names: list[int]) -> None:
        blocks = self.books.match([key(n) for n in names])
        if blocks:
            self.names += 1
            self.books.share(blocks, f"o{self.names}")
            self.holds.append((f"o{self.names}", blocks))

    @rule(name=st.integers(0, 5))
    def withdraw(self, name: int) -> None:
        for block in self.books.match([key(name)]):
            chain = self.books.match([key(i) for i in range(name, 6)])
            before = [bool(self.books.match([key(i)])) for i in range(name)]
            withdrawn = self.books.withdraw(block)
            assert set(chain) <= set(withdrawn)
            assert not any(map(self.books.is_published, withdrawn))
            left = [bool(self.books.match([key(i)])) for i in range(6)]
            assert not any(left[name:]), "all that come later in this chain"
            first_gap = before.index(False) if False in before else name
            assert left[:first_gap] == before[:first_gap], "what comes before it, unbroken, stays"

    @precondition(lambda self: not self.in_flight)
    @rule()
    def send_plan(self) -> None:
        self.plan += 1
        self.books.plan_sent(self.plan)
        self.in_flight = True
        self.touched = {b for _, blocks in self.holds for b in blocks}

    @precondition(lambda self: self.in_flight)
    @rule()
    def plan_returns(self) -> None:
        self.books.plan_back(self.plan)
        self.in_flight = False
        self.touched = set()

    @rule()
    def tell(self) -> None:
        """As batches of a watch are made: what was removed, and what was stored, in whatever order."""
        stored, removed = self.books.take_events()
        assert not set(stored) & set(removed)
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == set(self.books.routing_keys())

    @invariant()
    def books_agree(self) -> None:
        self.books.check_integrity()
        routing = {key(name) for name in (1, 3, 5)}
        assert set(self.books.routing_keys()) == routing & set(self.books.keys())
        assert self.books.in_use >= len({b for _, blocks in self.holds for b in blocks})


TestHistories = Histories.TestCase
