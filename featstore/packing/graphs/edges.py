"""Edge lists as streams: arrays, ``.npy`` and ``.npz`` members, CSR matrices, Parquet and Arrow.

Each stream can be passed over again and again and gives the same runs of ``(sources, targets)`` in int64, so
that a graph is built in two passes without the edges ever being in memory as a list. Those of a text are in
:mod:`featstore.packing.graphs.text_edges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.packing.graphs.columns import SOURCE_NAMES, TARGET_NAMES, ends_of, left_out
from featstore.packing.sources.base import FileReader, import_extra
from featstore.packing.sources.columns import refuse_twice
from featstore.packing.sources.files import NpyHeader, read_npy_header
from featstore.packing.sources.npz import MemberReader
from featstore.packing.sources.tables import arrow_batches, open_arrow

__all__ = ["ArrayEdges", "ArrowEdges", "CsrEdges", "NpyEdges", "NpzEdges"]

Edges = tuple[NDArray[np.int64], NDArray[np.int64]]


class ArrayEdges:
    """Edges of two integer arrays in memory (or mapped), of any strides."""

    def __init__(self, sources: NDArray[Any], targets: NDArray[Any], name: str) -> None:
        for array in (sources, targets):
            require_integers(array.dtype, name)
        if sources.ndim != 1 or sources.shape != targets.shape:
            raise SourceError(
                f"{name}: {sources.shape} sources and {targets.shape} targets are no list of edges"
            )
        self.name = name
        self._sources = sources
        self._targets = targets

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        for low in range(0, self._sources.shape[0], block_edges):
            cut = slice(low, low + block_edges)
            yield as_ids(self._sources[cut]), as_ids(self._targets[cut])

    def where(self, edge: int) -> str:
        """The edge's number."""
        return f"edge {edge:,}"


class NpyEdges:
    """Edges of a ``.npy`` file, ``[2, edges]`` or ``[edges, 2]``, in either memory order."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._header = read_npy_header(path)
        self._edges, self._interleaved = edge_layout(self._header, self.name)

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        head = self._header
        width = head.dtype.itemsize
        with FileReader(self._path) as first, FileReader(self._path) as second:
            for low in range(0, self._edges, block_edges):
                count = min(block_edges, self._edges - low)
                if self._interleaved:
                    pairs = np.empty((count, 2), dtype=head.dtype)
                    first.read_into(pairs, head.offset + 2 * low * width)
                    yield as_ids(pairs[:, 0]), as_ids(pairs[:, 1])
                else:
                    ids = np.empty((2, count), dtype=head.dtype)
                    first.read_into(ids[0], head.offset + low * width)
                    second.read_into(ids[1], head.offset + (self._edges + low) * width)
                    yield as_ids(ids[0]), as_ids(ids[1])

    def where(self, edge: int) -> str:
        """The edge's number."""
        return f"edge {edge:,}"


class NpzEdges:
    """Edges of an archive: one member ``[2, edges]`` or ``[edges, 2]``, or one member of sources and one of
    targets."""

    def __init__(self, path: Path, members: Sequence[str]) -> None:
        self.name = f"{path}[{', '.join(members)}]"
        self._path = path
        self._members = members
        heads = []
        for member in members:
            with MemberReader(path, member) as reader:
                heads.append(reader.header)
        for head in heads:
            require_integers(head.dtype, self.name)
        if len(heads) == 2:
            self._edges, self._interleaved = heads[0].values, False
            if len(heads[0].shape) != 1 or heads[0].shape != heads[1].shape:
                raise SourceError(
                    f"{self.name}: shapes {heads[0].shape} and {heads[1].shape} are no list of edges"
                )
        else:
            self._edges, self._interleaved = edge_layout(heads[0], self.name)

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        with ExitStack() as stack:
            first = stack.enter_context(MemberReader(self._path, self._members[0]))
            second = first
            if not self._interleaved:
                second = stack.enter_context(MemberReader(self._path, self._members[-1]))
                if len(self._members) == 1:
                    second.skip(self._edges)
            for low in range(0, self._edges, block_edges):
                count = min(block_edges, self._edges - low)
                if self._interleaved:
                    pairs = first.read(2 * count).reshape(count, 2)
                    yield as_ids(pairs[:, 0]), as_ids(pairs[:, 1])
                else:
                    yield as_ids(first.read(count)), as_ids(second.read(count))

    def where(self, edge: int) -> str:
        """The edge's number."""
        return f"edge {edge:,}"


class CsrEdges:
    """Edges of a CSR matrix ``A[source, target]``: index pointers in memory, column indices there or in an
    archive."""

    def __init__(
        self, indptr: NDArray[np.int64], indices: NDArray[Any] | tuple[Path, str], name: str
    ) -> None:
        self.name = name
        self.nodes = indptr.size - 1
        self._indptr = indptr
        self._indices = indices

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        with ExitStack() as stack:
            reader = None
            if isinstance(self._indices, tuple):
                reader = stack.enter_context(MemberReader(*self._indices))
            for low in range(0, int(self._indptr[-1]), block_edges):
                high = min(low + block_edges, int(self._indptr[-1]))
                first = int(np.searchsorted(self._indptr, low, side="right")) - 1
                last = int(np.searchsorted(self._indptr, high, side="left"))
                ends = np.clip(self._indptr[first : last + 1], low, high)
                sources = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(ends))
                if reader is not None:
                    yield sources, as_ids(reader.read(high - low))
                else:
                    assert isinstance(self._indices, np.ndarray)
                    yield sources, as_ids(self._indices[low:high])

    def where(self, edge: int) -> str:
        """The edge's place in the matrix."""
        return f"non-zero {edge:,}"


class ArrowEdges:
    """Edges of a Parquet or Arrow file: columns ``src`` and ``dst`` or the like, or the only two of
    integers."""

    def __init__(self, path: Path, key: str | Sequence[str] | None = None) -> None:
        self.name = str(path)
        self._path = path
        arrow = import_extra("pyarrow", "arrow", self.name)
        with open_arrow(path) as file:
            schema = file.schema_arrow if path.suffix.lower() == ".parquet" else file.schema
        integers = [field.name for field in schema if arrow.types.is_integer(field.type)]
        if key is not None:
            chosen = [part.strip() for part in key.split(",")] if isinstance(key, str) else list(key)
        else:  # ends that are text must not make ends of two other columns
            named = {
                *integers,
                *(field.name for field in schema if field.name.lower() in SOURCE_NAMES + TARGET_NAMES),
            }
            held = [field.name for field in schema if field.name in named]
            chosen = [held[k] for k in ends_of(held) or ()]
        refuse_twice(schema.names, chosen, self.name)
        if len(chosen) != 2 or chosen[0] == chosen[1] or not set(chosen) <= set(integers):
            known = ", ".join(f"{field.name} ({field.type})" for field in schema)
            raise SourceError(
                f"{self.name}: no two integer columns {chosen}; give key='source,target', or where ends are "
                f"text, node_keys={{TYPE: ...}} of their nodes; columns: {known}"
            )
        if key is None:
            left_out(self.name, [field.name for field in schema if field.name not in chosen])
        self._columns = chosen

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        done = 0
        for whole in arrow_batches(self._path, self._columns, block_rows=block_edges):
            for low in range(0, whole.num_rows, block_edges):
                batch = whole.slice(low, block_edges)
                pair = [batch.column(batch.schema.get_field_index(name)) for name in self._columns]
                if any(column.null_count for column in pair):
                    raise SourceError(
                        f"{self.name}: a null among edges {done:,} to {done + batch.num_rows - 1:,}"
                    )
                yield as_ids(pair[0].to_numpy()), as_ids(pair[1].to_numpy())
                done += batch.num_rows

    def where(self, edge: int) -> str:
        """The row of an edge."""
        return f"row {edge:,}"


def as_ids(values: NDArray[Any]) -> NDArray[np.int64]:
    """Contiguous int64. Raises SourceError for unsigned numbers that it does not hold."""
    if values.dtype.newbyteorder("=") == np.uint64 and len(values) and int(values.max()) >= 2**63:
        raise SourceError(f"an end of an edge is {int(values.max())}, which does not fit int64")
    return np.ascontiguousarray(values, dtype=np.int64)


def require_integers(dtype: np.dtype[Any], name: str) -> None:
    """Raise SourceError for node ids that are no integers."""
    if dtype.kind not in "iu":
        keyed = "USOT"  # texts of every kind
        hint = "say node_keys={TYPE: ...} of its nodes" if dtype.kind in keyed else "convert them first"
        raise SourceError(f"{name}: node ids are integers, not {dtype}; {hint}")


def edge_layout(header: NpyHeader, name: str) -> tuple[int, bool]:
    """Number of edges of ``[2, edges]`` or ``[edges, 2]``, and whether the two ends stand side by side in the
    file."""
    require_integers(header.dtype, name)
    rows_are_ends = edge_axis(header.shape, name) == 0
    return header.values // 2, rows_are_ends == header.fortran_order


def edge_axis(shape: tuple[int, ...], name: str, *, ends_first: bool = False) -> int:
    """The axis with source and target: 0 for ``[2, edges]``, 1 for ``[edges, 2]``. ``ends_first``: it is 0
    where both would do, as of PyG's objects. Raises SourceError for what is neither, or both."""
    if len(shape) != 2 or 2 not in shape:
        raise SourceError(f"{name}: an edge list has shape [2, edges] or [edges, 2], not {list(shape)}")
    if shape[0] == shape[1] and not ends_first:
        raise SourceError(
            f"{name}: two edges of shape [2, 2] may be [2, edges] or [edges, 2], which are other edges; give "
            "them as CSC, (indptr, indices), a SciPy matrix A[source, target], a PyG Data, or in text or "
            "Parquet with columns source and target"
        )
    return 0 if shape[0] == 2 else 1
