"""liburing's functions, from the PyPI wheel ``liburing``, whose shared object exports them.

They are called through a table of addresses, each probed. Ring flags: SINGLE_ISSUER and DEFER_TASKRUN where
the kernel knows them (Linux 6.1), else none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.logs import LOG
from featstore.base.native import function_address
from featstore.errors import EngineError
from featstore.units import format_bytes

_RING_BYTES = 512  # room for struct io_uring (216 bytes in liburing 2.9)
_SETUP_FLAGS = (1 << 12) | (1 << 13)  # IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN

# The table of functions.
_FUNCTIONS = (
    "io_uring_get_sqe",
    "io_uring_prep_read",
    "io_uring_sqe_set_data64",
    "io_uring_submit_and_wait",
    "io_uring_peek_batch_cqe",
    "io_uring_cq_advance",
    "io_uring_submit",
    "io_uring_prep_read_fixed",
    "io_uring_submit_and_get_events",
)
(
    GET_SQE, PREP_READ, SET_DATA, SUBMIT_AND_WAIT, PEEK_BATCH, CQ_ADVANCE, SUBMIT, PREP_READ_FIXED,
    SUBMIT_AND_GET_EVENTS,
) = range(len(_FUNCTIONS))  # fmt: skip
_SETUP = ("io_uring_queue_init", "io_uring_queue_exit", "io_uring_register_buffers")


def _library_path() -> Path | None:
    try:
        spec = importlib.util.find_spec("liburing")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "liburing.so"
    return path if path.exists() else None


class _Library:
    """liburing, loaded, with the addresses of the functions that the kernel calls."""

    def __init__(self) -> None:
        path = _library_path()
        if path is None:
            raise EngineError(
                "the package 'liburing' is not installed (it has wheels for x86-64 glibc Linux)"
            )
        self.handle = ctypes.CDLL(str(path))
        self._knows_flags = False
        self.functions = np.array([function_address(self.handle, name) for name in _FUNCTIONS], np.int64)
        missing = [n for n, a in zip(_FUNCTIONS, self.functions, strict=True) if a == 0]
        missing += [name for name in _SETUP if function_address(self.handle, name) == 0]
        if missing:
            raise EngineError(
                f"the installed liburing lacks {', '.join(missing)}; install the version featstore asks for"
            )

    def open_ring(self, entries: int) -> NDArray[np.uint8]:
        """A ring; raises OSError with the kernel's reason."""
        ring = np.zeros(_RING_BYTES, np.uint8)
        for flags in (_SETUP_FLAGS, 0):
            r = int(
                self.handle.io_uring_queue_init(
                    ctypes.c_uint(entries), ctypes.c_void_p(ring.ctypes.data), ctypes.c_uint(flags)
                )
            )
            if r == 0:
                self._knows_flags = flags != 0
                return ring
            if r != -22:  # EINVAL: the kernel does not know the flags
                break
        # Whoever asked for a ring makes an error of ours of it, and says what it was for.
        raise OSError(-r, f"io_uring_setup: {os.strerror(-r)}")

    def register(self, ring: NDArray[np.uint8], memory: NDArray[np.uint8]) -> bool:
        """Have the kernel know the memory that a ring reads into beforehand, as its buffer 0: it looks up no
        pages for each read then. It stays locked while the ring is open. Returns whether it does: a user may
        lock as much as RLIMIT_MEMLOCK, of all rings together. Reads are the same without, and a little
        dearer. Not before Linux 6.1: there (before 5.12) rings themselves would lack what was locked."""
        if not self._knows_flags:
            return False
        vector = np.array([memory.ctypes.data, memory.nbytes], np.uint64)  # struct iovec
        r = int(self.handle.io_uring_register_buffers(
            ctypes.c_void_p(ring.ctypes.data), ctypes.c_void_p(vector.ctypes.data), ctypes.c_uint(1)
        ))  # fmt: skip
        if r < 0:
            LOG.info(
                "memory of reads is not registered with io_uring (%s for %s): each read takes a little more "
                "of a core. ulimit -l is how much a user may lock",
                os.strerror(-r), format_bytes(memory.nbytes),
            )  # fmt: skip
        return r >= 0

    def close_ring(self, ring: NDArray[np.uint8]) -> None:
        self.handle.io_uring_queue_exit(ctypes.c_void_p(ring.ctypes.data))


_library: _Library | None = None


def library() -> _Library:
    """liburing, loaded once a process. Raises OSError where it cannot be."""
    global _library
    if _library is None:
        _library = _Library()
    return _library


def probe() -> None:
    """Open a small ring and close it again. Raises OSError with the reason where io_uring cannot be used."""
    lib = library()
    lib.close_ring(lib.open_ring(4))
