"""Reading small arrays of a store: whole files, verified against their digest, in bounded memory."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.base.files import RegularFile
from featstore.base.memory import check_machine
from featstore.errors import CorruptionError
from featstore.storage.manifest import ArrayEntry, FileEntry, array_bytes, array_chunk

_BLOCK_BYTES = 4 * 2**20


def load_array(
    root: Path, entry: ArrayEntry, file: FileEntry | None, first: int | None = None
) -> NDArray[Any]:
    """A small array below ``root``, or its ``first`` elements along axis 0. ``file`` is None for an array
    without elements.

    The whole file is read and verified in either case, block by block. Raises BudgetError for what no memory
    of this machine holds, CorruptionError and DeviceError.
    """
    dtype = dtype_from_name(entry.dtype)
    shape = list(entry.shape)
    if first is not None and shape:
        shape[0] = min(shape[0], first)
    chunk = array_chunk(entry)
    check_machine(math.prod(shape) * dtype.itemsize, f"load the array {root / entry.path}")
    out = np.empty(math.prod(shape), dtype)
    if chunk is not None:
        assert file is not None
        _load_file(root / chunk, array_bytes(entry), file.digest, out.view(np.uint8).reshape(-1))
    return out.reshape(shape)


def _load_file(path: Path, size: int, digest: str, out: NDArray[np.uint8]) -> None:
    from featstore.base.checksum import crc_pages

    found = hashlib.sha256()
    block = np.empty(min(_BLOCK_BYTES, size), np.uint8)
    with RegularFile(path, size) as file:
        for done in range(0, size, len(block)):
            got = file.read_into(block[: size - done], done)
            found.update(crc_pages(block[:got]).astype("<u4", copy=False).tobytes())
            keep = min(got, max(0, out.nbytes - done))
            out[done : done + keep] = block[:keep]
    actual = found.hexdigest()
    if actual != digest:
        raise CorruptionError(path, None, f"digest {digest}", actual)
