"""The hand-off table: every move by example, then random histories that may never lose or double a block."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from cluster.stubs.link_pb2 import OfferedBlock
from kv_transfer.handoff import HandOff, State, Word

B = 16


def key(index: int) -> bytes:
    return index.to_bytes(16, "big")


def offered(index: int, *, digest: bytes | None = None, generation: int = 1) -> OfferedBlock:
    right = b"d%d" % index
    return OfferedBlock(block=100 + index, generation=generation, key=key(index), digest=digest or right)


def handoff(blocks: int = 4, first: int = 0) -> HandOff:
    return HandOff([key(i) for i in range(blocks)], first, B)


def move(h: HandOff, read: int, indexes: list[int], digests: list[bytes] | None = None) -> None:
    h.start_read(read, indexes)
    assert h.read_done(read) == indexes
    h.copy_done(read, digests or [b"d%d" % i for i in indexes])


def test_blocks_become_usable_in_order_of_their_proof() -> None:
    h = handoff()
    assert h.offer(0, [offered(0), offered(1)])
    move(h, 1, [0])
    assert h.verified_blocks == 1
    assert not h.complete
    assert h.offer(2 * B, [offered(2), offered(3)])
    move(h, 2, [1, 2, 3])
    assert h.complete
    assert h.outcomes == {"kv_blocks_verified": 4}


def test_a_holder_may_have_names_of_its_own_and_what_came_may_be_kept_as_something_else() -> None:
    h = handoff(2)
    named = [b"theirs %d" % i for i in range(2)]
    theirs = [OfferedBlock(block=i, generation=1, key=named[i], digest=b"d%d" % i) for i in range(2)]
    assert not h.offer(0, [offered(0)], named)
    assert not h.offer(0, theirs)
    assert h.offer(0, theirs, named)
    h.start_read(1, [0, 1])
    h.read_done(1)
    with pytest.raises(IntegrityError, match="cannot judge"):
        h.copy_done(1, [b"d0", b"d1"], [b"kept"])
    verified, doubted = h.copy_done(1, [b"d0", b"other"], [b"kept 0", b"kept 1"])
    assert [(v.index, v.key, v.digest) for v in verified] == [(0, key(0), b"kept 0")]
    assert [b.block for b in doubted] == [1]


def test_a_range_is_a_run_of_neighbours_from_what_is_wanted() -> None:
    h = handoff(6, first=1)
    h.offer(0, [offered(i) for i in (0, 1, 2)])
    h.offer(4 * B, [offered(4), offered(5)])
    assert [i for i, _ in h.next_range(8)] == [1, 2]
    assert [i for i, _ in h.next_range(1)] == [1]
    h.start_read(1, [1, 2])
    assert [i for i, _ in h.next_range(8)] == [4, 5]


@pytest.mark.parametrize("position", [1, B - 1, 4 * B, 100 * B, -B])
def test_an_offer_outside_the_prompt_is_malformed(position: int) -> None:
    h = handoff()
    assert not h.offer(position, [offered(0)])
    assert h.outcomes["offer_out_of_range"] == 1
    assert not h.next_range(8)


def test_a_key_of_other_content_is_refused_whatever_its_digest() -> None:
    h = handoff()
    wrong = OfferedBlock(block=1, generation=1, key=key(9), digest=b"d0")
    assert not h.offer(0, [wrong])
    assert h.outcomes["offer_wrong_key"] == 1
    assert not h.next_range(8)


def test_an_offer_that_comes_twice_or_late_changes_nothing() -> None:
    h = handoff(2)
    h.offer(0, [offered(0), offered(1)])
    move(h, 1, [0, 1])
    assert h.offer(0, [offered(0, digest=b"other"), offered(1)])
    assert h.complete
    assert not h.next_range(8)


def test_wrong_bytes_wait_for_the_holders_word_and_are_read_once_more() -> None:
    h = handoff(1)
    h.offer(0, [offered(0)])
    h.start_read(1, [0])
    h.read_done(1)
    verified, doubted = h.copy_done(1, [b"wrong"])
    assert not verified
    assert [b.block for b in doubted] == [100]
    assert not h.next_range(8), "no second read before the holder has vouched"
    assert h.rechecked(100, 1, current=True) == (Word.GOOD, 0)
    move(h, 2, [0])
    assert h.complete


def test_wrong_twice_is_corruption_and_stale_is_stale() -> None:
    h = handoff(1)
    h.offer(0, [offered(0)])
    move(h, 1, [0], [b"wrong"])
    assert h.rechecked(100, 1, current=True) == (Word.GOOD, 0)
    move(h, 2, [0], [b"wrong"])
    assert h.rechecked(100, 1, current=True) == (Word.CORRUPT, 0)
    assert h.outcomes["kv_blocks_corrupt"] == 1
    h.offer(0, [offered(0)])
    move(h, 3, [0], [b"wrong"])
    assert h.rechecked(100, 1, current=False) == (Word.STALE, 0)
    assert h.outcomes["kv_blocks_stale"] == 1
    h.offer(0, [offered(0)])
    move(h, 4, [0], [b"wrong"])
    assert h.rechecked(100, 1, current=False, corrupt=True) == (Word.CORRUPT, 0)
    assert not h.next_range(8)


def test_what_a_holder_computed_from_a_rotten_block_is_missing_again() -> None:
    """Here as verified, there as a copy under way; what another holder sent, and what comes before, stays."""
    h = handoff(6)
    h.offer(0, [offered(i) for i in (0, 1)])
    move(h, 1, [0])
    h.start_read(2, [1])
    h.read_done(2)  # a copy of the first holder's
    h.forget_holder()
    h.offer(0, [offered(i, generation=2) for i in range(6)])
    move(h, 3, [2, 3, 4])
    h.start_read(4, [5])
    h.read_done(4)
    assert h.distrust(3) == [3, 4]
    assert h.copy_done(2, [b"d1"])[0]
    assert not h.copy_done(4, [b"d5"])[0], "its digest is right, and what it was computed from is not"
    assert h.states() == [State.VERIFIED] * 3 + [State.MISSING] * 3
    assert h.outcomes["kv_blocks_distrusted"] == 3


def test_a_copy_of_a_holder_that_was_left_is_judged_by_its_own_offer() -> None:
    h = handoff(2)
    h.offer(0, [offered(0), offered(1)])
    h.start_read(1, [0, 1])
    h.read_done(1)
    h.forget_holder()
    h.offer(0, [OfferedBlock(block=7 + i, generation=3, key=key(i), digest=b"d%d" % i) for i in range(2)])
    assert not h.next_range(8), "they are under way"
    verified, doubted = h.copy_done(1, [b"d0", b"wrong"])
    assert [v.index for v in verified] == [0]
    assert doubted == [], "the next holder has nothing to say about it"
    assert [(i, o.block) for i, o in h.next_range(8)] == [(1, 8)], "and is read instead"


def test_an_answer_about_another_generation_is_ignored() -> None:
    h = handoff(1)
    h.offer(0, [offered(0, generation=2)])
    move(h, 1, [0], [b"wrong"])
    assert h.rechecked(100, 1, current=True)[0] is Word.GOOD
    assert not h.next_range(8)


def test_leaving_a_holder_keeps_what_is_verified_and_waits_for_copies() -> None:
    h = handoff(3)
    h.offer(0, [offered(i) for i in range(3)])
    move(h, 1, [0])
    h.start_read(2, [1])
    h.start_read(3, [2])
    h.read_done(2)
    assert h.forget_holder() == [3]
    h.give_up(3)
    assert h.reads == [2]
    h.copy_done(2, [b"d1"])
    assert h.verified_blocks == 2
    assert not h.next_range(8), "the old holder's offers are gone"


@pytest.mark.parametrize("event", ["read_done", "read_failed", "give_up", "copy_done"])
def test_an_illegal_move_raises_and_changes_nothing(event: str) -> None:
    h = handoff(1)
    h.offer(0, [offered(0)])
    h.start_read(1, [0])
    if event != "copy_done":
        h.read_done(1)
    before = h.states()
    with pytest.raises(IntegrityError, match="cannot"):
        h.copy_done(1, [b"d0"]) if event == "copy_done" else getattr(h, event)(1)
    assert h.states() == before


@pytest.mark.parametrize("digests", [[], [b"d0"], [b"d0", b"d1", b"d2"]])
def test_digests_that_do_not_fit_the_read_judge_nothing(digests: list[bytes]) -> None:
    h = handoff(2)
    h.offer(0, [offered(0), offered(1)])
    h.start_read(1, [0, 1])
    h.read_done(1)
    with pytest.raises(IntegrityError, match="cannot"):
        h.copy_done(1, digests)
    assert h.states() == [State.COPYING, State.COPYING]
    assert not h.outcomes
    h.copy_done(1, [b"d0", b"d1"])
    assert h.complete


@pytest.mark.parametrize("event", ["read_done", "read_failed", "give_up"])
def test_the_end_of_an_unknown_read_raises_and_changes_nothing(event: str) -> None:
    h = handoff(1)
    with pytest.raises(IntegrityError, match="cannot"):
        getattr(h, event)(7)
    assert h.states() == [State.MISSING]
    assert not h.outcomes


class Histories(RuleBasedStateMachine):
    """Offers, reads, failures, lies and changes of holder in any order."""

    @initialize(blocks=st.integers(1, 6), first=st.integers(0, 3))
    def begin(self, blocks: int, first: int) -> None:
        self.h = handoff(blocks, min(first, blocks))
        self.blocks = blocks
        self.reading: dict[int, list[int]] = {}
        self.copying: dict[int, list[int]] = {}
        self.next = 0
        self.verified = set(range(self.h.first))
        self.from_here: set[int] = set()  # verified, and the present holder's
        self.left: set[int] = set()  # reads of holders that were left
        self.bounds: dict[int, int] = {}  # reads of which only blocks before this one are believed

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.blocks - 1))
        count = data.draw(st.integers(1, self.blocks - start))
        assert self.h.offer(start * B, [offered(i) for i in range(start, start + count)])

    @rule(limit=st.integers(1, 3))
    def read(self, limit: int) -> None:
        run = [i for i, _ in self.h.next_range(limit)]
        assert len(run) <= limit
        assert not set(run) & self.verified
        if run:
            self.next += 1
            self.h.start_read(self.next, run)
            self.reading[self.next] = run

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), how=st.sampled_from(["done", "failed", "give_up"]))
    def end_read(self, data: st.DataObject, how: str) -> None:
        read = data.draw(st.sampled_from(sorted(self.reading)))
        indexes = self.reading.pop(read)
        if how == "done":
            assert self.h.read_done(read) == indexes
            self.copying[read] = indexes
        elif how == "failed":
            self.h.read_failed(read)
        else:
            self.h.give_up(read)
        if how != "done":
            self.bounds.pop(read, None)

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.copying)))
        indexes = self.copying.pop(read)
        good = [data.draw(st.booleans()) for _ in indexes]
        digests = [b"d%d" % i if ok else b"bad" for i, ok in zip(indexes, good, strict=True)]
        verified, doubted = self.h.copy_done(read, digests)
        bound = self.bounds.pop(read, self.blocks)
        believed = [i for i, ok in zip(indexes, good, strict=True) if ok and i < bound]
        assert [v.index for v in verified] == believed
        assert len(doubted) == (0 if read in self.left else len(indexes) - len(believed))
        self.verified |= set(believed)
        if read not in self.left:
            self.from_here |= set(believed)
        for block in doubted:
            self.h.rechecked(block.block, block.generation, current=data.draw(st.booleans()))

    @rule()
    def change_holder(self) -> None:
        gave_up = self.h.forget_holder()
        assert sorted(gave_up) == sorted(self.reading)
        for read in gave_up:
            self.h.give_up(read)
            self.bounds.pop(read, None)
        self.reading.clear()
        self.left |= set(self.copying)
        self.from_here.clear()

    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, self.blocks))
        gone = {i for i in self.from_here if i >= first}
        assert sorted(self.h.distrust(first)) == sorted(gone)
        self.verified -= gone
        self.from_here -= gone
        for read in {*self.reading, *self.copying} - self.left:
            self.bounds[read] = min(first, self.bounds.get(read, self.blocks))

    @invariant()
    def states_are_what_happened(self) -> None:
        states = self.h.states()
        assert {i for i, s in enumerate(states) if s is State.VERIFIED} == self.verified
        assert {i for i, s in enumerate(states) if s is State.READING} == {i for r in self.reading.values() for i in r}
        assert {i for i, s in enumerate(states) if s is State.COPYING} == {i for r in self.copying.values() for i in r}
        assert sorted(self.h.reads) == sorted([*self.reading, *self.copying])


TestHistories = Histories.TestCase
