"""Rows in several files, shards of one table: a folder of them, a pattern of names, or a list of paths.

Shards of a folder or a pattern follow one another by name, numbers in it as numbers: ``x2`` before ``x10``.
Names that are the same but for zeros before a number have no such order, and are an error; a list is taken as
it is given. All shards have rows of one shape and dtype. Files whose names begin with ``.`` or ``_`` are
marks of those who write shards, and no shards.
"""

from __future__ import annotations

import glob
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featstore.base.keys import KeyBlock
from featstore.base.system import asking, is_directory, is_regular, is_there
from featstore.errors import SourceError
from featstore.packing.sources.base import FeatureSource, stat_of

__all__ = ["SHARD_SUFFIXES", "ShardedRows", "shard_paths"]

#: Of files that a folder of shards may hold; all of one folder have the same.
SHARD_SUFFIXES = (
    ".npy", ".npz", ".parquet", ".arrow", ".feather", ".ipc", ".csv", ".csv.gz", ".pt", ".pth",
    ".safetensors", ".h5", ".hdf5", ".bin",
)  # fmt: skip
#: What tells that a folder is something else.
_OTHER_FOLDERS = ("zarr.json", ".zarray", ".zgroup", "node-feat.csv.gz", "raw/node-feat.csv.gz")
_SHOWN = 3


def shard_paths(spec: Any) -> list[Path] | None:
    """The files of a folder of shards, of a pattern (``"x-*.npy"``), or of a list of paths; None for what is
    none of these. Raises SourceError for a pattern without files, and for a folder of several kinds."""
    if isinstance(spec, list | tuple):
        paths = [Path(one) for one in spec if isinstance(one, str | os.PathLike)]
        return paths if paths and len(paths) == len(spec) else None
    if not isinstance(spec, str | os.PathLike):
        return None
    path = Path(spec)
    if is_directory(path):
        return _of_folder(path)
    if not glob.has_magic(str(path)) or is_there(path):
        return None
    found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    shown = [one for one in found if not one.name.startswith((".", "_"))]
    above = {parent for one in shown for parent in one.parents}
    if folder := next((one for one in shown if one in above), None):
        raise SourceError(
            f"{path}: both the folder {folder} and files in it have such a name, and their rows would stand "
            "twice: say which files, by an ending such as *.npy, or give a list of paths"
        )
    if not shown:
        hidden = f", but for {len(found):,} that begin with . or _" if found else ""
        raise SourceError(f"{path}: no file has such a name{hidden}")
    return _by_name(shown, path)


def _of_folder(path: Path) -> list[Path] | None:
    """The shards in a folder; None where it holds no file of a kind that shards have."""
    with asking(path, "list"):
        names = sorted(entry.name for entry in os.scandir(path) if entry.name[0] not in "._")
    kinds = {name: _kind(name) for name in names}
    if not any(kinds.values()) or any(is_regular(path / name) for name in _OTHER_FOLDERS):
        return None
    several = sorted({kind or f"{name!r}" for name, kind in kinds.items()})
    if len(several) > 1:
        raise SourceError(
            f"{path}: a folder of shards has files of one kind, this has {', '.join(several[:_SHOWN])}: give "
            "a pattern of their names, such as 'x-*.npy', or a list of paths"
        )
    return _by_name([path / name for name in names], path)


def _kind(name: str) -> str | None:
    longest_first = sorted(SHARD_SUFFIXES, key=len, reverse=True)
    return next((suffix for suffix in longest_first if name.lower().endswith(suffix)), None)


def _natural(path: Path) -> list[str | int]:
    """A path as texts and the numbers between them."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", str(path))]


def _by_name(paths: Sequence[Path], where: Path) -> list[Path]:
    ordered = sorted(paths, key=_natural)
    for one, other in pairwise(ordered):
        if _natural(one) == _natural(other):
            raise SourceError(
                f"{where}: {one.name} and {other.name} have the same number, so nothing says which shard "
                "comes first: give them as a list, in their order"
            )
    known: dict[tuple[int, int], Path] = {}
    for one in ordered:
        status = stat_of(one)
        other = known.setdefault((status.st_dev, status.st_ino), one)
        if other is not one:
            raise SourceError(
                f"{where}: {other.name} and {one.name} are the same file, and its rows may stand twice: "
                "take the link away, or, where both are meant, give a list of all shards in their order"
            )
    return ordered


class ShardedRows(FeatureSource):
    """The rows of several sources, one after the other. Raises SourceError, which names the shard, where
    their rows are not of one shape and dtype, or their columns have other names."""

    def __init__(self, shards: Sequence[FeatureSource], name: str) -> None:
        first = shards[0]
        for shard in shards[1:]:
            if (shard.row_shape, shard.dtype) != (first.row_shape, first.dtype):
                raise SourceError(
                    f"{name}: shard {shard.name} has rows of shape {shard.row_shape} and {shard.dtype}, "
                    f"shard {first.name} of {first.row_shape} and {first.dtype}; all shards of a table agree"
                )
            if shard.chosen != first.chosen:
                raise SourceError(
                    f"{name}: the columns of shard {shard.name} are not those of shard {first.name}, in "
                    "their order; all shards of a table agree"
                )
        counts = [shard.rows for shard in shards]
        rows = None if None in counts else sum(count for count in counts if count is not None)
        super().__init__(
            name, rows, first.row_shape, first.dtype, held_bytes=max(shard.held_bytes for shard in shards),
            replayable=all(shard.replayable for shard in shards),
        )  # fmt: skip
        self.chosen = first.chosen
        self._shards = list(shards)

    def ids(self) -> Iterator[NDArray[Any]]:
        """As `FeatureSource.ids`."""
        for shard in self._shards:
            yield from shard.ids()

    def keys(self) -> Iterator[KeyBlock]:
        """As `FeatureSource.keys`."""
        for shard in self._shards:
            yield from shard.keys()

    def fingerprint(self) -> dict[str, str | int]:
        """How many there are, and a CRC of the shards' own."""
        marks = json.dumps([shard.fingerprint() for shard in self._shards], sort_keys=True)
        return {"kind": "shards", "shards": len(self._shards), "crc32": zlib.crc32(marks.encode())}

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        done = 0
        for shard in self._shards:
            if shard.rows is not None and done + shard.rows <= start:
                done += shard.rows
                continue
            if shard.rows is not None:
                yield from shard.blocks(max(0, start - done), block_rows)
                done += shard.rows
                continue
            for block in shard.blocks(0, block_rows):
                first = min(len(block), max(0, start - done))
                if first < len(block):
                    yield block[first:]
                done += len(block)
        if done < start:
            raise SourceError(f"{self.name}: cannot start at row {start}; it has {done} rows")
