"""``featstore.export``: rows of a table in the user's order and numbers, block by block within a budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import (
    as_callback,
    as_flag,
    as_path,
    check_options,
    known_name,
    shown,
)
from featstore.base.dtypes import dtype_from_name, is_bfloat16
from featstore.base.ids import parse_ids
from featstore.base.progress import OnStep, watched
from featstore.errors import ArgumentError, BudgetError, IdError
from featstore.exporting.targets import Exported, RowBlocks, target_of
from featstore.plan.budget import least_reading_bytes
from featstore.reader.columns import columns_of
from featstore.reader.keys import NodeKeys, least_keys_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import READING
from featstore.reader.reader import Reader
from featstore.storage.store import OpenStore, as_store
from featstore.storage.whole_files import given_place
from featstore.units import parse_bytes

_READER_SHARE = 2  # one part in so many of the memory; the rest is blocks of rows
_KEY_BYTES = 512  # of a key, as an object and in the file's own form


@watched
def export_table(
    store: OpenStore | str | os.PathLike[str], table: str, to: str | os.PathLike[str], *, ids: Any = None,
    columns: Sequence[int] | slice | None = None, dtype: str | np.dtype[Any] | None = None,
    memory: int | str = "1GiB", overwrite: bool = False,
    progress: bool | OnStep | None = None, **reader: Any,
) -> Path:  # fmt: skip
    """Write rows of a table to a file, row i being node i.

    Args:
        store: an open store, or its path.
        table: the name of the table.
        to: the file, which is there whole or not at all: ``.npy``, ``.zarr`` (a zarr v3 array), or
            ``.parquet`` (a column ``id``, one ``key`` where the table's nodes have keys, and one with the
            table's name, of lists where rows have an axis).
        ids: node ids, integers [n], in the order in which their rows are written; all by default.
        columns: of rows with one axis, which of their elements, as numbers or a slice; all by default.
        dtype: to write, where it holds every value of the table's own (float32 for bfloat16, for instance).
        memory: budget for all that is held, bytes or ``"512MiB"``.
        overwrite: replace a file that is there already. A directory is never replaced.
        progress: told "export", the rows written and the rows there are; True for a line on standard error,
            see :func:`featstore.pack`.
        reader: options of :meth:`featstore.Store.reader`: ``engine``, ``queue_depth``, ``threads``,
            ``verify``.

    Rows that lie on disk in another order are read in the order of their ids, so that a page with several of
    them may be read several times: the more memory, the fewer. Returns the path. Raises ArgumentError,
    UnknownNameError, IdError, StoreExistsError, BudgetError, MissingPackageError, CorruptionError,
    DeviceError, DiskFullError.
    """
    path = given_place(to, "to")
    write, overwrite = target_of(path), as_flag(overwrite, "overwrite")
    check_options(reader, READING, "export")
    tell, memory_bytes = as_callback(progress, "progress"), parse_bytes(memory, "memory")
    opened = store if isinstance(store, OpenStore) else OpenStore(as_path(store, "store"))
    try:
        _check_exported(opened, table)
        chosen = as_store(opened).table(known_name(table, opened.tables, "the store has no table"))
        wanted = None if ids is None else _checked_ids(ids, chosen.rows)
        stored = dtype_from_name(chosen.entry.dtype)
        taken = None if columns is None else columns_of(columns, chosen.row_shape)
        shape = chosen.row_shape if taken is None else (len(taken),)
        written = stored if dtype is None else _wider(stored, dtype)
        rows = chosen.rows if wanted is None else len(wanted)
        keyed = path.suffix == ".parquet" and table in opened.manifest.keys
        kind = opened.manifest.keys[table].kind if keyed else None
        exported = Exported(table, rows, shape, written, kind)
        own = memory_bytes // _READER_SHARE
        beside = 16 + _KEY_BYTES * keyed
        row = _block_bytes(chosen.row_bytes, exported, stored, taken is not None) + beside
        shares = 2 if keyed else 1  # of what reads
        least = least_reading_bytes([table_need(chosen, reader.get("verify", True))])
        least = max(least, least_keys_bytes(opened, table)) if keyed else least
        needed = _READER_SHARE * max(row, shares * least)
        if memory_bytes < needed:
            what = "hold rows as read and as written, and read"
            raise BudgetError(needed, memory_bytes, what)
        block = (memory_bytes - own) // row

        def blocks() -> RowBlocks:
            with ExitStack() as held:
                share = own // shares
                keys_of = held.enter_context(NodeKeys(opened, table, share)) if keyed else None
                rows_of = held.enter_context(
                    Reader(opened, tables=[table], memory=share, static=None, **reader)
                )
                for low in range(0, rows, block):
                    done, high = low, min(rows, low + block)
                    whole = np.arange(low, high) if wanted is None else wanted[low:high]
                    for some, keys in [(whole, None)] if keys_of is None else keys_of.pieces(whole):
                        read = rows_of.read({table: some})[table]
                        if taken is not None:
                            read = np.take(read, taken, axis=1)
                        yield some, keys, read.astype(written, copy=False)
                        del read
                        done += len(some)
                        if tell is not None:
                            tell("export", done, rows)

        with closing(blocks()) as made:  # an error's traceback would keep the reader
            write(path, exported, made, overwrite)
    finally:
        if opened is not store:
            opened.close()
    return path


def _block_bytes(row_bytes: int, exported: Exported, stored: np.dtype[Any], cut: bool) -> int:
    """Of a row, in the block that was written last, the one that is read, and what becomes of that."""
    written, changed = exported.row_bytes, cut or exported.dtype != stored
    between = written // exported.dtype.itemsize * stored.itemsize if cut and exported.dtype != stored else 0
    return written + row_bytes + (written if changed else 0) + between


def _check_exported(store: OpenStore, table: str) -> None:
    """Raise ArgumentError for a store whose tables are not rows by node id, and a table without rows."""
    if table in store.featureless:
        raise ArgumentError(f"{store.path}: {table!r} are nodes without features, so there are no rows")
    if store.manifest.compiled is not None:
        raise ArgumentError(
            f"{store.path} is a compiled trace, whose tables are laid out for its mini-batches: export from "
            "the store that it was compiled for"
        )
    family = store.manifest.family
    if family is not None and family.host is None:
        raise ArgumentError(
            f"{store.path} is the topology of a split store, whose tables say which host owns a node: export "
            "from each host's part, whose rows are by its own ids"
        )


def _checked_ids(ids: Any, rows: int) -> NDArray[np.int64]:
    given = parse_ids(ids)
    if len(given.shape) != 1:
        raise IdError(f"ids must have one axis, not {len(given.shape)}")
    wrong = (given.values < 0) | (given.values >= rows)
    if wrong.any():
        place = int(wrong.argmax())
        raise IdError(f"ids[{place}] is {given.values[place]}, and the table has {rows:,} rows")
    return given.values


def _exact(stored: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a floating dtype has the digits of whole numbers; NumPy calls int64 to float64 safe."""
    if stored.kind not in "iu" or target.kind not in "fc":
        return True
    return 8 * stored.itemsize - (stored.kind == "i") <= int(np.finfo(target).nmant) + 1


def _wider(stored: np.dtype[Any], wanted: str | np.dtype[Any]) -> np.dtype[Any]:
    try:
        target = np.dtype(wanted)
    except Exception:  # whatever it is that was given
        raise ArgumentError(f"dtype must be one of NumPy's, not {shown(wanted)}") from None
    numbers = (target.kind in "biufc" or is_bfloat16(target)) and target.itemsize
    if target != stored and not (numbers and np.can_cast(stored, target, "safe") and _exact(stored, target)):
        raise ArgumentError(
            f"dtype={str(target)!r} does not hold every value of {stored}: nothing is rounded or cut silently"
        )
    return target
