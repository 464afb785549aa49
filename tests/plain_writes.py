"""Writing pages in plain Python, through ``os.pwrite``, so that a test can stand in its way."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest

from featstore.base.checksum import crc_pages
from featstore.storage import disk
from featstore.units import PAGE_BYTES


def crc_and_write(
    _: Any, memory: int, descriptors: Any, runs: Any, checksums: Any, sums: int, done: Any
) -> int:  # fmt: skip
    """The twin of :func:`featstore.storage.disk.crc_and_write`."""
    first = 0
    for i, (offset, at, pages, sums_at) in enumerate(runs.tolist()):
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (pages * PAGE_BYTES)).from_address(memory + at))
        own = crc_pages(data, checksums[first : first + pages])
        first += pages
        try:
            count = os.pwrite(int(descriptors[i]), data, offset)
            done[i, 0] = count - count % PAGE_BYTES
            if done[i, 0] < len(data):
                return 0
            done[i, 1] = os.pwrite(sums, own.view(np.uint8), sums_at)
            if done[i, 1] < own.nbytes:
                return 0
        except OSError as error:
            return error.errno or 0
    return 0


def write_plainly(patch: pytest.MonkeyPatch) -> None:
    """Have pages written by the twin."""
    patch.setattr(disk, "crc_and_write", crc_and_write)
