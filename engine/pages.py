"""Memory that is read from one end to the other again and again: weights and KV (docs/performance.md)."""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20


def allocate(size: int) -> NDArray[np.uint8]:
    """`size` bytes of zeros, not touched yet, that begin a huge page where the system lets a process ask for them.

    A core that looks up one page in 512 reads memory about a fifth faster. Anonymous and private: a transport can
    register it, and another process read it over CMA.
    """
    pages = -(-size // HUGE_BYTES) * HUGE_BYTES
    memory = mmap.mmap(-1, pages + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them; a system that has no word for it
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    begin = -whole.ctypes.data % HUGE_BYTES
    return whole[begin : begin + size]
