"""Edges whose ends are keys, as edges between node ids.

The ends are looked up in tables in memory (:mod:`featstore.packing.keys.tables`), and their ids written to a
scratch file, from which the graph is built. Where the keys of all nodes do not fit the memory at once, the
edges are passed over once for each range of hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.keys import KeyBlock
from featstore.errors import SourceError
from featstore.packing.keys.spool import KeySpool, ScratchValues
from featstore.packing.keys.tables import TABLE_KEY_BYTES, KeyTable
from featstore.packing.memory import of_share

__all__ = ["Ends", "IdEdges", "KeyEdges", "NumberEdges", "edges_in_ids"]

_BLOCK_EDGES = 1 << 15
#: Of the memory, what blocks of edges and their keys may take.
_BLOCK_BYTES = _BLOCK_EDGES * 2 * 96
_SHOWN = 5


class KeyEdges(Protocol):
    """Edges in the user's order, their ends as keys, read by passes: each pass gives the same edges."""

    name: str

    def blocks(self, block_edges: int) -> Iterator[tuple[KeyBlock, KeyBlock]]:
        """Runs of edges: keys of sources and of targets."""
        ...

    def where(self, edge: int) -> str:
        """How a message names an edge."""
        ...


class Numbered(Protocol):
    """A stream of edges of numbers (`featstore.packing.graphs.build.EdgeStream`)."""

    name: str

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]: ...

    def where(self, edge: int) -> str: ...


class NumberEdges:
    """Edges of numbers, which are keys."""

    def __init__(self, stream: Numbered) -> None:
        self.name, self._stream = stream.name, stream

    def blocks(self, block_edges: int) -> Iterator[tuple[KeyBlock, KeyBlock]]:
        """See `KeyEdges`."""
        return ((KeyBlock(a), KeyBlock(b)) for a, b in self._stream.blocks(block_edges))

    def where(self, edge: int) -> str:
        """As the numbers' own."""
        return self._stream.where(edge)


@dataclass(frozen=True)
class Ends:
    """The keys of the nodes at the ends of a graph's edges, each None where ids are given."""

    sources: KeySpool | None
    targets: KeySpool | None
    names: tuple[str, str] = ("TYPE", "TYPE")  # of the tables

    @property
    def textual(self) -> bool:
        """Whether an end is a string."""
        return any(spool is not None and spool.kind == "utf8" for spool in (self.sources, self.targets))


class IdEdges:
    """Edges on a scratch file, source and target side by side: an `EdgeStream`."""

    def __init__(self, pairs: ScratchValues, stream: KeyEdges) -> None:
        self.name, self._pairs, self._stream = stream.name, pairs, stream

    def blocks(self, block_edges: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Runs of edges; see `EdgeStream`."""
        for block in self._pairs.blocks(2 * block_edges):
            yield np.ascontiguousarray(block[::2]), np.ascontiguousarray(block[1::2])

    def where(self, edge: int) -> str:
        """As the keys' own."""
        return self._stream.where(edge)

    def close(self) -> None:
        """Remove the scratch file."""
        self._pairs.close(remove=True)


def edges_in_ids(stream: KeyEdges, ends: Ends, memory_bytes: int, folder: Path, name: str) -> IdEdges:
    """The edges by node ids, on a scratch file ``NAME.key-edges`` in ``folder``. Raises SourceError that
    names the first edges whose keys no node has, BudgetError, DiskFullError, DeviceError."""
    spools = {id(spool): spool for spool in (ends.sources, ends.targets) if spool is not None}
    share = max(1, (memory_bytes - min(_BLOCK_BYTES, memory_bytes // 2)) // len(spools))
    more = 2 if memory_bytes < 2 * _BLOCK_BYTES else 1  # of more memory blocks have half, too
    with of_share(share, memory_bytes, more * len(spools)):
        ranges = {
            k: spool.ranges(-TABLE_KEY_BYTES, share, f"look up the keys of {spool.name!r}")
            for k, spool in spools.items()
        }
    disk = next(iter(spools.values())).disk
    pairs = ScratchValues(disk, folder / f"{name}.key-edges", np.int64)
    passes = max(map(len, ranges.values()))
    for number in range(passes):
        tables = {k: KeyTable(spools[k], own[number]) for k, own in ranges.items() if number < len(own)}
        done = 0
        for both in stream.blocks(_BLOCK_EDGES):
            count = len(both[0])
            if number and 2 * (done + count) > pairs.count:
                raise _changed(stream)
            found = pairs.read(2 * done, 2 * (done + count)) if number else np.full(2 * count, -1)
            for side, (keys, spool) in enumerate(zip(both, (ends.sources, ends.targets), strict=True)):
                if spool is None:
                    found[side::2] = _numbers(keys, stream, ends.names[side])
                elif id(spool) in tables:
                    _same_kind(keys, spool, stream)
                    ids = np.ascontiguousarray(found[side::2])
                    tables[id(spool)].find(keys, keys.hashes(), ids)
                    found[side::2] = ids
            if number == passes - 1:
                _refuse_unknown(found, both, (ends.sources, ends.targets), stream, done)
            pairs.put(2 * done, found)
            done += count
        if 2 * done != pairs.count:
            raise _changed(stream)
        del tables  # or there would be two ranges at once
    return IdEdges(pairs, stream)


def _numbers(keys: KeyBlock, stream: KeyEdges, table: str) -> NDArray[np.int64]:
    if keys.kind != "int64":
        raise SourceError(
            f"{stream.name}: an end is text, and its nodes have no keys: say node_keys={{{table!r}: ...}}, "
            "in the order of their rows"
        )
    return keys.values


def _same_kind(keys: KeyBlock, spool: KeySpool, stream: KeyEdges) -> None:
    if keys.kind != spool.kind and len(keys):
        words = {"int64": "whole numbers", "utf8": "strings"}
        raise SourceError(
            f"{stream.name}: its ends are {words[keys.kind]}, and the keys of {spool.name!r} are "
            f"{words[spool.kind]} ({spool.source}); give both as the same"
        )


def _refuse_unknown(
    found: NDArray[np.int64], both: tuple[KeyBlock, KeyBlock],
    spools: tuple[KeySpool | None, KeySpool | None], stream: KeyEdges, done: int,
) -> None:  # fmt: skip
    unknown = np.flatnonzero(found == -1).tolist()
    shown: list[str] = []
    for place in unknown:
        edge, side = divmod(place, 2)
        spool = spools[side]
        if spool is not None and len(shown) < _SHOWN:
            key = both[side].key(edge)
            shown.append(f"{key!r} ({'target' if side else 'source'} of {stream.where(done + edge)})")
    if shown:
        names = " and ".join(sorted({repr(spool.name) for spool in spools if spool is not None}))
        raise SourceError(
            f"{stream.name}: ends of edges that are no key of {names}: {', '.join(shown)}"
            f"{', ...' * (len(unknown) > len(shown))}. Where nodes have keys, the ends of a list of edges "
            "are keys; leave these edges out, or give these nodes rows"
        )


def _changed(stream: KeyEdges) -> SourceError:
    return SourceError(
        f"{stream.name}: gave other edges in a second pass; it must not change while it is packed"
    )
