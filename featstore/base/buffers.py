"""Memory for rows and pages: aligned, in large pages, used again when nobody looks at it any more."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from featstore.base.native import address_of, libc
from featstore.base.system import mapped_memory
from featstore.units import PAGE_BYTES

_MADV_POPULATE_WRITE = 23
_MADV_DONTNEED = 4
_MADV_WIPEONFORK = 18
_POPULATE_BYTES_MIN = 4 * 2**20
ALIGNMENT = 64  # what DLPack consumers want for a zero-copy hand-over


def empty_rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory for rows, uint8 [count * row_bytes], aligned to 64 bytes."""
    try:
        raw = np.empty(count * row_bytes + ALIGNMENT, np.uint8)
    except ValueError:  # more than an address can tell
        raise MemoryError(f"no machine has {count * row_bytes:,} bytes for {count:,} rows") from None
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + count * row_bytes]


def populate(rows: NDArray[np.uint8]) -> None:
    """Have the system provide the memory of a large fresh result now, in the caller's thread, which has
    nothing else to do.

    Otherwise the engine's thread takes a page fault for every page it copies into. The content is not
    touched. This is advice: a kernel that does not know it (before Linux 5.14) provides the memory later, as
    ever.
    """
    if rows.nbytes < _POPULATE_BYTES_MIN:
        return
    begin = -(-rows.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    end = (rows.ctypes.data + rows.nbytes) // PAGE_BYTES * PAGE_BYTES
    madvise = libc().madvise
    for at in range(begin, end, _POPULATE_BYTES_MIN):  # in steps, so that an interrupt comes through
        madvise(
            ctypes.c_void_p(at), ctypes.c_size_t(min(_POPULATE_BYTES_MIN, end - at)), _MADV_POPULATE_WRITE
        )


def aligned_buffer(byte_count: int) -> NDArray[np.uint8]:
    """Writable zeroed memory that starts at a page, as direct I/O needs it; it counts in RSS once touched.

    In large pages, where the system has them: what is read or written directly is then one piece of memory to
    the device, not one for every 4 KiB, which by itself makes reads of some pages a tenth to a third faster.
    It goes back to the system with the last view of it, where an allocator would keep it. Raises DeviceError
    where there is none left.
    """
    return np.frombuffer(_aligned(byte_count), np.uint8, byte_count)


def private_buffer(byte_count: int) -> NDArray[np.uint8]:
    """The same that is empty in forked children: of what is locked they would get a copy there and then. (It
    must be there: a child that has something else at its address would give that back with it.)"""
    memory = _aligned(byte_count)
    with suppress(OSError):  # before Linux 4.14 it is copied
        memory.madvise(_MADV_WIPEONFORK)
    return np.frombuffer(memory, np.uint8, byte_count)


def _aligned(byte_count: int) -> mmap.mmap:
    memory = mapped_memory(byte_count)
    with suppress(OSError):  # advice: a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_UNUSED = 2  # references to an array that only the list has: its own, and that of the question


class Outputs:
    """Memory for rows of mini-batches, used again when nobody looks at it any more: fresh memory costs as
    much as filling it.

    Arrays, tensors and other views all hold a reference to the array that owns the memory, so it is free when
    nobody but this list has one. Of what is free, ``most`` pieces are kept. ``memory``: gives so many bytes,
    for devices that want memory of their own kind.
    """

    def __init__(
        self, byte_count: int, most: int, memory: Callable[[int], NDArray[np.uint8]] = aligned_buffer
    ) -> None:
        self._byte_count, self._most, self._memory = byte_count, most, memory
        self._owned: list[NDArray[np.uint8]] = []
        self._taken: dict[int, int] = {}  # bytes taken of each last, by address

    def take(self, byte_count: int) -> NDArray[np.uint8]:
        """uint8 [byte_count]. One larger than the others is not kept, and those that are free go for it."""
        if byte_count > self._byte_count:
            self._drop()
            return self._memory(byte_count)
        free = [n for n in range(len(self._owned)) if sys.getrefcount(self._owned[n]) == _UNUSED]
        for number in reversed(free[1:]):
            if len(self._owned) > self._most:  # the loop once held more than it does now
                del self._owned[number]
        if free:
            own = self._owned[free[0]]
        else:
            own = self._memory(self._byte_count)
            populate(own)
            self._owned.append(own)
        self._taken[own.ctypes.data] = byte_count
        return own[:byte_count]

    def shrink(self) -> None:
        """Give all memory back to the system but what was asked for of it last. It is not to be taken
        again. Memory of a device's own kind goes back whole, with its last user: the device would go on with
        the pages that it had."""
        for own in self._owned if self._memory is aligned_buffer else ():
            taken = -(-self._taken[own.ctypes.data] // PAGE_BYTES) * PAGE_BYTES
            rest = ctypes.c_size_t(max(0, own.nbytes - taken))
            libc().madvise(ctypes.c_void_p(own.ctypes.data + taken), rest, _MADV_DONTNEED)
        self._owned, self._taken = [], {}

    def _drop(self) -> None:
        for number in reversed(range(len(self._owned))):
            if sys.getrefcount(self._owned[number]) == _UNUSED:
                del self._owned[number]
