"""A compiled trace, opened beside its base store."""

from __future__ import annotations

import os
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_path, check_options, known_name
from featstore.base.checks import check_distinct, check_offsets
from featstore.base.system import is_there
from featstore.compile.budget import (
    ASKED_AHEAD,
    DEPTH_MIN,
    batch_bytes,
    depths_in_groups,
    read_together,
    readers_bytes,
)
from featstore.errors import FormatError, IncompleteStoreError, StaleError
from featstore.layout.records import Limits
from featstore.reader.options import READING
from featstore.reader.reader import Reader
from featstore.storage.manifest import EPOCHS, GATHERED_FEATURE, MADE_OF, MANIFEST_NAME, CompiledEntry
from featstore.storage.packs import packs_directory
from featstore.storage.store import OpenStore, Table, as_store


class CompiledTrace:
    """A compiled trace of a store; made by :meth:`featstore.Store.compiled`. ``pack``: the store that holds
    it, ``entry``: what its manifest says of it. Picklable.

    Of a store that is split by hosts it is in this host's part, ``base``, and has the rows of all hosts that
    it names.

    ``base`` may be the compiled trace itself, opened as a store, where its base store is not at hand: then
    ``name`` is None, and all rows must be in it.

    Raises IncompleteStoreError where there is none of that name, or rows of the base store are needed that is
    not there; StaleError where the base store has changed since; FormatError.
    """

    def __init__(self, base: OpenStore, name: str | os.PathLike[str] | None = "default") -> None:
        self.base = base = as_store(base, "base").on_disk
        path = base.path if name is None else packs_directory(base) / as_path(name, "name")
        if not is_there(path):
            known = sorted(p.parent.name for p in packs_directory(base).glob(f"*/{MANIFEST_NAME}"))
            raise IncompleteStoreError(
                f"{base.path} has no compiled trace {str(name)!r}; it has "
                f"{', '.join(map(repr, known)) or 'none'}: make one with `featstore pack STORE --trace "
                "TRACE`"
            )
        self.pack = OpenStore(path)
        try:
            self.entry = self._checked()
        except BaseException:
            self.pack.close()
            raise

    def _checked(self) -> CompiledEntry:
        """What the manifest says, after it has been held against the base store."""
        path, base, entry = self.pack.path, self.base, self.pack.manifest.compiled
        if entry is None:
            raise FormatError(f"{path} is a store, but holds no compiled trace")
        if base.uuid == self.pack.uuid:
            left = [t for t in entry.tables if not self.gathered and self._base_rows(entry, t) != 0]
            if left:
                raise IncompleteStoreError(
                    f"{path} reads rows of {', '.join(map(repr, left))} from the store {entry.base_uuid} "
                    "that it was compiled for: open that one, and load it by its name"
                )
            return entry
        if entry.base_uuid != base.uuid:
            raise StaleError(
                f"{path} was compiled for the store {entry.base_uuid}, but {base.path} is {base.uuid}: "
                "compile the trace again with --overwrite"
            )
        for table, compiled in entry.tables.items():
            own = self._below.tables.get(table)
            packed = self.pack.tables[compiled.packed]
            if own is None or (own.rows, own.row_shape, own.dtype) != (
                compiled.base_rows,
                packed.row_shape,
                packed.dtype,
            ):
                raise FormatError(
                    f"{path} holds rows of a table {table!r} that {base.path} does not have like that"
                )
        return entry

    @property
    def gathered(self) -> bool:
        """Whether it has the rows that it was compiled for, gathered from several hosts."""
        return GATHERED_FEATURE in self.pack.manifest.reader_features

    @property
    def _below(self) -> OpenStore:
        """The store with the rows that were left out of the mini-batches' own."""
        return self.pack if self.gathered else self.base

    def remote(self) -> tuple[int, int]:
        """Rows that came from other hosts when it was compiled, and their bytes, as the manifest says."""
        rows, size = (self.entry.forecast.get(f"remote_{what}", 0) for what in ("rows", "bytes"))
        return (rows, size) if isinstance(rows, int) and isinstance(size, int) else (0, 0)

    @property
    def memory_bytes(self) -> int:
        """The loader's budget that it was compiled for."""
        return self.entry.memory_bytes

    @property
    def forecast_seconds(self) -> float:
        """Of reading all mini-batches once, as forecast when it was compiled; 0 where the manifest does not
        say."""
        seconds = self.entry.forecast.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def row_bytes(self, table: str) -> int:
        """Of a row of a table of the base store, of which the rows here are copies. Raises KeyError."""
        known = self.entry.tables
        return self.pack.tables[
            known[known_name(table, known, "the compiled trace has no table")].packed
        ].row_bytes

    def limits(self, table: str) -> Limits:
        """What the records' indices point into."""
        t = self.entry.tables[known_name(table, self.entry.tables, "the compiled trace has no table")]
        rows = {
            part: self.pack.tables[getattr(t, part)].rows
            for part in ("packed", "shared", "resident", "device")
        }
        return Limits(rows["packed"], rows["shared"], t.base_rows, rows["resident"], rows["device"])

    def offsets(self) -> NDArray[np.int64]:
        """int64 [mini-batches + 1], checked: where each record begins in the table of records."""
        offsets: NDArray[np.int64] = self.pack.arrays[self.entry.offsets]
        total = self.pack.tables[self.entry.records].rows
        check_offsets(offsets, 0, total, f"the offsets of the records in {self.pack.path}")
        return offsets

    def epochs(self) -> NDArray[np.int64]:
        """int64 [recorded epochs + 1], checked: with which mini-batch each begins, and where the last one
        ends."""
        if EPOCHS not in self.pack.arrays:
            return np.array([0, len(self)], np.int64)
        found = self.pack.arrays[EPOCHS]
        what = f"the epochs of the mini-batches in {self.pack.path}"
        if found.dtype != np.int64 or found.ndim != 1 or len(found) < 2:
            raise FormatError(f"{what} are {found.dtype} {found.shape}, not int64 [epochs + 1]")
        check_offsets(found, 0, len(self), what)
        return found

    @property
    def sampled_by(self) -> str:
        """What tells its mini-batches from others; empty where nobody has said."""
        arrays = self.pack.arrays
        return bytes(arrays[MADE_OF]).decode(errors="replace") if MADE_OF in arrays else ""

    def turn(self, table: str) -> NDArray[np.int32]:
        """int32 [slots], checked: in which slot each slot's first row is after the last mini-batch; -1: in
        none."""
        turn: NDArray[np.int32] = self.pack.arrays[
            self.entry.tables[known_name(table, self.entry.tables, "the compiled trace has no table")].turn
        ]
        what = f"the turn of table {table!r} in {self.pack.path}"
        check_distinct(turn[turn != -1], len(turn), what)
        return turn

    def needed_bytes(self, depth: int) -> int:
        """Memory of a loader with ``depth`` mini-batches at once."""
        depth = as_count(depth, "depth")
        slots = sum(self.limits(n).slots * self.row_bytes(n) for n in self.entry.tables)
        record, group = self._record_bytes(), read_together(depth)
        return (
            slots
            + depth * (self._batch_bytes(group) + record)
            + ASKED_AHEAD * group * record
            + self._readers_bytes
            + sum(self._checksum_bytes())
        )

    def _record_bytes(self) -> int:
        """Of the longest record."""
        return int(np.diff(self.offsets()).max(initial=0))

    def _batch_bytes(self, group: int = 2) -> int:
        """Of the rows of the largest mini-batch, in a group of so many."""
        return sum(
            t.batch_rows_max * self.row_bytes(n)
            if group == 1
            else batch_bytes(t.batch_rows_max, self.row_bytes(n))
            for n, t in self.entry.tables.items()
        )

    def depth_within(self, memory_bytes: int, beside_bytes: int = 0) -> int:
        """How many mini-batches a loader with this budget has at once, with ``beside_bytes`` of it for
        others; at least two."""
        small = depths_in_groups(memory_bytes, self._batch_bytes() + self._record_bytes())
        fits = (d for d in (*small, 3) if self.needed_bytes(d) + beside_bytes <= memory_bytes)
        return next(fits, DEPTH_MIN)

    def base_tables(self) -> list[Table]:
        """The tables of the base store from which rows are read in training."""
        return [self._below.tables[n] for n in self.entry.tables if self._base_rows(self.entry, n) != 0]

    def _own_tables(self) -> list[Table]:
        """Its tables but those that take the place of the base store's."""
        return [t for n, t in self.pack.tables.items() if not (self.gathered and n in self.entry.tables)]

    @staticmethod
    def _base_rows(entry: CompiledEntry, table: str) -> int | None:
        """How many rows mini-batches read from a table of the base store; None where the manifest does not
        say."""
        inner: Any = entry.forecast
        for step in ("tables", table, "base_rows"):
            inner = inner.get(step) if isinstance(inner, dict) else None
        return inner if isinstance(inner, int) else None

    def _checksum_bytes(self) -> tuple[int, int]:
        """Page checksums of the compiled trace, and of what is read of the base store."""
        pages = sum(t.layout.pages for t in self._own_tables())
        return 4 * pages, 4 * sum(t.layout.pages for t in self.base_tables())

    @property
    def _readers_bytes(self) -> int:
        copies = [self.pack.tables[entry.packed] for entry in self.entry.tables.values()]
        return readers_bytes(self.memory_bytes, copies)

    def open_readers(self, options: dict[str, Any]) -> tuple[Reader, Reader | None]:
        """Readers of the compiled trace and, where some rows were left there, of the base store."""
        check_options(options, READING, "a reader of a compiled trace")
        tables, (own, others) = [t.name for t in self.base_tables()], self._checksum_bytes()
        named = [t.name for t in self._own_tables()]
        share = self._readers_bytes // (2 if tables else 1)
        options |= {"static": None, "static_memory": 0, "by_row": True}
        pack = Reader(self.pack, tables=named, memory=share + own, **options)
        try:
            base = Reader(self._below, tables=tables, memory=share + others, **options) if tables else None
        except BaseException:
            pack.close()
            raise
        return pack, base

    def __len__(self) -> int:
        return self.entry.batches

    def close(self) -> None:
        """Give the trace's files back; the store stays open."""
        self.pack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        name = None if self.base.uuid == self.pack.uuid else self.pack.path.name
        return _opened_again, (self.base, name, self.pack.uuid)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {str(self.pack.path)!r}: {len(self):,} mini-batches, "
            f"{self.entry.residency}>"
        )


def _opened_again(base: OpenStore, name: str | None, uuid: str) -> CompiledTrace:
    """One that was pickled. Raises StaleError where another has its name now."""
    compiled = CompiledTrace(base, name)
    if compiled.pack.uuid != uuid:
        compiled.close()
        raise StaleError(
            f"the compiled trace {compiled.pack.path} was compiled anew since it was pickled: open it again"
        )
    return compiled
