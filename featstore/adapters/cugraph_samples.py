"""cuGraph's saved samples: the mini-batches in a folder of Parquet files, to be recorded as a trace.

``Trace.record(SavedSamples("samples/"), "epoch.trace")``. cuGraph's writers (``DistSampleWriter``, the bulk
sampler's before it) put many mini-batches into each file ``batch=RANK.FIRST-RANK.LAST.parquet``, or
``batch=FIRST-LAST.parquet``. Its columns are arrays of several lengths, filled up with nulls:

- ``map``: node ids, mini-batch after mini-batch, which ``renumber_map_offsets`` divides;
- ``majors``, ``minors``: both ends of each edge, as places among the node ids of its mini-batch, hop after
  hop; or ``major_offsets``, ``minors``: compressed, the minors of each place. A major is a node whose
  neighbours were drawn, its minors are these neighbours;
- ``label_hop_offsets``: where each hop of each mini-batch begins, among the edges or in ``major_offsets``;
- ``edge_id``, ``edge_type``, ``weight`` of the edges; ``input_index``, which ``input_offsets`` divides: the
  inputs of the sampler that were in the mini-batch; ``edge_inverse``: two numbers for each of these.

Offsets go on from file to file, so that a file begins at its first. How many mini-batches it has is what
``renumber_map_offsets`` says: by the version of the writer, LAST counts each hop. Samples of graphs with
types of nodes, and those that were not renumbered, have other columns, and are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_integer, as_path, need_package
from featstore.base.sequences import in_turn
from featstore.base.system import asking, is_directory
from featstore.base.warning import warn
from featstore.errors import IdError, SourceError
from featstore.packing.sources.tables import parquet_file

__all__ = ["SavedSamples"]

_NAME = re.compile(r"batch=(?:(\d+)\.)?(\d+)-(?:(\d+)\.)?(\d+)\.parquet")
_NEEDED = ("map", "renumber_map_offsets", "label_hop_offsets", "minors")
_ENDS = ("majors", "major_offsets")
_OF_EDGES = {"edge_id": "e_id", "edge_type": "edge_type", "weight": "weight"}
_OF_INPUTS = ("input_index", "input_offsets", "edge_inverse")
_KNOWN = {*_NEEDED, *_ENDS, *_OF_EDGES, *_OF_INPUTS}

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _File:
    """A file, the rank that wrote it, the number of its first mini-batch, and how many it has."""

    path: Path
    rank: int
    first: int
    batches: int


class SavedSamples(Sequence[Any]):
    """The mini-batches that cuGraph saved in a folder: a sequence of pairs (node ids, sample), by rank and
    number, for :meth:`featstore.Trace.record`.

    Node ids are int64 [m], cuGraph's own numbers of vertices. A sample is a mapping of ``row`` and ``col``,
    int64 [k]: the places in the node ids of each edge's minor and major, as cuGraph-PyG has them;
    ``num_sampled_edges``, a tuple by hop; and where cuGraph saved them ``e_id`` (its ``edge_id``),
    ``edge_type``, ``weight`` [k], ``input_index`` [seeds] and ``edge_inverse`` [2 seeds]. Which node ids are
    seeds is not saved: ``input_index`` says it by their places in the input of the sampler.

    One file is held in memory at a time. ``folder``: the directory that the writer was given; needs pyarrow.

    Raises SourceError for files that are none of these, with the columns that they have; MissingPackageError,
    DeviceError. Warns where the numbers of mini-batches have a gap, as a file is missing then.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(as_path(folder, "folder")))
        need_package("pyarrow.parquet", "arrow", f"{self.folder}: reading this")
        if not is_directory(self.folder):
            raise SourceError(f"{self.folder} is no directory; give the one that cuGraph's writer was given")
        self._files = _files(self.folder)
        ends = np.cumsum([file.batches for file in self._files])
        self._ends: NDArray[np.int64] = ends.astype(np.int64)
        self._held: tuple[int, Arrays] | None = None

    def __len__(self) -> int:
        """Number of mini-batches."""
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Any]:
        return in_turn(self)

    @overload
    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], dict[str, Any]]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """A mini-batch, or a list of some. Raises IdError, SourceError, DeviceError."""
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        number = as_integer(index, "the number of a mini-batch")
        number += len(self) * (number < 0)
        if not 0 <= number < len(self):
            raise IdError(f"mini-batch {index} is none of the {len(self):,} in {self.folder}")
        at = int(np.searchsorted(self._ends, number, side="right"))
        if self._held is None or self._held[0] != at:
            self._held = None
            self._held = at, _arrays(self._files[at].path)
        file = self._files[at]
        return _batch(self._held[1], number - int(self._ends[at]) + file.batches, file)

    def __repr__(self) -> str:
        return f"<SavedSamples {str(self.folder)!r}: {len(self):,} mini-batches, {len(self._files):,} files>"


def _files(folder: Path) -> list[_File]:
    """The files of a folder in order, without those that have no mini-batch. Raises SourceError."""
    with asking(folder, "look at"):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".parquet"))
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise SourceError(
                f"{folder / name}: not a name of cuGraph's saved samples (batch=00000.00000000-00000.00000255"
                ".parquet, batch=0-255.parquet); give a folder of these alone"
            )
        path = folder / name
        batches = len(_column(path, "renumber_map_offsets")) - 1
        found.append(_File(path, int(match[1] or 0), int(match[2]), batches))
        if batches < 1:
            raise _wrong(path, "renumber_map_offsets says that there is no mini-batch")
    if not found:
        raise SourceError(f"{folder}: no file batch=*.parquet, as cuGraph's writers save samples")
    found.sort(key=lambda file: (file.rank, file.first))
    for file, after in pairwise(found):
        if file.rank == after.rank and file.first + file.batches > after.first:
            raise _wrong(
                after.path, f"it begins at mini-batch {after.first:,}, which {file.path.name} has as well"
            )
    in_order = sorted(found, key=lambda file: file.first)
    if any(file.first + file.batches > after.first for file, after in pairwise(in_order)):
        for _, of_rank in groupby(found, key=lambda file: file.rank):  # each numbers its own
            _warn_of_gaps(list(of_rank), folder)
    else:  # they are numbered on from rank to rank
        _warn_of_gaps(in_order, folder)
    return found


def _warn_of_gaps(files: list[_File], folder: Path) -> None:
    end = 0
    for file in files:
        if file.first > end:
            warn(
                f"{folder}: no file has mini-batches {end:,} to {file.first - 1:,}: where cuGraph saved "
                "them, copy their files, too"
            )
        end = max(end, file.first + file.batches)


def _checked_columns(path: Path, names: list[str]) -> None:
    """Raise SourceError unless these are the columns of samples of one type of nodes, renumbered."""
    ends = [name for name in _ENDS if name in names]
    if set(_NEEDED) <= set(names) <= _KNOWN and len(ends) == 1 and len(set(names)) == len(names):
        return
    maybe = ", ".join((*_OF_EDGES, *_OF_INPUTS))
    raise SourceError(
        f"{path}: has the columns {', '.join(names)}; read are samples of one type of nodes, renumbered, "
        f"with {', '.join(_NEEDED)}, either of {' and '.join(_ENDS)}, and {maybe}. Sample with renumber=True "
        "from a graph of one type, or record the loader's own mini-batches, Trace.record(loader, path)"
    )


def _column(path: Path, name: str) -> NDArray[Any]:
    """A column without the nulls that fill it up. Raises SourceError."""
    arrow = need_package("pyarrow", "arrow", f"{path}: reading this")
    with parquet_file(path) as file:
        _checked_columns(path, file.schema_arrow.names)
        try:
            column = file.read([name], use_threads=False).column(0)
        except (arrow.ArrowException, OSError) as error:
            raise _wrong(path, f"column {name!r} cannot be read: {error}") from error
    values = column.drop_null()
    if column.slice(0, len(values)).null_count:
        raise _wrong(path, f"column {name!r} has nulls before its end")
    wanted = arrow.types.is_floating if name == "weight" else arrow.types.is_integer
    if not len(values):
        return np.empty(0, np.float32 if name == "weight" else np.int64)
    if not wanted(values.type):
        raise _wrong(path, f"column {name!r} holds {values.type}")
    found: NDArray[Any] = values.to_numpy()
    return found if name == "weight" else found.astype(np.int64, casting="same_kind", copy=False)


def _arrays(path: Path) -> Arrays:
    """All columns of a file that have values, offsets from 0. Raises SourceError where they do not fit
    together."""
    with parquet_file(path) as file:
        names = file.schema_arrow.names
    held = {name: _column(path, name) for name in names}
    held = {name: values for name, values in held.items() if name in _NEEDED or name in _ENDS or len(values)}
    batches = len(held["renumber_map_offsets"]) - 1
    hops, rest = divmod(len(held["label_hop_offsets"]) - 1, max(1, batches))
    if batches < 1 or rest or hops < 1:
        raise _wrong(
            path, f"label_hop_offsets has no whole number of hops for each of {batches:,} mini-batches"
        )
    if "input_index" in held and len(held.get("input_offsets", ())) != batches + 1:
        raise _wrong(path, f"input_offsets does not divide input_index for {batches:,} mini-batches")
    ends = "majors" if "majors" in held else "major_offsets"
    _offsets(path, held, "renumber_map_offsets", len(held["map"]))
    _offsets(path, held, "label_hop_offsets", len(held[ends]) - (ends == "major_offsets"))
    if ends == "major_offsets":
        _offsets(path, held, "major_offsets", len(held["minors"]))
    if "input_index" in held:
        _offsets(path, held, "input_offsets", len(held["input_index"]))
    edges = len(held["minors"])
    lengths = dict.fromkeys(("majors", *_OF_EDGES), edges)
    lengths["edge_inverse"] = 2 * len(held.get("input_index", ()))
    for name, length in lengths.items():
        if name in held and len(held[name]) != length:
            raise _wrong(path, f"column {name!r} has {len(held[name]):,} values, not {length:,}")
    return held


def _offsets(path: Path, held: Arrays, name: str, end: int) -> None:
    """Let offsets begin at 0. Raises SourceError unless they rise to ``end``."""
    offsets = held[name]
    offsets = offsets - offsets[:1]
    if not len(offsets) or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
        raise _wrong(path, f"{name} does not rise by the {end:,} values that it divides")
    held[name] = offsets


def _batch(held: Arrays, number: int, file: _File) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """A mini-batch of a file."""
    begin, end = held["renumber_map_offsets"][number : number + 2]
    nodes = held["map"][begin:end]
    hops = (len(held["label_hop_offsets"]) - 1) // file.batches
    by_hop = held["label_hop_offsets"][number * hops : (number + 1) * hops + 1]
    if "majors" in held:
        col = held["majors"][by_hop[0] : by_hop[-1]]
    else:
        lists = held["major_offsets"][by_hop[0] : by_hop[-1] + 1]
        by_hop = held["major_offsets"][by_hop]
        col = np.repeat(np.arange(len(lists) - 1), np.diff(lists))
    edges = slice(by_hop[0], by_hop[-1])
    row = held["minors"][edges]
    for places in (row, col):
        if len(places) and not 0 <= places.min() <= places.max() < len(nodes):
            raise _wrong(
                file.path,
                f"edges of mini-batch {file.first + number:,} lead outside its {len(nodes):,} nodes",
            )
    sample: dict[str, Any] = {"row": row, "col": col, "num_sampled_edges": tuple(np.diff(by_hop).tolist())}
    sample |= {ours: held[name][edges] for name, ours in _OF_EDGES.items() if name in held}
    if "input_index" in held:
        low, high = held["input_offsets"][number : number + 2]
        sample["input_index"] = held["input_index"][low:high]
        if "edge_inverse" in held:
            sample["edge_inverse"] = held["edge_inverse"][2 * low : 2 * high]
    return nodes, sample


def _wrong(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{path}: {what}; it is damaged, or of a version of cuGraph whose samples are not known here"
    )
