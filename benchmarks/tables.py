"""The tables that are measured: rows whose every value follows from the row's number, so that truth needs no
memory.

The same rows are kept in three forms, made by the same block iterator: a featstore store, a flat ``.npy``
file (for ``np.memmap`` and ``preadv``) and a Lance dataset. Forms that are already in the workspace with the
same size are used again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import note
from numpy.typing import NDArray

import featstore

ROW_BYTES = 512
PAGE_BYTES = 4096
ROWS_PER_PAGE = PAGE_BYTES // ROW_BYTES
COLUMNS = ROW_BYTES // 4
_BLOCK_ROWS = 16_384
_ROW_FACTOR = np.uint32(2654435761)
_COLUMN_FACTOR, _COLUMN_MASK = np.uint32(40503), np.uint32(0x5BD1E995)
_MASK = np.uint32(0x3FFFFFFF)  # a float32 with these bits is finite


def true_rows(rows: NDArray[Any], columns: int = COLUMNS) -> NDArray[np.float32]:
    """What rows hold: float32 [n, columns], made of all bits that keep a float finite."""
    mixed = rows.astype(np.uint32) * _ROW_FACTOR
    values = mixed[:, None] + ((np.arange(columns, dtype=np.uint32) * _COLUMN_FACTOR) ^ _COLUMN_MASK)
    values &= _MASK
    return values.view(np.float32)


def blocks(rows: int) -> Iterator[NDArray[np.float32]]:
    """The whole table, block by block."""
    for begin in range(0, rows, _BLOCK_ROWS):
        yield true_rows(np.arange(begin, min(begin + _BLOCK_ROWS, rows)))


def check_rows(ids: NDArray[Any], rows: NDArray[Any], samples: int = 1000) -> None:
    """Compare rows with the truth: ``samples`` of them at even distances, the first and the last."""
    if len(rows) != len(ids):
        raise AssertionError(f"{len(rows):,} rows came for {len(ids):,} ids")
    chosen = np.unique(np.linspace(0, len(ids) - 1, min(samples, len(ids))).astype(np.int64))
    expected = true_rows(np.asarray(ids)[chosen], rows.shape[1])
    if not np.array_equal(expected.view(np.uint32), np.ascontiguousarray(rows[chosen]).view(np.uint32)):
        raise AssertionError("rows differ from what was written")


@dataclass(frozen=True)
class Tables:
    """The forms of one table of ``rows`` rows in a workspace; each is made when it is first asked for."""

    workspace: Path
    rows: int

    @classmethod
    def of_size(cls, workspace: Path, size_bytes: int) -> Tables:
        return cls(workspace, size_bytes // PAGE_BYTES * ROWS_PER_PAGE)

    @property
    def pages(self) -> int:
        return self.rows // ROWS_PER_PAGE

    def store(self) -> Path:
        """A featstore store with the table ``features``, rows as given."""
        return self._made("table.store", self._pack)

    def flat(self) -> Path:
        """A ``.npy`` file; its rows begin at byte 4096, so that rows share pages as they do in the store."""
        return self._made("table.npy", self._write_flat)

    def lance(self) -> Path:
        """A Lance dataset of one fixed-size-list column ``features``, in one file."""
        return self._made("table.lance", self._write_lance)

    def chunk_files(self) -> list[Path]:
        """The store's files of rows."""
        with featstore.open(self.store()) as store:
            table = store.tables["features"]
            return [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]

    def _made(self, name: str, make: Any) -> Path:
        path, marker = self.workspace / name, self.workspace / f"{name}.json"
        wanted = {"rows": self.rows, "row_bytes": ROW_BYTES}
        if marker.exists() and json.loads(marker.read_text()) == wanted:
            return path
        marker.unlink(missing_ok=True)
        remove(path)
        note(f"writing {name}, {self.rows * ROW_BYTES / 2**30:.2f} GiB")
        make(path)
        marker.write_text(json.dumps(wanted))
        return path

    def _pack(self, path: Path) -> None:
        featstore.pack(path, blocks(self.rows)).close()

    def _write_flat(self, path: Path) -> None:
        write_npy(path, self.rows)

    def _write_lance(self, path: Path) -> None:
        from peers import lance_take

        lance_take.write(path, blocks(self.rows), self.rows)


def write_npy(path: Path, rows: int) -> None:
    """The table as a ``.npy`` file whose header fills one page."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {COLUMNS}), }}"
    text = header.ljust(PAGE_BYTES - 13) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode("latin1"))
        assert file.tell() == PAGE_BYTES
        for block in blocks(rows):
            file.write(block.data)
        file.flush()
        import os

        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def isolated_ids(tables: Tables, count: int, seed: int, apart_pages: int = 8) -> NDArray[np.int64]:
    """Ids of ``count`` rows in random order, each on a page of its own, pages at least ``apart_pages`` apart.

    So far apart that no planner saves a read by merging two: each row costs one read of a page.
    """
    if count * apart_pages > tables.pages:
        raise ValueError(f"{count:,} pages at least {apart_pages} apart do not fit {tables.pages:,} pages")
    random = np.random.default_rng(seed)
    free = tables.pages - count * (apart_pages - 1)
    page = np.sort(random.choice(free, count, replace=False)) + np.arange(count) * (apart_pages - 1)
    ids = page * ROWS_PER_PAGE + random.integers(0, ROWS_PER_PAGE, count)
    return random.permutation(ids).astype(np.int64)


def random_page_ids(tables: Tables, count: int, seed: int) -> NDArray[np.int64]:
    """Ids of ``count`` rows in random order, each on a page of its own, pages drawn from all."""
    random = np.random.default_rng(seed)
    page = random.choice(tables.pages, count, replace=False)
    return (page * ROWS_PER_PAGE + random.integers(0, ROWS_PER_PAGE, count)).astype(np.int64)
