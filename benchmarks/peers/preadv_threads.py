"""Threads that each read one page after the other: the plain way to keep a queue full.

:class:`PythonThreads` is a ``ThreadPoolExecutor`` around ``os.preadv``, as anybody writes it.
:class:`CompiledThreads` runs the same loop in machine code without the interpreter's lock. Both use direct
I/O, so every read is cold; ids are read in the order asked, or sorted first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096


def _aligned(size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class PythonThreads:
    """``threads`` Python threads. The file's rows begin at byte ``offset`` and none lies across two pages."""

    def __init__(self, path: Path, row_bytes: int, offset: int = PAGE_BYTES, threads: int = 32) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._row_bytes, self._offset, self._threads = row_bytes, offset, threads
        self._pool = ThreadPoolExecutor(threads)

    def read(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Fill ``out`` (uint8 [n, row_bytes])."""
        cuts = [len(ids) * k // self._threads for k in range(self._threads + 1)]
        for job in [self._pool.submit(self._share, ids, out, a, b) for a, b in pairwise(cuts)]:
            job.result()

    def _share(self, ids: NDArray[np.int64], out: NDArray[np.uint8], begin: int, end: int) -> None:
        descriptor, row_bytes = self._descriptor, self._row_bytes
        page = mmap.mmap(-1, PAGE_BYTES)
        view = np.frombuffer(page, np.uint8)
        for i, byte in enumerate((ids[begin:end] * row_bytes + self._offset).tolist(), begin):
            within = byte % PAGE_BYTES
            if os.preadv(descriptor, [page], byte - within) != PAGE_BYTES:
                raise OSError(f"short read at byte {byte - within}")
            out[i] = view[within : within + row_bytes]

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)


class CompiledThreads:
    """The same, compiled; ``sort`` reads the pages in ascending order."""

    def __init__(
        self, path: Path, row_bytes: int, offset: int = PAGE_BYTES, threads: int = 32, sort: bool = False
    ) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._row_bytes, self._offset, self._threads, self._sort = row_bytes, offset, threads, sort
        self._pool = ThreadPoolExecutor(threads)
        self._pages = [_aligned(PAGE_BYTES) for _ in range(threads)]
        self._kernel = _kernel()

    def read(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Fill ``out`` (uint8 [n, row_bytes])."""
        order = np.argsort(ids) if self._sort else np.arange(len(ids))
        cuts = [len(ids) * k // self._threads for k in range(self._threads + 1)]
        shares = enumerate(pairwise(cuts))
        jobs = [
            self._pool.submit(
                self._kernel,
                self._descriptor,
                ids,
                order[a:b],
                self._row_bytes,
                self._offset,
                self._pages[k],
                out,
            )
            for k, (a, b) in shares
        ]
        for job in jobs:
            if job.result():
                raise OSError("a read failed or was short")

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)


def _kernel() -> Any:
    from numba import njit

    pread = ctypes.CDLL(None).pread
    pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    pread.restype = ctypes.c_ssize_t

    @njit(nogil=True)
    def share(descriptor, ids, order, row_bytes, offset, page, out):  # type: ignore[no-untyped-def]
        for k in range(order.shape[0]):
            i = order[k]
            byte = ids[i] * row_bytes + offset
            within = byte % PAGE_BYTES
            if pread(descriptor, page.ctypes.data, PAGE_BYTES, byte - within) != PAGE_BYTES:
                return True
            out[i] = page[within : within + row_bytes]
        return False

    return share
