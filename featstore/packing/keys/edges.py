"""Lists of edges whose ends are keys, strings among them: arrays, frames, Parquet, Arrow and text.

Ends that are numbers alone come through the streams of :mod:`featstore.packing.graphs.edges` as well. In text
the first line names the columns: without it nobody could tell names from keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.files import load_given
from featstore.base.keys import KeyBlock, KeyKind, as_keys, keys_of_arrow
from featstore.base.system import is_regular
from featstore.errors import SourceError
from featstore.packing.graphs.columns import SOURCE_NAMES, TARGET_NAMES, ends_named, ends_of, left_out
from featstore.packing.graphs.edges import edge_axis
from featstore.packing.keys.sources import KeysInMemory
from featstore.packing.sources.base import file_fingerprint
from featstore.packing.sources.cells import column_blocks, line_cells, separator_of
from featstore.packing.sources.columns import refuse_twice
from featstore.packing.sources.frames import frame_table, is_frame
from featstore.packing.sources.lines import line_chunks
from featstore.packing.sources.pyg import PygEdges
from featstore.packing.sources.tables import ARROW_SUFFIXES, arrow_batches, open_arrow

__all__ = ["frame_ends", "key_edges"]

_Pairs = Iterator[tuple[KeyBlock, KeyBlock]]


class _Edges:
    """Edges that ``blocks`` gives anew each time; ``where``: what an edge is, beside its number."""

    def __init__(self, name: str, blocks: Callable[[int], _Pairs], unit: str) -> None:
        self.name, self._blocks, self._unit = name, blocks, unit

    def blocks(self, block_edges: int) -> _Pairs:
        """See `featstore.packing.keys.translate.KeyEdges`."""
        return self._blocks(block_edges)

    def where(self, edge: int) -> str:
        """The edge's number."""
        return f"{self._unit} {edge:,}"


def key_edges(
    spec: Any, key: str | None, kinds: tuple[KeyKind | None, KeyKind | None]
) -> tuple[_Edges, dict[str, str | int]] | None:
    """A list of edges with keys at its ends, and what tells it from another; None for what is no such list:
    matrices and PyG's edges speak of places. ``kinds``: of the keys of the nodes at either end.

    Raises SourceError.
    """
    if isinstance(spec, str | os.PathLike):
        path = Path(spec)
        if path.suffix.lower() in ARROW_SUFFIXES:
            return _of_arrow_file(path, key), file_fingerprint("keyed", path, key=key or "")
        separator = separator_of(path)
        if separator is not None:
            return _of_text(path, separator, key, kinds), file_fingerprint("keyed", path, key=key or "")
        if path.suffix.lower() != ".npy" or not is_regular(path):
            return None
        try:
            spec = load_given(path, mapped=True)  # whose dtype alone is looked at where it is numbers
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read edges from {path}: {error}") from None
    if isinstance(spec, np.ndarray) and not isinstance(spec, PygEdges) and spec.dtype.kind in "USOT":
        if key is not None:
            raise SourceError(
                f"graph_key={key!r} names columns, and an array of edges has none: leave it out"
            )
        pairs = spec if edge_axis(spec.shape, "<edges>") == 0 else spec.T
        return _of_arrays(pairs[0], pairs[1], "<edges>")
    if is_frame(spec):
        return _of_arrays(*_columns_of(spec, key), "<edges>")
    if isinstance(spec, Mapping):
        columns = list(spec.values())
        source, target = (columns[k] for k in _ends([str(name) for name in spec], key, "<edges>"))
        return _of_arrays(source, target, "<edges>")
    return None


def _ends(names: Sequence[str], key: str | None, name: str, *, named: bool = False) -> tuple[int, int]:
    """Which columns are source and target. ``named``: only by their names."""
    if key is not None:
        return ends_named(key, names, name)
    known = {one.lower() for one in names} & {*SOURCE_NAMES, *TARGET_NAMES}
    ends = ends_of(names) if known or not named else None
    if ends is None:
        raise SourceError(
            f"{name}: which of the columns {', '.join(names)} are the ends of an edge? Call them source and "
            "target, or say graph_key='source,target'"
        )
    refuse_twice(names, [names[k] for k in ends], name)
    left_out(name, [one for k, one in enumerate(names) if k not in ends])
    return ends


def _columns_of(frame: Any, key: str | None) -> tuple[Any, Any]:
    """The columns of a frame that are sources and targets."""
    table = frame_table(frame, "<edges>")
    source, target = _ends([str(name) for name in table.column_names], key, "<edges>")
    return table.column(source), table.column(target)


def frame_ends(frame: Any, key: str | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and targets of a frame of edges between numbers. Raises SourceError."""
    found = [as_keys(column, "<edges>") for column in _columns_of(frame, key)]
    if any(block.kind != "int64" for block in found):
        raise SourceError(
            "<edges>: node ids are integers, and an end is text: say node_keys={TYPE: ...} of its nodes"
        )
    return found[0].values, found[1].values


def _of_arrays(sources: Any, targets: Any, name: str) -> tuple[_Edges, dict[str, str | int]]:
    a, b = KeysInMemory(sources, f"{name} sources"), KeysInMemory(targets, f"{name} targets")
    if len(a) != len(b):
        raise SourceError(f"{name}: {len(a):,} sources and {len(b):,} targets are no list of edges")

    def blocks(count: int) -> _Pairs:
        cuts = ((k, min(k + count, len(a))) for k in range(0, len(a), count))
        return ((a.part(*cut), b.part(*cut)) for cut in cuts)

    mark: dict[str, str | int] = {
        "kind": "keyed",
        "edges": len(a),
        "sample_crc32": a.sample_crc32() * 31 + b.sample_crc32(),
    }
    return _Edges(name, blocks, "edge"), mark


def _of_arrow_file(path: Path, key: str | None) -> _Edges:
    with open_arrow(path) as file:
        names = [
            str(n) for n in (file.schema_arrow if path.suffix.lower() == ".parquet" else file.schema).names
        ]
    columns = [names[k] for k in _ends(names, key, str(path))]

    def blocks(count: int) -> _Pairs:
        first = 0
        for batch in arrow_batches(path, columns, block_rows=count):
            for low in range(0, batch.num_rows, count):
                pair = [batch.column(batch.schema.get_field_index(n)).slice(low, count) for n in columns]
                yield (
                    keys_of_arrow(pair[0], f"{path}, {columns[0]!r}", first + low),
                    keys_of_arrow(pair[1], f"{path}, {columns[1]!r}", first + low),
                )
            first += batch.num_rows

    return _Edges(str(path), blocks, "row")


def _of_text(
    path: Path, separator: int, key: str | None, kinds: tuple[KeyKind | None, KeyKind | None]
) -> _Edges:
    head = next((chunk for chunk, _ in line_chunks(path)), b"").split(b"\n")[0]
    names = line_cells(head, separator, str(path))
    try:
        ends = _ends(names, key, str(path), named=True)
    except SourceError as error:
        raise SourceError(f"{error}; the first line of a text file of keys names its columns") from None

    def blocks(count: int) -> _Pairs:
        first = 0
        for pair in column_blocks(path, separator, ends, 1):
            a, b = (
                _as_numbers(block, str(path), first) if kind != "utf8" else block
                for block, kind in zip(pair, kinds, strict=True)
            )
            for low in range(0, len(a), count):
                high = min(low + count, len(a))
                yield a.part(low, high), b.part(low, high)
            first += len(a)

    return _Edges(str(path), blocks, "edge")


def _as_numbers(block: KeyBlock, name: str, first: int) -> KeyBlock:
    """Cells that have to be whole numbers, because the keys of their nodes are."""
    cells = block.array().tolist()
    for k, cell in enumerate(cells):
        if not (cell.isascii() and cell.removeprefix("-").isdigit() and abs(int(cell)) < 2**63):
            raise SourceError(f"{name}: edge {first + k:,} has {cell!r}, and the keys of its nodes are int64")
    numbers: NDArray[np.int64] = np.array([int(cell) for cell in cells], np.int64)
    return KeyBlock(numbers)
