"""Saved caches: which rows a loader's buffers held, kept with the store in ``caches/NAME.cache``, so that a run can begin warm.

A saved cache is advice: it names rows, it holds none. What it names is read from the store again when it is loaded. The file is
MessagePack: ``{"format", "store": uuid, "tables": {name: node ids as little-endian int64 bytes}}``, then the CRC-32 of all before it,
four bytes, little-endian. It may be deleted at any time.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.disk import Disk
from featstore.errors import SourceError
from featstore.online import slot_layout as layout

if TYPE_CHECKING:
    from featstore.store import Store

_FORMAT = "featstore-cache-1"

#: As often a row that is loaded counts as used: S3-FIFO would take those used less often for rows that nobody wants again.
USES = 3


def cache_path(store: Store, name: str) -> Path:
    """Where a cache of that name is. Raises SourceError for a name that is none."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", name):
        raise SourceError(f"a cache's name has letters, digits, '.', '_' and '-', not {name!r}")
    return store.path / "caches" / f"{name}.cache"


def save(store: Store, name: str, ids: Mapping[str, NDArray[np.int64]]) -> Path:
    """Write down node ids by table, the least wanted first; replaces a cache of that name."""
    path, disk = cache_path(store, name), Disk()
    if not path.parent.is_dir():
        disk.mkdir(path.parent)
        disk.fsync_dir(path.parent.parent)
    tables = {table: np.ascontiguousarray(one, "<i8").tobytes() for table, one in ids.items()}
    data = msgspec.msgpack.encode({"format": _FORMAT, "store": store.uuid, "tables": tables})
    disk.replace_file(path, data + _checksum(data))
    return path


def load(store: Store, name: str) -> dict[str, NDArray[np.int64]]:
    """Node ids by table. Raises SourceError where there is no such cache, or it is damaged or of another store."""
    path = cache_path(store, name)
    if not path.exists():
        raise SourceError(f"{path} is not there: save it first, with save_cache({name!r})")
    raw = path.read_bytes()
    data, checksum = raw[:-4], raw[-4:]
    if len(raw) < 4 or checksum != _checksum(data):
        raise SourceError(f"{path} is damaged: delete it, and save it again")
    found: dict[str, Any] = msgspec.msgpack.decode(data)
    if found["format"] != _FORMAT or found["store"] != store.uuid:
        raise SourceError(f"{path} is a cache of the store {found['store']}, not of {store.uuid}: save it again")
    return {table: np.frombuffer(ids, "<i8").astype(np.int64) for table, ids in found["tables"].items()}


def present_ids(m: layout.SlotMap) -> NDArray[np.int64]:
    """int64, the rows of a slot map that are there; those that would leave first at the front, as far as the policy has an order."""
    records, policy = m.slots, int(m.counts[layout.POLICY])
    order = np.arange(len(records))
    if policy in (layout.FIFO, layout.CLOCK, layout.SCORE):  # a hand goes over the slots
        order = np.roll(order, -int(m.counts[layout.HAND]))
    elif policy in (layout.LRU, layout.S3FIFO):  # queues, the small one before the main one
        order = np.argsort(records["place"], kind="stable")
    elif policy == layout.SIEVE:  # a hand goes over a queue; what is behind it has survived
        order = np.lexsort((records["place"], records["place"] < m.counts[layout.CURSOR]))
    records = records[order]
    present: NDArray[np.int64] = records["row"][(records["status"] == layout.PRESENT) & (records["row"] >= 0)]
    return present


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
