"""Keys numbered as nodes, and written into the store.

A key's node is the row that it stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from featstore.base.dtypes import node_dtype
from featstore.errors import SourceError
from featstore.packing.keys.index import KeyIndex
from featstore.packing.keys.sources import KeySource
from featstore.packing.keys.spool import BLOCK_KEYS, KeySpool
from featstore.storage.disk import Disk
from featstore.storage.manifest import KeysEntry, TableEntry
from featstore.storage.table_writer import Catalogue, write_vector, zarr_group_json

__all__ = ["number_rows", "write_keys"]

_COPY_VALUES = 1 << 18


def number_rows(
    source: KeySource, disk: Disk, folder: Path, name: str, tick: Callable[[int], None]
) -> KeySpool:
    """The keys of rows 0, 1, ... on scratch files in ``folder``; ``tick`` is told bytes of keys. That each
    stands once is seen when they are indexed. Raises SourceError, DiskFullError, DeviceError."""
    spool: KeySpool | None = None
    for block in source.blocks():
        if spool is None:
            spool = KeySpool(disk, folder, name, block.kind, source.name)
        if block.kind != spool.kind:
            raise SourceError(
                f"{source.name}: row {len(spool):,} has a key of kind {block.kind}, those before are "
                f"{spool.kind}; the keys of a table are of one kind"
            )
        for low in range(0, len(block), BLOCK_KEYS):
            part = block.part(low, min(low + BLOCK_KEYS, len(block)))
            spool.append(part, part.hashes())
            tick(part.nbytes)
    return KeySpool(disk, folder, name, "int64", source.name) if spool is None else spool


def write_keys(catalogue: Catalogue, base: str, spool: KeySpool, index: KeyIndex) -> KeysEntry:
    """Write keys and their index as tables below ``base``, durably."""

    def written(part: str, blocks: Any, rows: int, dtype: Any) -> TableEntry:
        return write_vector(catalogue, f"{base}/{part}", blocks, rows, np.dtype(dtype))

    catalogue.write(f"{base}/zarr.json", zarr_group_json())
    rows, starts = len(spool), index.starts
    values = written("values", spool.values.blocks(_COPY_VALUES), spool.values.count, spool.values.dtype)
    hashes = written("hashes", index.hashes.blocks(_COPY_VALUES), rows, np.uint64)
    ids = written("ids", index.ids.blocks(_COPY_VALUES), rows, node_dtype(rows))
    begins = written("starts", iter([starts]), len(starts), np.int64)
    if spool.ends is None:
        return KeysEntry(spool.kind, values, hashes, ids, begins)
    ends = spool.ends

    def offsets() -> Any:
        yield np.zeros(1, np.int64)
        yield from ends.blocks(_COPY_VALUES)

    return KeysEntry(
        spool.kind, values, hashes, ids, begins, written("offsets", offsets(), rows + 1, np.int64)
    )
