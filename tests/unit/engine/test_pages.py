"""Memory in huge pages is ordinary memory, for which huge pages are asked."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.pages import HUGE_BYTES, allocate

THP = Path("/sys/kernel/mm/transparent_hugepage")


def flags(memory: NDArray[np.uint8]) -> list[str]:
    """What the kernel says of the mapping that all of it lies in."""
    first, last = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, _, end = mapping.partition(" ")[0].partition("-")
        if end and int(begin, 16) <= first and last <= int(end, 16):
            (found,) = re.findall(r"^VmFlags: (.*)$", mapping, re.MULTILINE)
            return str(found).split()
    raise AssertionError("it is in no mapping of this process, or in several")


@pytest.mark.parametrize("size", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1])
def test_it_has_the_size_asked_for_begins_a_huge_page_and_can_be_written(size: int) -> None:
    memory = allocate(size)
    assert (memory.nbytes, memory.ctypes.data % HUGE_BYTES if size else 0) == (size, 0)
    assert not memory.any()
    memory.fill(7)
    assert (memory == 7).all()


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no transparent huge pages to ask for")
@pytest.mark.parametrize(("size", "wanted"), [(HUGE_BYTES - 1, False), (HUGE_BYTES, True), (9 * HUGE_BYTES + 1, True)])
def test_huge_pages_are_asked_for_where_one_is_filled(size: int, wanted: bool) -> None:
    """Without them everything works, only slower: nothing else would notice."""
    assert ("hg" in flags(allocate(size))) is wanted


def test_two_of_them_share_nothing() -> None:
    one, other = allocate(4096), allocate(4096)
    one.fill(1)
    assert not other.any()
