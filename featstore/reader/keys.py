"""Keys of nodes in a store: which node a key is of, and which key a node has.

A look-up goes by the index of hashes: by its upper bits the run of hashes is known in which a key's own may
stand, those that are equal name nodes, and of these the keys themselves are read and compared. So what is
found has the very key, and what is not found is not there. All of it is read through a reader, verified, in
pieces that fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_integer, known_name
from featstore.base.called import called
from featstore.base.checks import check_range
from featstore.base.compilation import njit
from featstore.base.ids import parse_ids
from featstore.base.keys import KEY_BYTES_MAX, KeyBlock, as_keys, take_strings
from featstore.errors import BudgetError, FormatError, IdError, SourceError, UnknownNameError
from featstore.plan.budget import least_reading_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader
from featstore.storage.store import OpenStore, as_store
from featstore.units import parse_bytes

__all__ = ["NodeKeys"]

#: Memory of one key of a piece: itself, what is read of the index for it, and work space.
_KEY_BYTES = 768
_READER_SHARE = 2  # one part in so many of the memory; the rest is pieces of keys
#: Runs of strings that are so near to each other are read as one.
_GAP_BYTES = 256
_SHOWN = 5
_STRINGS = "utf8"


@njit(cache=True, nogil=True)
def match_keys(
    data: NDArray[np.uint8], ends: NDArray[np.int64], ids: NDArray[np.int64], which: NDArray[np.int64],
    first: NDArray[np.int64], wanted_data: NDArray[np.uint8], wanted_ends: NDArray[np.int64],
    order: NDArray[np.int64], out: NDArray[np.int64],
) -> None:  # fmt: skip
    """Compare stored keys, of nodes ``ids``, with the wanted ones of the same hash, number ``which[i]``:
    ``order[first[w]:first[w + 1]]``. Those that are equal get the node in ``out``."""
    for i in range(ids.shape[0]):
        length = ends[i + 1] - ends[i]
        for place in range(first[which[i]], first[which[i] + 1]):
            key = order[place]
            begin = wanted_ends[key]
            if wanted_ends[key + 1] - begin != length:
                continue
            k = 0
            while k < length and data[ends[i] + k] == wanted_data[begin + k]:
                k += 1
            if k == length:
                out[key] = ids[i]


def least_keys_bytes(store: OpenStore, table: str) -> int:
    """The smallest budget with which a table's keys can be looked up."""
    parts = [store.table(f"{table}/keys/{part}") for part in store.manifest.keys[table].parts]
    return _READER_SHARE * least_reading_bytes([table_need(part, True) for part in parts])


class NodeKeys:
    """The keys of a table's nodes; made by :meth:`featstore.Store.ids`. A context manager.

    ``kind``: ``"int64"`` or ``"utf8"``. ``len`` is the number of nodes. Looking up reads the disk each time:
    give many keys at once.
    """

    def __init__(self, store: OpenStore, table: str, memory: int | str = "64MiB") -> None:
        as_store(store)
        entry = store.manifest.keys.get(known_name(table, store.tables, "the store has no table"))
        if entry is None:
            raise SourceError(
                f"the nodes of table {table!r} of {store.path} have no keys: pack it with node_keys= "
                "(--node-keys), or take its node ids, 0 to n-1"
            )
        self.store, self.table, self.kind = store, table, entry.kind
        self._entry, self._nodes = entry, entry.hashes.rows
        self._memory = memory
        budget = parse_bytes(memory, "memory")
        own = budget // _READER_SHARE
        self._parts = {part: f"{table}/keys/{part}" for part in entry.parts}
        names = list(self._parts.values())
        least = least_keys_bytes(store, table)
        if budget < least:
            raise BudgetError(least, budget, f"look up keys of table {table!r}")
        self._reader = Reader(store, tables=names, memory=budget - own, static=None)
        self._piece = max(16, own // _KEY_BYTES)
        self._key_bytes = max(KEY_BYTES_MAX, own // 4)
        self._bits = (entry.starts.rows - 1).bit_length() - 1

    def __len__(self) -> int:
        """Number of nodes."""
        return self._nodes

    def lookup(self, keys: Any, *, missing: int | None = None) -> NDArray[np.int64]:
        """Node ids of keys, int64 [n], in their order.

        ``keys``: an array, list or column of whole numbers or of strings, as they were packed: ``7`` is not
        ``"7"``. ``missing``: what stands for a key that no node has, -1 for instance; without it such keys
        are an UnknownNameError that names the first few. Raises SourceError for what are no keys of this
        kind, CorruptionError, DeviceError, FormatError, ClosedError.
        """
        wanted = as_keys(keys, "keys")
        stand_in = None if missing is None else as_integer(missing, "missing", -(2**63), -1)
        if len(wanted) and wanted.kind != self.kind:
            raise SourceError(
                f"keys are of kind {wanted.kind}, and those of table {self.table!r} are {self.kind}: 7 is "
                "not '7'"
            )
        out = np.full(len(wanted), -1)
        for low in range(0, len(wanted), self._piece):
            high = min(low + self._piece, len(wanted))
            out[low:high] = self._found(wanted.part(low, high))
        unknown = np.flatnonzero(out < 0)
        if len(unknown) and stand_in is None:
            names = ", ".join(repr(wanted.key(int(place))) for place in unknown[:_SHOWN])
            raise UnknownNameError(
                f"{len(unknown):,} of {len(wanted):,} keys are of no node of table {self.table!r}: {names}"
                f"{', ...' * (len(unknown) > _SHOWN)}; give missing=-1 to get -1 for them"
            )
        out[unknown] = stand_in or -1
        return out

    def keys(self, ids: Any) -> NDArray[Any]:
        """Keys of node ids, in their order: int64 [n], or an array of ``str`` [n]. Raises IdError,
        CorruptionError, DeviceError, FormatError, ClosedError."""
        given = parse_ids(ids)
        values = given.values.reshape(-1)
        check_ids(values, self._nodes, self.table)
        found = [keys for _, keys in self.pieces(values)]
        whole = np.concatenate(found) if found else np.empty(0, object if self.kind == _STRINGS else np.int64)
        return whole.reshape(given.shape)

    def pieces(self, ids: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Node ids, int64 [n], in pieces whose keys fit the memory together, and these. Raises what
        :meth:`keys` raises, but for ids."""
        for some, block in self._blocks(ids):
            yield some, block.array()

    def _read(self, part: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        name = self._parts[part]
        found: NDArray[Any] = self._reader.read({name: rows})[name]
        return found

    def _runs(self, part: str, runs: NDArray[np.int64]) -> NDArray[Any]:
        name = self._parts[part]
        found: NDArray[Any] = self._reader.read_runs({name: runs})[name]
        return found

    def _blocks(self, ids: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], KeyBlock]]:
        """The ids in pieces whose keys fit the memory, and these."""
        for low in range(0, len(ids), self._piece):
            piece = ids[low : low + self._piece]
            if self.kind != _STRINGS:
                yield piece, KeyBlock(self._read("values", piece))
                continue
            begins, ends = self._cuts(piece)
            sizes = np.cumsum(ends - begins)
            done = 0
            while done < len(piece):
                limit = (int(sizes[done - 1]) if done else 0) + self._key_bytes
                end = max(done + 1, int(np.searchsorted(sizes, limit, side="right")))
                yield piece[done:end], self._strings(begins[done:end], ends[done:end])
                done = end

    def _cuts(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the strings of some nodes begin and end."""
        ends = self._read("offsets", np.concatenate([ids, ids + 1]))
        begins, ends = ends[: len(ids)], ends[len(ids) :]
        bad = (begins < 0) | (ends < begins) | (ends > self._entry.values.rows)
        if (bad | (ends - begins > KEY_BYTES_MAX)).any():
            raise FormatError(
                f"the offsets of the keys of {self._where()} cut no strings: run featstore verify"
            )
        return begins, ends

    def _strings(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> KeyBlock:
        """The strings that are cut so, which may be the same or overlap."""
        cuts, places = np.unique(np.stack([begins, ends], axis=1), axis=0, return_inverse=True)
        begins, ends = cuts[:, 0], cuts[:, 1]
        new = np.ones(len(cuts), bool)
        new[1:] = (begins[1:] < ends[:-1]) | (begins[1:] - ends[:-1] > _GAP_BYTES)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(cuts)) - 1
        runs = np.stack([begins[first], ends[last]], axis=1)
        data = self._runs("values", runs) if len(first) else np.empty(0, np.uint8)
        at = np.cumsum(runs[:, 1] - runs[:, 0]) - (runs[:, 1] - runs[:, 0])
        shift = (at - runs[:, 0])[np.cumsum(new) - 1]
        return _cut(data, begins + shift, ends + shift).take(places.reshape(-1))

    def _found(self, wanted: KeyBlock) -> NDArray[np.int64]:
        """The nodes of some keys, -1 for those of none."""
        out = np.full(len(wanted), -1)
        hashes = wanted.hashes()
        order = np.argsort(hashes, kind="stable")
        distinct, first = np.unique(hashes[order], return_index=True)
        bounds = np.append(first, len(hashes))
        data, ends = wanted.as_bytes()
        for places, which in self._candidates(distinct):
            ids = self._read("ids", places).astype(np.int64)
            check_range(ids, self._nodes, f"an id of the index of the keys of {self._where()}")
            done = 0
            for piece, block in self._blocks(ids):
                stored, stored_ends = block.as_bytes()
                own = which[done : done + len(piece)]
                match_keys(stored, stored_ends, piece, own, bounds, data, ends, order, out)
                done += len(piece)
        return out

    def _candidates(
        self, hashes: NDArray[np.uint64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Places in the index with one of these hashes, which ascend, and which of them it is."""
        if self._nodes == 0 or len(hashes) == 0:
            return
        upper = np.zeros(len(hashes), np.int64)
        if self._bits:
            upper = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        upper = np.unique(upper)
        found = self._read("starts", np.concatenate([upper, upper + 1]))
        begins, ends = found[: len(upper)], found[len(upper) :]
        if ((begins < 0) | (ends < begins) | (ends > self._nodes)).any():
            raise FormatError(f"the index of the keys of {self._where()} is none: run featstore verify")
        for runs in _cut_runs(begins, ends, 16 * self._piece):
            lengths = runs[:, 1] - runs[:, 0]
            ends = np.cumsum(lengths)
            places = np.arange(ends[-1]) + np.repeat(runs[:, 0] - (ends - lengths), lengths)
            there = self._read("hashes", places)
            which = np.minimum(np.searchsorted(hashes, there), len(hashes) - 1)
            hit = np.flatnonzero(hashes[which] == there)
            for low in range(0, len(hit), self._piece):
                some = hit[low : low + self._piece]
                yield places[some], which[some]

    def _where(self) -> str:
        return f"table {self.table!r} of {self.store.path}"

    def close(self) -> None:
        """Give everything back. May be called more than once."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.table, self._memory)

    def __repr__(self) -> str:
        return called(f"{self.store!r}.ids", self.table, memory=self._memory)


def check_ids(ids: NDArray[np.int64], nodes: int, table: str) -> None:
    """Raise IdError for one that is no node."""
    wrong = np.flatnonzero((ids < 0) | (ids >= nodes))
    if len(wrong):
        at = int(wrong[0])
        raise IdError(f"ids[{at}] is {int(ids[at])}, and table {table!r} has {nodes:,} nodes")


def _cut(data: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> KeyBlock:
    """Strings that may have something between them, side by side."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
    out = np.empty(int(offsets[-1]), np.uint8)
    take_strings(data, begins, np.arange(len(begins)), offsets, out)
    return KeyBlock(out, offsets)


def _cut_runs(begins: NDArray[np.int64], ends: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Runs [begin, end) in groups of at most ``most`` elements; one that is longer is cut."""
    group: list[tuple[int, int]] = []
    held = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while begin < end:
            take = min(end - begin, most - held)
            group.append((begin, begin + take))
            begin, held = begin + take, held + take
            if held == most:
                yield np.array(group)
                group, held = [], 0
    if group:
        yield np.array(group)
