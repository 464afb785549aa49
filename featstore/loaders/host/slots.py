"""Mini-batches in shared memory: the owner writes them, the rank that each is for has them until it lets go.

A mini-batch is pickled with its arrays out of band (protocol 5). All of it is copied into a *slot*, a stretch
of one anonymous file that every rank of the host maps; there the arrays of the rank lie, and may be written
to. Slots are of one size and are used again, so that the file has no more pages than slots that were in use
at once. A rank tells when the last array of a mini-batch is gone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import OF_STORE, BudgetError, DeviceError
from featstore.units import PAGE_BYTES

_ALIGNMENT = 64
_SHARE = 4  # of the host's memory is for mini-batches handed over: one of so many parts
PER_RANK = 2  # mini-batches that a rank has: the one in use, and the next


class _Pickler(pickle.Pickler):
    """Takes arrays of every dtype out of band; NumPy's own way knows those of the buffer protocol."""

    def reducer_override(self, one: Any) -> Any:
        if type(one) is not np.ndarray or not one.nbytes or one.dtype.hasobject or not one.flags.c_contiguous:
            return NotImplemented
        raw = pickle.PickleBuffer(one.reshape(-1).view(np.uint8).data)
        return _array, (raw, one.dtype, one.shape)


def _array(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


class Slots:
    """The owner's side, for ``ranks`` ranks: each has :data:`PER_RANK` slots. What of ``memory_bytes`` is
    not theirs is ``left_bytes``."""

    def __init__(self, memory_bytes: int, ranks: int) -> None:
        self._memory_bytes, self._count = memory_bytes, PER_RANK * ranks
        self.bytes = memory_bytes // _SHARE // self._count // PAGE_BYTES * PAGE_BYTES
        if not self.bytes:
            raise BudgetError(_SHARE * self._count * PAGE_BYTES, memory_bytes, "hand over mini-batches")
        self.left_bytes = memory_bytes - self._count * self.bytes
        # Mini-batches that a loop keeps come on top, in slots of their own: as many as the machine can hold.
        self.size = max(self._count, _machine_bytes() // self.bytes) * self.bytes
        self._next, self._spare, self._lock = 0, list[int](), threading.Lock()
        try:
            self.file = os.memfd_create("featstore-batches", os.MFD_CLOEXEC)
            os.ftruncate(self.file, self.size)
            self._memory = mmap.mmap(self.file, self.size)
        except OSError as error:
            self.close()
            raise DeviceError(
                error.errno or errno.EIO, "shared memory", None, f"make {self.size:,} bytes of"
            ) from error

    def take(self) -> int:
        """A slot that holds nothing. Raises DeviceError where there are no more."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            if (self._next + 1) * self.bytes > self.size:
                raise DeviceError(errno.ENOMEM, "shared memory", None, "keep more mini-batches in")
            self._next += 1
            return self._next - 1

    def empty(self, slot: int) -> None:
        """Give the pages of a slot back that is not needed any more."""
        self._memory.madvise(mmap.MADV_REMOVE, slot * self.bytes, self.bytes)
        self._spare.append(slot)

    def whole(self, error: BudgetError) -> BudgetError:
        """The error of who had what is left, as one of all the memory; that of a store's memory as it is."""
        if error.what.endswith(OF_STORE):
            return error
        return BudgetError(-(-error.needed_bytes * _SHARE // (_SHARE - 1)), self._memory_bytes, error.what)

    def write(self, slot: int, made: Any) -> list[int]:
        """Put something into a slot; the sizes of its parts. Raises BudgetError with the memory that all of
        this needs."""
        buffers: list[pickle.PickleBuffer] = []
        text = BytesIO()
        _Pickler(text, 5, buffer_callback=buffers.append).dump(made)
        parts = [text.getbuffer(), *(one.raw() for one in buffers)]
        sizes = [one.nbytes for one in parts]
        needed = sum(_aligned(size) for size in sizes)
        if needed > self.bytes:
            whole = -(-needed // PAGE_BYTES) * PAGE_BYTES * self._count * _SHARE
            what = f"hand over a mini-batch of {needed:,} bytes, {PER_RANK} a rank in a quarter of it"
            raise BudgetError(whole, self._memory_bytes, what)
        at = slot * self.bytes
        into = np.frombuffer(self._memory, np.uint8)
        for part, size in zip(parts, sizes, strict=True):
            into[at : at + size] = np.frombuffer(part, np.uint8)
            at += _aligned(size)
        return sizes

    def close(self) -> None:
        """Ranks keep what they have. May be called more than once."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.file)
            del self.file

    def __del__(self) -> None:
        self.close()


class SharedSlots:
    """A rank's side: the file, mapped."""

    def __init__(self, file: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        try:
            self._memory = mmap.mmap(file, 0)
        except OSError as error:
            raise DeviceError(error.errno or errno.EIO, "shared memory", None, "map") from error
        finally:
            os.close(file)

    def read(self, slot: int, sizes: list[int], gone: Callable[[], None]) -> Any:
        """What was put into a slot, without a copy of its arrays; ``gone`` is called when the last of them
        is no more."""
        root = np.frombuffer(self._memory, np.uint8, self._slot_bytes, slot * self._slot_bytes)
        weakref.finalize(root, gone).atexit = False
        parts, at = [], 0
        for size in sizes:
            parts.append(root[at : at + size])
            at += _aligned(size)
        return pickle.loads(parts[0].data, buffers=parts[1:])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
