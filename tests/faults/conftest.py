"""Reads that fail on purpose: the functions that engines call, replaced by ones that fail when told to.

io_uring's completions are changed after the kernel has delivered them, ``pread`` is replaced; both through
the tables of addresses that the kernels call through, so that the compiled code is the one that always runs.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator

import pytest

from featstore.engine import liburing, pool

#: What becomes of a read: given its number (from 0) and its result, the result to report.
Fate = Callable[[int, int], int]


class Faults:
    """``fate`` decides about every read; ``count`` reads have been looked at. ``enter`` is what
    io_uring_enter gives instead, if not 0."""

    def __init__(self) -> None:
        self.fate: Fate = lambda number, result: result
        self.enter = 0
        self._numbers = itertools.count()
        self.count = 0

    def decide(self, result: int) -> int:
        number = next(self._numbers)
        self.count = number + 1
        return self.fate(number, result)

    def restart(self, fate: Fate) -> None:
        """Count from 0 again, with another fate."""
        self._numbers = itertools.count()
        self.count = 0
        self.fate = fate


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Faults in the uring and the threads engine of readers opened from now on."""
    made = Faults()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.pread64.restype = ctypes.c_ssize_t
    libc.pread64.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]

    @ctypes.CFUNCTYPE(
        ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, use_errno=True
    )
    def pread(descriptor: int, address: int, size: int, offset: int) -> int:
        got = libc.pread64(descriptor, address, size, offset)
        result = made.decide(got if got >= 0 else -ctypes.get_errno())
        if result < 0:
            ctypes.set_errno(-result)
            return -1
        return result

    library = liburing._Library()
    real_peek = library.handle.io_uring_peek_batch_cqe
    real_wait = library.handle.io_uring_submit_and_wait

    @ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32)
    def peek(ring: int, completions: int, room: int) -> int:
        got = int(real_peek(ctypes.c_void_p(ring), ctypes.c_void_p(completions), ctypes.c_uint(room)))
        for entry in (ctypes.c_uint64 * got).from_address(completions) if got else ():
            result = ctypes.c_int32.from_address(entry + 8)
            result.value = made.decide(result.value)
        return got

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32)
    def submit_and_wait(ring: int, count: int) -> int:
        return made.enter or int(real_wait(ctypes.c_void_p(ring), ctypes.c_uint(count)))

    library.functions[liburing.PEEK_BATCH] = ctypes.cast(peek, ctypes.c_void_p).value
    library.functions[liburing.SUBMIT_AND_WAIT] = ctypes.cast(submit_and_wait, ctypes.c_void_p).value
    monkeypatch.setattr(liburing, "_library", library)
    monkeypatch.setattr(pool, "_PREAD", ctypes.cast(pread, ctypes.c_void_p).value)
    yield made
    del pread, peek, submit_and_wait
