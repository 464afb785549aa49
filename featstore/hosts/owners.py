"""Which host owns a node's row, and which of that host's rows it is: a byte a node, and 0.03 more for the
own.

Which of a host's nodes one is, is how many nodes before it are of that host. That is known of each 64th node;
the nodes from there on are counted, in the cache line that says who owns it. (Ranks in two levels are from
Jacobson, FOCS 1989.)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.dtypes import node_dtype
from featstore.base.native import equal_64, popcount, prefetch
from featstore.errors import FormatError, IdError
from featstore.reader.reader import Reader
from featstore.storage.store import OpenStore

_NEAR, _FAR = 64, 1 << 16  # nodes from one that has a count to the next
_BLOCK = 1 << 20  # a multiple of these
_AHEAD = 16  # ids


@njit(cache=True, nogil=True)
def count_own(
    hosts: Any, host: Any, first: int, total: int, far: NDArray[np.int64], near: NDArray[np.uint16]
) -> int:
    """How many nodes of ``host`` there are before each 65,536th node, into ``far``, and from there to each
    64th, into ``near``. ``hosts`` [n] says of whom the nodes ``first`` (a multiple of 65,536) and on are;
    ``total`` are before these. Returns how many there are with them."""
    for i in range(hosts.shape[0]):
        node = first + i
        if node & (_FAR - 1) == 0:
            far[node // _FAR] = total
        if node & (_NEAR - 1) == 0:
            near[node // _NEAR] = total - far[node // _FAR]
        total += hosts[i] == host
    return total


@njit(cache=True, nogil=True)
def by_owner(ids: NDArray[np.int64], hosts: Any, ends: NDArray[np.int64], order: NDArray[np.int32]) -> int:
    """Positions of ids, those of each host together, in the order in which they are asked.

    ``ends`` int64 [number of hosts], on return where each host's positions end in ``order`` [n]. Returns -1,
    or the position of an id that is no node.
    """
    ends[:] = 0
    item, start = hosts.itemsize, np.int64(hosts.ctypes.data)
    for i in range(ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            prefetch(start + ids[i + _AHEAD] * item)
        if ids[i] < 0 or ids[i] >= hosts.shape[0]:
            return i
        ends[hosts[ids[i]]] += 1
    begin = 0
    for host in range(ends.shape[0]):  # where each begins, and at last ends
        count = ends[host]
        ends[host] = begin
        begin += count
    for i in range(ids.shape[0]):
        host = hosts[ids[i]]
        order[ends[host]] = i
        ends[host] += 1
    return -1


@njit(cache=True, nogil=True)
def own_or_not(
    ids: NDArray[np.int64], hosts: Any, host: int, ends: NDArray[np.int64], order: NDArray[np.int32]
) -> int:
    """As :func:`by_owner` for two kinds of ids, those of ``host`` and all others."""
    low, high, item, start = 0, ids.shape[0], hosts.itemsize, np.int64(hosts.ctypes.data)
    for i in range(ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            prefetch(start + ids[i + _AHEAD] * item)
        if ids[i] < 0 or ids[i] >= hosts.shape[0]:
            return i
        if hosts[ids[i]] == host:
            order[low] = i
            low += 1
        else:
            high -= 1
            order[high] = i
    order[high:] = order[high:][::-1].copy()
    ends[0], ends[1] = low, ids.shape[0]
    return -1


@njit(cache=True, nogil=True)
def ranks_of(
    ids: NDArray[np.int64], hosts: Any, host: Any, far: NDArray[np.int64], near: NDArray[np.uint16],
    out: NDArray[np.int64],
) -> int:  # fmt: skip
    """Which of the nodes of ``host`` (of the dtype of ``hosts``) each id is, in ascending order of ids.
    Returns -1, or the position of one that is none of them."""
    nodes, item, start = hosts.shape[0], hosts.itemsize, np.int64(hosts.ctypes.data)
    counts = np.int64(near.ctypes.data)
    for i in range(ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            prefetch(start + ids[i + _AHEAD] * item)
            prefetch(counts + ids[i + _AHEAD] // _NEAR * 2)
        node = ids[i]
        if node < 0 or node >= nodes or hosts[node] != host:
            return i
        rank, begin = far[node // _FAR] + np.int64(near[node // _NEAR]), node // _NEAR * _NEAR
        if begin + _NEAR <= nodes:
            before = (np.uint64(1) << np.uint64(node - begin)) - np.uint64(1)
            rank += popcount(equal_64(start + begin * item, host) & before)
        else:
            for other in range(begin, node):
                rank += hosts[other] == host
        out[i] = rank
    return -1


class Owners:
    """Of the nodes of one table: ``hosts`` uint8 or uint16 [nodes], the host of each. ``host``: this one."""

    def __init__(self, table: str, hosts: NDArray[Any], host: int, count: int) -> None:
        self.table, self.hosts, self.host, self.count = table, hosts, host, count
        self._own = hosts.dtype.type(host)
        self._far = np.zeros(-(-len(hosts) // _FAR), np.int64)
        self._near = np.zeros(-(-len(hosts) // _NEAR), np.uint16)
        self.rows = 0
        for low in range(0, len(hosts), _BLOCK):
            block = hosts[low : low + _BLOCK]
            if len(block) and int(block.max()) >= count:
                raise FormatError(
                    f"table {table!r} of the split's topology names host {int(block.max())}, of {count}"
                )
            self.rows = int(count_own(block, self._own, low, self.rows, self._far, self._near))
        self.split(np.empty(0, np.int64))  # so that kernels are there
        self.own_and_others(np.empty(0, np.int64))
        self.local(np.empty(0, np.int64))

    @staticmethod
    def bytes_for(nodes: int, hosts: int) -> int:
        """Memory for so many nodes."""
        return nodes * (1 if hosts <= 256 else 2) + -(-nodes // _NEAR) * 2 + -(-nodes // _FAR) * 8

    def split(self, ids: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """Positions of ids by host, int32. Raises IdError."""
        order, ends = np.empty(len(ids), np.int32), np.zeros(self.count, np.int64)
        self._check(ids, by_owner(ids, self.hosts, ends, order))
        return np.split(order, ends[:-1])

    def _check(self, ids: NDArray[np.int64], wrong: int) -> None:
        if wrong >= 0:
            raise IdError(
                f"node id {ids[wrong]} (position {wrong} of the request) is out of range: table "
                f"{self.table!r} has {len(self.hosts):,} rows"
            )

    def own_and_others(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Positions of the ids that are this host's, and of the others, int32. Raises IdError."""
        order, ends = np.empty(len(ids), np.int32), np.zeros(2, np.int64)
        self._check(ids, own_or_not(ids, self.hosts, self.host, ends, order))
        return order[: ends[0]], order[ends[0] :]

    def local(self, ids: NDArray[np.int64], out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Node ids of this host as those of its own store. Raises IdError for another's."""
        out = np.empty(len(ids), np.int64) if out is None else out
        wrong = int(ranks_of(ids, self.hosts, self._own, self._far, self._near, out))
        if wrong >= 0:
            raise IdError(f"host {self.host} has no row of node {ids[wrong]} in table {self.table!r}")
        return out

    def nodes(self) -> NDArray[Any]:
        """[rows], the nodes of this host, ascending: those of its own store, as ids of the whole."""
        dtype = node_dtype(len(self.hosts))
        found = [np.empty(0, dtype)]
        for low in range(0, len(self.hosts), _BLOCK):
            own = np.flatnonzero(self.hosts[low : low + _BLOCK] == self.host)
            found.append((own + low).astype(dtype))
        return np.concatenate(found)

    def mine(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n], which of these nodes are this host's."""
        return np.asarray(self.hosts[ids] == self.host)

    def counts(self, blocks: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
        """int64 [hosts], how many of the nodes in blocks of ids are of each host."""
        total = np.zeros(self.count, np.int64)
        for block in blocks:
            total += np.bincount(self.hosts[block], minlength=self.count)
        return total


def read_hosts(topology: Path, table: str, memory_bytes: int) -> NDArray[Any]:
    """uint8 or uint16 [nodes], the host of each node of a table, read from a split's topology."""
    with (
        OpenStore(topology) as plain,
        Reader(plain, tables=[table], memory=memory_bytes, static=None) as reader,
    ):
        owner = plain.table(table)
        hosts = np.empty(owner.rows, np.dtype(plain.manifest.tables[table].dtype))
        for low in range(0, owner.rows, _BLOCK):
            ids = np.arange(low, min(low + _BLOCK, owner.rows))
            reader.read({table: ids}, out={table: hosts[low : low + len(ids)]})
    return hosts
