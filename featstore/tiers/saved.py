"""Saved caches: which rows a loader's buffers held, kept with the store in ``caches/NAME.cache``, so that a
run can begin warm.

A saved cache is advice: it names rows, it holds none. What it names is read from the store again when it is
loaded. It may be deleted at any time. The file, all numbers little-endian:

- uint32: the bytes of the header;
- the header, MessagePack: ``{"format": "featstore-cache-2", "store": uuid, "tables": {name: count}}``, and
  where policies had been chosen ``"policies": {name: policy}``;
- of each table, in that order, ``count`` node ids, int64, the least wanted first;
- uint32: the CRC-32 of all before it.

A buffer may have so many slots that the budget has no room for their ids a second time. So they are written,
checked and read in pieces; and a cache is checked whole, in a pass of its own, before the first of its ids is
used.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.files import RegularFile
from featstore.base.folders import is_file, is_taken, real_path
from featstore.base.system import is_there, refusal
from featstore.errors import CorruptionError, SourceError
from featstore.storage.disk import Disk
from featstore.storage.manifest import check_name
from featstore.tiers.slots import layout

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

#: By table, a function that gives node ids in pieces, int64.
Tables = Mapping[str, Callable[[], Iterator[NDArray[np.int64]]]]

CACHES = "caches"
_FORMAT = "featstore-cache-2"
_HEADER_BYTES_MAX = 1 << 24
_PIECE = 1 << 13  # ids that are read at once

#: As often a row that is loaded counts as used: S3-FIFO would take those used less often for rows that nobody
#: wants again.
USES = 3


class _Header(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    store: str
    tables: dict[str, int]
    policies: dict[str, str] = {}


def cache_path(store: OpenStore, name: str) -> Path:
    """Where a cache of that name is. Raises SourceError for a name that is none."""
    check_name(name, "saved cache", SourceError)
    return store.on_disk.path / CACHES / f"{name}.cache"


def save(
    store: OpenStore,
    name: str,
    tables: Tables,
    *,
    policies: Mapping[str, str] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write down node ids by table; replaces a cache of that name, or leaves it as it is.

    ``tables``: functions that give all ids of a table in pieces, the least wanted first. Each is called
    twice, because the counts come first in the file. ``policies``: by which the tables' buffers had come to
    hold these rows, where nobody had said which.

    Raises SourceError for a name that is none or that something else has, and where a function gave another
    number of ids the second time; what the disk raises.
    """
    path, disk = cache_path(store, name), disk or Disk()
    target = real_path(store.on_disk.path) / CACHES / path.name
    if not is_there(target.parent):
        disk.mkdir(target.parent)
        disk.fsync_dir(target.parent.parent)
    if is_taken(target) and not is_file(target):
        raise SourceError(
            f"{target} is no file, and so no saved cache: it is left alone; give another name, or move "
            "it away"
        )
    counts = {table: sum(map(len, pieces())) for table, pieces in tables.items()}
    disk.replace_file(target, _encoded(_Header(_FORMAT, store.uuid, counts, dict(policies or {})), tables))
    return path


def _encoded(header: _Header, tables: Tables) -> Iterator[bytes | NDArray[np.uint8]]:
    """A cache's bytes, in pieces."""
    data = msgspec.msgpack.encode(header)
    data = len(data).to_bytes(4, "little") + data
    checksum = zlib.crc32(data)
    yield data
    for table, pieces in tables.items():
        left = header.tables[table]
        some = pieces()
        try:
            for ids in some:
                left -= len(ids)
                raw = np.ascontiguousarray(ids, "<i8").view(np.uint8)
                checksum = zlib.crc32(raw.data, checksum)
                yield raw
        finally:  # they may hold what others wait for
            getattr(some, "close", lambda: None)()
        if left:
            raise SourceError(
                f"the rows of table {table!r} changed while they were written down: save them again"
            )
    yield checksum.to_bytes(4, "little")


class SavedCache:
    """A saved cache, open and found good: checksum, header, sizes, and that the store has every row. A
    context manager.

    ``counts``: how many ids there are, ``policies``: by which they had come to be held, by table.

    Raises SourceError where there is no such cache, or it is damaged or of another store; DeviceError where
    it cannot be read.
    """

    def __init__(self, store: OpenStore, name: str) -> None:
        self._store, self.path = store, cache_path(store, name)
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise self._bad("it is no file")
        except FileNotFoundError:
            raise SourceError(f"{self.path} is not there: save it first, with save_cache({name!r})") from None
        except OSError as error:
            raise refusal(error, self.path, "look at") from error
        try:
            self._file = RegularFile(self.path)
        except CorruptionError as error:
            raise self._bad(f"it is {error.actual}") from error
        try:
            self._size = self._file.size_bytes
            self._check_checksum()
            self._begins, self.counts, self.policies = self._header()
            for table in self.counts:
                for _ in self.ids(table):
                    pass
        except BaseException:
            self.close()
            raise

    def _bad(self, what: str) -> SourceError:
        return SourceError(f"{self.path} is damaged ({what}): delete it, and save it again")

    def _read(self, at: int, size: int) -> bytes:
        try:
            return self._file.read_at(at, size).tobytes()
        except CorruptionError as error:
            raise self._bad(f"it ends at byte {error.offset:,}") from error

    def _check_checksum(self) -> None:
        checksum, end = 0, self._size - 4
        for at in range(0, end, 8 * _PIECE):
            checksum = zlib.crc32(self._read(at, min(8 * _PIECE, end - at)), checksum)
        if end < 4 or self._read(end, 4) != checksum.to_bytes(4, "little"):
            raise self._bad("its checksum is another")

    def _header(self) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
        """Where each table's ids begin, how many there are, and policies."""
        size = int.from_bytes(self._read(0, 4), "little")
        if size > min(_HEADER_BYTES_MAX, self._size - 8):
            raise self._bad(f"no header that begins with {_FORMAT!r}")
        data = self._read(4, size)
        try:
            header = msgspec.msgpack.decode(data, type=_Header)
        except ValueError as error:
            raise self._bad(f"its header: {error}") from error
        if header.format != _FORMAT:
            raise SourceError(f"{self.path} has the format {header.format!r}, not {_FORMAT!r}: save it again")
        if header.store != self._store.uuid:
            raise SourceError(
                f"{self.path} is a cache of the store {header.store}, not of {self._store.uuid}: save "
                "it again"
            )
        if msgspec.msgpack.encode(header) != data:
            raise self._bad("its header is not written as it should be")
        begins, end = {}, 4 + size
        for table, count in header.tables.items():
            if table not in self._store.tables:
                raise self._bad(f"the store has no table {table!r}")
            if not 0 <= count <= self._store.tables[table].rows:
                raise self._bad(
                    f"{count:,} rows of table {table!r}, which has {self._store.tables[table].rows:,}"
                )
            begins[table] = end
            end += 8 * count
        if end + 4 != self._size:
            raise self._bad(f"it has {self._size:,} bytes, not {end + 4:,}")
        for table, policy in header.policies.items():
            if table not in header.tables or policy not in layout.POLICIES:
                raise self._bad(f"the policy {policy!r} of table {table!r}")
        return begins, header.tables, header.policies

    def ids(self, table: str) -> Iterator[NDArray[np.int64]]:
        """int64, the node ids of a table in pieces, the least wanted first; none where the table was not
        saved."""
        rows = self._store.tables[table].rows
        for low in range(0, self.counts.get(table, 0), _PIECE):
            at, count = self._begins[table] + 8 * low, min(_PIECE, self.counts[table] - low)
            ids = np.frombuffer(self._read(at, 8 * count), "<i8").astype(np.int64)
            if ids.min() < 0 or ids.max() >= rows:
                bad = ids[(ids < 0) | (ids >= rows)][0]
                raise self._bad(f"node id {bad} of table {table!r}, which has {rows:,} rows")
            yield ids

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
