"""Probes: mini-batches all of whose rows are known, with every mini-batch around that misses them.

In any group around a probe it is known how often each of the probe's rows is missed. That is enough to plan
what the probe reads from the base table, whichever classes of rows (missed by c mini-batches of the group)
are left there. Of the group's shared region it gives one block: a region begins, for each mini-batch, with
the rows that it misses first (:mod:`featstore.compile.groups`), so the probe's block can be laid out exactly
and all reads of it by all mini-batches of the group be planned.

Reads are planned by the rule of the reader (:func:`featstore.plan.extents.cut_extents`); what a read costs is
shared equally by the rows that it brings, and added up by class. Reads that would go on from one block into
the next are joined as if the next were like this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.compile.groups import key_mask, key_of, sort_block
from featstore.plan.extents import cut_extents
from featstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from featstore.layout import TableLayout
    from featstore.plan.cost import DeviceModel

Masks = list[NDArray[np.bool_]]

#: Of a block of more rows than this, every other piece (or fewer) is planned, as if one followed on the
#: other.
BLOCK_ROWS = 4096
PIECE_ROWS = 1024
#: Of so many rows of probes all are planned as base rows, of more every other probe's.
BASE_ROWS = 80_000

_CLASS_BITS = 16
_ONE_FILE = 1 << 40  # pages: blocks lie in no file yet


@njit(cache=True, nogil=True)
def look_up_probe(
    starts: NDArray[np.int64],
    members: NDArray[np.int32],
    probe: int,
    first: int,
    last: int,
    counts: NDArray[np.uint16],
    keys: NDArray[np.uint64],
    begins: NDArray[np.int64],
    block: NDArray[np.uint16],
) -> None:
    """For each row of a probe, in the group of mini-batches ``[first, last)``: how many miss it; and if the
    probe is the first of several of them, its key (otherwise 0) and where in ``block`` these begin, counted
    from ``first``."""
    bits = 1
    while (1 << bits) <= last - first:
        bits += 1
    at = 0
    for row in range(starts.shape[0] - 1):
        i, end = np.uint64(starts[row]), np.uint64(starts[row + 1])
        while members[i] < first:
            i += np.uint64(1)
        begins[row] = at
        head = members[i]
        word, used, count = np.uint64(0), 64, 0
        while i < end and members[i] < last and count < last - first:
            if used - bits >= 10:
                used -= bits
                word |= np.uint64(members[i] - first + 1) << np.uint64(used)
            block[at + count] = members[i] - first
            count += 1
            i += np.uint64(1)
        counts[row] = count
        keys[row] = 0
        if head == probe and count > 1:
            keys[row] = key_of(word | np.uint64(count), bits)
            at += count


@njit(cache=True, nogil=True)
def plan_reads(
    keys: NDArray[np.uint64],
    row_bytes: int,
    pages_per_file: int,
    gap_pages_max: int,
    extent_pages_max: int,
    region_pages: int,
    reads: NDArray[np.float64],
    pages: NDArray[np.float64],
    rows: NDArray[np.float64],
) -> None:
    """Plan the reads of sorted keys ``row << 16 | c`` and share them out: reads[c], pages[c] and rows[c]
    grow.

    ``region_pages``: the pages of a region that goes on as it began, so that its last read may go on into its
    first; 0 for none.
    """
    n = keys.shape[0]
    page, length = np.empty(n, np.int64), np.empty(n, np.int32)
    first, totals = np.empty(n + 1, np.int32), np.empty(3, np.int64)
    extents = cut_extents(
        keys,
        _CLASS_BITS,
        row_bytes,
        pages_per_file,
        gap_pages_max,
        extent_pages_max,
        page,
        length,
        first,
        totals,
    )
    for e in range(extents):
        share = 1.0 / (first[e + 1] - first[e])
        for k in range(first[e], first[e + 1]):
            c = keys[k] & np.uint64((1 << _CLASS_BITS) - 1)
            reads[c] += share
            pages[c] += share * length[e]
            rows[c] += 1
    if region_pages > 0 and extents > 1:
        gap = page[0] + region_pages - page[extents - 1] - length[extents - 1]
        if gap <= gap_pages_max:
            c = keys[0] & np.uint64((1 << _CLASS_BITS) - 1)
            reads[c] -= 1
            pages[c] += max(gap, -1)


@njit(cache=True, nogil=True)
def plan_block(
    places: NDArray[np.int64],
    counts: NDArray[np.uint16],
    begins: NDArray[np.int64],
    block: NDArray[np.uint16],
    size: int,
    row_bytes: int,
    gap_pages_max: int,
    extent_pages_max: int,
    reads: NDArray[np.float64],
    pages: NDArray[np.float64],
    rows: NDArray[np.float64],
) -> None:
    """Plan what the ``size`` mini-batches of a group read of a block, whose rows in order are ``places`` in
    ``counts`` and ``begins`` (see :func:`look_up_probe`)."""
    n = places.shape[0]
    ends = np.zeros(size + 1, np.int64)
    for k in range(n):
        begin = begins[places[k]]
        for i in range(begin, begin + counts[places[k]]):
            ends[block[i] + 1] += 1
    for member in range(size):
        ends[member + 1] += ends[member]
    keys = np.empty(ends[size], np.uint64)
    for k in range(n):
        key = np.uint64(k) << np.uint64(_CLASS_BITS) | np.uint64(counts[places[k]])
        begin = begins[places[k]]
        for i in range(begin, begin + counts[places[k]]):
            keys[ends[block[i]]] = key
            ends[block[i]] += 1
    low, region_pages = 0, n * row_bytes // PAGE_BYTES
    for member in range(size):
        own = keys[low : ends[member]]
        low = ends[member]
        plan_reads(
            own, row_bytes, _ONE_FILE, gap_pages_max, extent_pages_max, region_pages, reads, pages, rows
        )


@njit(cache=True, nogil=True)
def gather_lists(
    places: NDArray[np.int64],
    starts: NDArray[np.int64],
    members: NDArray[np.int32],
    starts_out: NDArray[np.int64],
    members_out: NDArray[np.int32],
) -> None:
    """The lists at ``places``, one after the other."""
    at = 0
    for k in range(places.shape[0]):
        starts_out[k] = at
        for i in range(starts[places[k]], starts[places[k] + 1]):
            members_out[at] = members[i]
            at += 1
    starts_out[places.shape[0]] = at


@dataclass(frozen=True)
class Lists:
    """Rows, ascending, and the mini-batches that miss row i: ``members[starts[i]:starts[i + 1]]``,
    ascending."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    members: NDArray[np.int32]

    def at(self, places: NDArray[np.int64]) -> Lists:
        """Some of them."""
        total = int((self.starts[places + 1] - self.starts[places]).sum())
        starts, members = np.empty(len(places) + 1, np.int64), np.empty(total, np.int32)
        gather_lists(places, self.starts, self.members, starts, members)
        return Lists(self.rows[places], starts, members)


@dataclass(frozen=True)
class Probe:
    """A probe's rows, ascending, as its group ``[first, last)`` sees them; ``counts``, ``keys``, ``begins``
    and ``block``: see :func:`look_up_probe`. ``weight``: how often its block counts.
    """

    first: int
    last: int
    weight: float
    rows: NDArray[np.int64]
    counts: NDArray[np.uint16]
    keys: NDArray[np.uint64]
    begins: NDArray[np.int64]
    block: NDArray[np.uint16]
    _orders: dict[bool, NDArray[np.int64]] = field(default_factory=dict)

    def order(self, apart: bool) -> NDArray[np.int64]:
        """The places in ``rows`` of the block's rows (but those that the probe misses alone) in order;
        ``apart``: see :func:`~featstore.compile.groups.counts_apart`."""
        if apart not in self._orders:
            places = np.flatnonzero(self.keys)
            keys, n = self.keys[places] & key_mask(self.last - self.first, apart), len(places)
            sort_block(keys, places, 0, n, 64, np.empty(n, np.uint64), np.empty(n, np.int64))
            self._orders[apart] = places
        return self._orders[apart]


def look_at(lists: Lists, probe: int, first: int, last: int, weight: float) -> Probe:
    """A probe, all of whose rows are in ``lists``, in a group."""
    n = len(lists.rows)
    counts, keys, begins = np.empty(n, np.uint16), np.empty(n, np.uint64), np.empty(n, np.int64)
    block = np.empty(len(lists.members), np.uint16)
    look_up_probe(lists.starts, lists.members, probe, first, last, counts, keys, begins, block)
    return Probe(first, last, weight, lists.rows, counts, keys, begins, block)


@dataclass(frozen=True)
class ClassCosts:
    """What rows cost that are read one way, by how many mini-batches of the group miss them: float64 [G + 1]
    each, sums over a sample.

    ``rows``: how often a row was read; ``reads`` and ``pages``: their shares of the reads and of the pages
    read.
    """

    reads: NDArray[np.float64]
    pages: NDArray[np.float64]
    rows: NDArray[np.float64]

    @classmethod
    def zeros(cls, size: int) -> ClassCosts:
        return cls(np.zeros(size + 1), np.zeros(size + 1), np.zeros(size + 1))

    def add(self, other: ClassCosts, weight: float) -> None:
        """Add others, as if there were ``weight`` times as many."""
        for total, more in ((self.reads, other.reads), (self.pages, other.pages), (self.rows, other.rows)):
            total += weight * more


def shared_costs(
    looks: list[Probe], masks: Masks, apart: bool, row_bytes: int, model: DeviceModel, extent_bytes_max: int
) -> ClassCosts:  # fmt: skip
    """What it costs all mini-batches to read the shared rows (``masks``) in the probes' blocks. ``apart``: in
    which order, see :func:`~featstore.compile.groups.counts_apart`."""
    size = looks[0].last - looks[0].first
    costs = ClassCosts.zeros(size)
    for look, mask in zip(looks, masks, strict=True):
        places = look.order(apart)
        places = places[mask[places]]
        every = -(-len(places) // BLOCK_ROWS)
        if every > 1:
            places = places[np.arange(len(places)) // PIECE_ROWS % every == 0]
        own = ClassCosts.zeros(size)
        plan_block(
            places, look.counts, look.begins, look.block, size, row_bytes, model.gap_pages_max,
            extent_bytes_max // PAGE_BYTES, own.reads, own.pages, own.rows,
        )  # fmt: skip
        costs.add(own, look.weight * max(1, every))
    return costs


def base_costs(
    looks: list[Probe], masks: Masks, layout: TableLayout, model: DeviceModel, extent_bytes_max: int
) -> ClassCosts:  # fmt: skip
    """What it costs the probes to read those of their rows that stay in the base table (``masks``)."""
    costs = ClassCosts.zeros(looks[0].last - looks[0].first)
    every = 1 if sum(len(mask) for mask in masks) <= BASE_ROWS else 2
    for look, mask in list(zip(looks, masks, strict=True))[::every]:
        keys = look.rows[mask].astype(np.uint64) << np.uint64(_CLASS_BITS) | look.counts[mask]
        plan_reads(
            keys, layout.row_bytes, layout.pages_per_chunk, model.gap_pages_max,
            extent_bytes_max // PAGE_BYTES, 0, costs.reads, costs.pages, costs.rows,
        )  # fmt: skip
    return costs
