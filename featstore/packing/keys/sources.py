"""Where the keys of a table come from: a column of its file, an array, or a file of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featstore.arguments import shown
from featstore.base.files import load_given
from featstore.base.keys import KeyBlock, as_keys, keys_of_arrow
from featstore.errors import SourceError
from featstore.packing.keys.spool import BLOCK_KEYS
from featstore.packing.sources.base import FeatureSource, file_fingerprint, sample_crc32, stat_of
from featstore.packing.sources.cells import text_blocks
from featstore.packing.sources.columns import KeyColumn
from featstore.packing.sources.tables import ARROW_SUFFIXES, arrow_batches

__all__ = ["OF_ID", "KeySource", "as_key_column", "is_of_id", "key_source"]

#: Instead of keys: those of the column that ``id=`` names.
OF_ID = "id"
_TEXT_SUFFIXES = (".txt", ".txt.gz")


def is_of_id(given: Any) -> bool:
    """Whether the keys are those of the column that ``id=`` names."""
    return isinstance(given, str) and given == OF_ID


def as_key_column(id: Any) -> Any:
    """``id`` as that of a column of keys. Raises SourceError for none, and for a position."""
    if not isinstance(id, str):
        raise SourceError(
            f"node_keys='id' takes the column of keys that id= names: say its name, not {shown(id)} (for a "
            "file called so, give its path as './id')"
        )
    return KeyColumn(id)


@dataclass(frozen=True)
class KeySource:
    """Keys of rows 0, 1, ... by blocks: ``blocks()`` begins anew each time. ``rows``: None where they are
    those of the table's own file."""

    name: str
    blocks: Callable[[], Iterator[KeyBlock]]
    fingerprint: dict[str, Any]
    rows: int | None = None


def key_source(given: Any, table: FeatureSource) -> KeySource:
    """The keys that ``given`` describes for the rows of a table: ``"id"`` for its column of ids; an array,
    column or list, see `featstore.base.keys.as_keys`; the path of a ``.npy``, of a Parquet or Arrow file with
    one column, or of a ``.txt`` (``.txt.gz``) with a key a line, which is a string as it stands there.

    Raises SourceError.
    """
    if is_of_id(given):
        return KeySource(table.name, table.keys, table.fingerprint() | {"keys": OF_ID})
    if isinstance(given, str | os.PathLike):
        return _of_path(Path(given))
    return _of_array(given, f"the keys of {table.name}", {})


def _of_array(given: Any, name: str, mark: dict[str, Any]) -> KeySource:
    """Keys in memory, taken a block at a time where that is possible."""
    keys = KeysInMemory(given, name)
    rows = len(keys)
    mark = mark or {"kind": "keys", "keys": rows, "sample_crc32": keys.sample_crc32()}

    def blocks() -> Iterator[KeyBlock]:
        return (keys.part(k, min(k + BLOCK_KEYS, rows)) for k in range(0, rows, BLOCK_KEYS))

    return KeySource(name, blocks, mark, rows)


class KeysInMemory:
    """Keys as a user has them, looked at in parts where they are an array, mapped or not, or a list."""

    def __init__(self, given: Any, name: str) -> None:
        self._given = given if isinstance(given, np.ndarray | list | tuple) else as_keys(given, name)
        self._name = name

    def __len__(self) -> int:
        return len(self._given)

    def part(self, low: int, high: int) -> KeyBlock:
        """Keys ``low`` to ``high``. Raises SourceError for what is none."""
        if isinstance(self._given, KeyBlock):
            return self._given.part(low, high)
        return as_keys(self._given[low:high], self._name, low)

    def sample_crc32(self) -> int:
        """Of keys spread evenly over them."""
        rows = len(self)
        places = np.linspace(0, max(0, rows - 1), num=min(64, rows)).astype(np.int64).tolist()
        some = (self.part(k, k + 1).as_bytes()[0] for k in places)
        return sample_crc32(np.concatenate([np.zeros(1, np.uint8), *some]))


def _of_path(path: Path) -> KeySource:
    try:
        stat_of(path)
    except SourceError as error:
        raise SourceError(f"node_keys: {error}") from error
    name = path.name.lower()
    if name.endswith(_TEXT_SUFFIXES):
        return KeySource(str(path), lambda: text_blocks(path), file_fingerprint("text keys", path))
    if name.endswith(ARROW_SUFFIXES):
        return KeySource(str(path), lambda: _of_columns(path), file_fingerprint("arrow keys", path))
    if not name.endswith(".npy"):
        raise SourceError(
            f"{path}: keys are read from .npy, from Parquet or Arrow with one column, and from .txt with a "
            "key a line"
        )
    try:
        keys = load_given(path, mapped=True)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as an array of keys: {error}") from None
    return _of_array(keys, str(path), file_fingerprint("npy keys", path))


def _of_columns(path: Path) -> Iterator[KeyBlock]:
    first = 0
    for batch in arrow_batches(path):
        if batch.num_columns != 1:
            names = ", ".join(map(str, batch.schema.names))
            raise SourceError(f"{path}: a file of keys has one column, this has {names}")
        yield keys_of_arrow(batch.column(0), str(path), first)
        first += batch.num_rows
