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
    _: Any, descriptor: int, address: int, pages: int, offset: int, checksums: Any, sums: int, at: int,
    done: Any,
) -> None:  # fmt: skip
    """The twin of :func:`featstore.storage.disk.crc_and_write`."""
    data = np.ctypeslib.as_array((ctypes.c_uint8 * (pages * PAGE_BYTES)).from_address(address))
    crc_pages(data, checksums)
    try:
        count = os.pwrite(descriptor, data, offset)
        done[0] = count - count % PAGE_BYTES
        if done[0] == len(data):
            done[1] = os.pwrite(sums, checksums.view(np.uint8), at)
    except OSError as error:
        done[2] = error.errno


def write_plainly(patch: pytest.MonkeyPatch) -> None:
    """Have pages written by the twin."""
    patch.setattr(disk, "crc_and_write", crc_and_write)
