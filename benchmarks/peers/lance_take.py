"""Lance: ``dataset.take`` of rows of a fixed-size-list column, as NumPy rows.

The scheme ``file+uring`` makes Lance read through io_uring (pylance 6 and later, Linux); both ways go through
the page cache. Whether the scheme really opened a ring is looked up in /proc, so that a silent fallback does
not pass for io_uring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMN = "features"


def available() -> bool:
    try:
        import lance  # noqa: F401
    except ImportError:
        return False
    return True


def write(path: Path, blocks: Iterator[NDArray[np.float32]], rows: int) -> None:
    """Write a dataset of one file."""
    import lance
    import pyarrow as pa

    first = next(blocks)
    columns = first.shape[1]
    schema = pa.schema([(COLUMN, pa.list_(pa.float32(), columns))])

    def batches() -> Iterator[Any]:
        for block in chain([first], blocks):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), columns)
            yield pa.record_batch([values], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    lance.write_dataset(reader, str(path), schema=schema, max_rows_per_file=rows, max_bytes_per_file=1 << 50)


class LanceTake:
    """An open dataset. ``scheme``: ``"file"`` or ``"file+uring"``. Raises RuntimeError where the latter opens
    no ring."""

    def __init__(self, path: Path, scheme: str) -> None:
        import lance

        before = _rings()
        self._dataset = lance.dataset(str(path) if scheme == "file" else f"{scheme}://{path}")
        self.take(np.arange(1))
        if scheme == "file+uring" and _rings() == before:
            raise RuntimeError(f"lance {lance.__version__} opened no io_uring for file+uring")

    def take(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [n, columns], in the order asked."""
        column = self._dataset.take(ids, columns=[COLUMN]).column(COLUMN).combine_chunks()
        rows: NDArray[np.float32] = column.flatten().to_numpy(zero_copy_only=True).reshape(len(ids), -1)
        return rows


def _rings() -> int:
    """io_uring instances that this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += "io_uring" in os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    return count
