"""Memory in huge pages is ordinary memory."""

import pytest

from engine.pages import HUGE_BYTES, allocate


@pytest.mark.parametrize("size", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1])
def test_it_has_the_size_asked_for_begins_a_huge_page_and_can_be_written(size: int) -> None:
    memory = allocate(size)
    assert (memory.nbytes, memory.ctypes.data % HUGE_BYTES if size else 0) == (size, 0)
    assert not memory.any()
    memory.fill(7)
    assert (memory == 7).all()


def test_two_of_them_share_nothing() -> None:
    one, other = allocate(4096), allocate(4096)
    one.fill(1)
    assert not other.any()
