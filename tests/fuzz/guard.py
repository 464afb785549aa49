"""Memory between two pages that nobody may touch, for what kernels reach by address: who reads or writes
beside it dies at once."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_turns = itertools.count()


def guarded(byte_count: int, align: int = 64) -> NDArray[np.uint8]:
    """uint8 [byte_count], which begins at a multiple of ``align``: in turn right after a guard page, and as
    near before one as that allows."""
    room = -(-byte_count // PAGE) * PAGE
    base = _libc.mmap(None, room + 2 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no {byte_count:,} bytes between guards")
    if room:
        _libc.mprotect(base + PAGE, room, mmap.PROT_READ | mmap.PROT_WRITE)
    begin = (room - byte_count) // align * align if next(_turns) % 2 else 0
    raw = (ctypes.c_uint8 * byte_count).from_address(base + PAGE + begin)
    weakref.finalize(raw, _libc.munmap, base, room + 2 * PAGE)
    out: NDArray[np.uint8] = np.frombuffer(raw, np.uint8) if byte_count else np.empty(0, np.uint8)
    return out


def install() -> None:
    """Put rows, staging, samples, and what is read of traces between guards, in every module of featstore
    that makes them."""

    def rows(count: int, row_bytes: int) -> NDArray[np.uint8]:
        return guarded(count * row_bytes)

    def buffer(byte_count: int) -> NDArray[np.uint8]:
        return guarded(byte_count, PAGE)

    for name, module in list(sys.modules.items()):
        if name.startswith("featstore"):
            for attribute, own in (("empty_rows", rows), ("aligned_buffer", buffer)):
                if hasattr(module, attribute):
                    setattr(module, attribute, own)
    from featstore.storage import arrays
    from featstore.tiers import static

    real = np.empty

    class Guarding:
        """NumPy with another ``empty``, for a module whose arrays kernels are given the addresses of."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def empty(shape: Any, dtype: Any = np.float64) -> NDArray[Any]:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return guarded(size).view(dtype).reshape(shape) if size else real(shape, dtype)

    arrays.np = Guarding()  # type: ignore[attr-defined]
    make = static.StaticRows.__init__

    def make_tier(tier: static.StaticRows, *arguments: Any) -> None:
        make(tier, *arguments)
        if tier.data.nbytes:
            tier.hold(guarded(tier.data.nbytes).reshape(tier.data.shape))

    static.StaticRows.__init__ = make_tier  # type: ignore[method-assign]
