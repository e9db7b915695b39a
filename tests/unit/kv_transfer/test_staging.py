"""Staging slots: one owner each, set aside until the read itself has ended, bounded per peer."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from kv_transfer.staging import Staging


def test_a_slot_goes_from_read_to_copy_to_free() -> None:
    staging = Staging(4)
    read, slot = staging.start_read("p") or (0, 0)
    assert staging.read_ended(read, bytes_wanted=True) == slot
    assert staging.in_use == 1
    staging.copy_ended(read)
    assert staging.in_use == 0


def test_a_read_that_was_given_up_keeps_its_slot_until_it_ends() -> None:
    staging = Staging(1)
    read, slot = staging.start_read("frozen") or (0, 0)
    staging.give_up(read)
    assert (staging.in_use, staging.set_aside) == (0, 1)
    assert staging.start_read("frozen") is None, "this peer has enough of our slots"
    _, other = staging.start_read("alive") or (0, slot)
    assert other != slot
    assert staging.read_ended(read, bytes_wanted=True) is None
    assert staging.set_aside == 0


def test_one_peer_gets_a_quarter_of_the_slots() -> None:
    staging = Staging(8)
    assert [staging.start_read("p") is not None for _ in range(3)] == [True, True, False]
    assert staging.start_read("q") is not None


def test_frozen_peers_can_take_at_most_as_many_slots_as_are_held_in_reserve() -> None:
    staging = Staging(2)
    for peer in ("a", "b", "c", "d"):
        started = staging.start_read(peer)
        assert started is not None
        staging.give_up(started[0])
    assert staging.start_read("e") is None


def test_the_end_of_an_unknown_read_is_a_bug() -> None:
    with pytest.raises(IntegrityError, match="never started"):
        Staging(1).read_ended(7, bytes_wanted=True)


def test_moves_of_reads_that_are_not_there_raise_and_change_nothing() -> None:
    staging = Staging(2)
    read, slot = staging.start_read("p") or (0, 0)
    with pytest.raises(IntegrityError, match="not in progress"):
        staging.give_up(7)
    with pytest.raises(IntegrityError, match="never started"):
        staging.copy_ended(read)
    assert staging.read_ended(read, bytes_wanted=True) == slot
    with pytest.raises(IntegrityError, match="not in progress"):
        staging.give_up(read)
    staging.check_integrity()
    assert (staging.in_use, staging.set_aside) == (1, 0)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(4)
        self.reading: dict[int, int] = {}
        self.aside: dict[int, int] = {}
        self.copying: dict[int, int] = {}

    @rule(peer=st.sampled_from("abc"))
    def start(self, peer: str) -> None:
        started = self.staging.start_read(peer)
        if started is not None:
            read, slot = started
            assert slot not in {*self.reading.values(), *self.aside.values(), *self.copying.values()}
            self.reading[read] = slot

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.reading)))
        self.staging.give_up(read)
        self.aside[read] = self.reading.pop(read)

    @precondition(lambda self: self.reading or self.aside)
    @rule(data=st.data(), wanted=st.booleans())
    def end(self, data: st.DataObject, wanted: bool) -> None:
        read = data.draw(st.sampled_from(sorted({**self.reading, **self.aside})))
        slot = self.staging.read_ended(read, bytes_wanted=wanted)
        if read in self.aside:
            assert slot is None
            del self.aside[read]
        else:
            expected = self.reading.pop(read)
            assert slot == (expected if wanted else None)
            if wanted:
                self.copying[read] = expected

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.copying)))
        self.staging.copy_ended(read)
        del self.copying[read]

    @invariant()
    def books_agree(self) -> None:
        self.staging.check_integrity()
        assert self.staging.in_use == len(self.reading) + len(self.copying)
        assert self.staging.set_aside == len(self.aside)


TestHistories = Histories.TestCase
