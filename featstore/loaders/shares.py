"""The memory of a loader whose store samples: a share for the sampler, the rest for the rows.

A neighbour in memory saves more than a row does, so the sampler takes up to a third. Where that leaves too
little for two mini-batches (of which :func:`wanted_bytes` has an idea, from the first), the rows come first,
and the sampler has what is left. It has what it needs to sample at all, which of a graph of many nodes may be
most of the memory, where that leaves what any reader takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from featstore.compile.build import deciding_bytes
from featstore.errors import OF_STORE, BudgetError
from featstore.loaders.online.budget import SAMPLES_EXIST
from featstore.plan.budget import reader_bytes
from featstore.storage.store import Table

#: A sampler has one part in so many of the memory, where it needs no more.
SAMPLER_SHARE = 3
ROWS_BYTES_MIN = 6 << 20  # are left by a sampler that has more
_AHEAD_SHARE = 8  # of what rows do not need mini-batches that are sampled ahead have one part in so many
AHEAD_FROM = 64 << 20  # rows have so much before
EDGE_BYTES_MOST = 32  # of an edge of a mini-batch: its ends, its place and its number
_BATCHES, _SPARE_BYTES = 2.5, 2**20  # two mini-batches that are a quarter larger than the first; their ids


def wanted_bytes(
    memory_bytes: int, rows: Mapping[str, int], tables: Mapping[str, Table], sample_bytes: int = 0
) -> int:
    """With what every mode goes through mini-batches of about so many rows of each table, and so much that is
    sampled beside these: two of them, the reader, and what preparing them takes."""
    batch = sum(count * (tables[name].row_bytes + 64) for name, count in rows.items())
    batch += SAMPLES_EXIST * sample_bytes
    fixed = deciding_bytes(tables) + reader_bytes(memory_bytes) + _SPARE_BYTES
    return int(_BATCHES * batch) + fixed


def rows_at_most(batch_size: int, fanouts: Sequence[int], nodes: int) -> int:
    """Nodes of a mini-batch, however few its nodes' lists have in common."""
    rows = wave = min(batch_size, nodes)
    for fanout in fanouts:
        wave = nodes if fanout < 0 else min(nodes, wave * fanout)
        rows = min(nodes, rows + wave)
    return rows


def edges_at_most(batch_size: int, fanouts: Sequence[int], nodes: int, edges: int) -> int:
    """Edges of a mini-batch over a graph of so many: a node's list is looked at in one hop alone."""
    found, wave = 0, min(batch_size, nodes)
    for fanout in fanouts:
        hop = edges if fanout < 0 else wave * fanout
        found, wave = min(edges, found + hop), min(nodes, hop)
    return found


@dataclass(frozen=True)
class MemoryShares:
    """``memory_bytes`` of sampler and rows; a sampler takes ``graph_bytes`` if that is less than its share, 0
    where there is none, and needs ``least_bytes``. ``rows_wanted_bytes``: what the rows need, about, 0
    while nobody knows. ``beside_bytes``: what else the loader's memory holds, arrays for instance.
    ``ahead_from_bytes``: mini-batches that are sampled ahead are kept, too, where the rows have more than
    that; 0 where none are."""

    memory_bytes: int
    graph_bytes: int = 0
    beside_bytes: int = 0
    least_bytes: int = 0
    rows_wanted_bytes: int = 0
    ahead_from_bytes: int = 0

    @property
    def sampler_bytes(self) -> int:
        """What a sampler may take."""
        third, left = self.memory_bytes // SAMPLER_SHARE, self.memory_bytes - self.rows_wanted_bytes
        most = max(third, self.memory_bytes - ROWS_BYTES_MIN)
        return max(1, min(most, max(self.least_bytes, min(third, left))))

    @property
    def rows_bytes(self) -> int:
        """What is left for the rows."""
        return max(1, self._left - self.ahead_bytes)

    @property
    def ahead_bytes(self) -> int:
        """What mini-batches take that are kept from when they are sampled ahead."""
        rows = self.ahead_from_bytes
        return max(0, self._left - rows) // _AHEAD_SHARE if rows else 0

    @property
    def _left(self) -> int:
        """What the sampler leaves."""
        return self.memory_bytes - min(self.graph_bytes, self.sampler_bytes)

    @contextmanager
    def told_of_all(self) -> Iterator[None]:
        """A BudgetError of a share becomes one of all the memory; others, of a device's say, stay."""
        try:
            yield
        except BudgetError as error:
            needed = None if error.what.endswith(OF_STORE) else self._of_all(error)
            if needed is None:
                raise
            beside = self.beside_bytes
            raise BudgetError(needed + beside, self.memory_bytes + beside, error.what) from None

    def _of_all(self, error: BudgetError) -> int | None:
        """What is needed of ``memory_bytes``, given what one share needs; None where the error is of none."""
        if self.graph_bytes == 0:
            needed = self.memory_for_rows(error.needed_bytes)
            return needed if error.given_bytes == self.rows_bytes else None
        if error.given_bytes == self.sampler_bytes:  # first: of a memory of one byte, both are that
            return self.memory_for_sampler(error.needed_bytes)
        if error.given_bytes == self.rows_bytes:
            return self.memory_for_rows(error.needed_bytes)
        return None

    def memory_for_sampler(self, needed_bytes: int) -> int:
        """The smallest memory of which a sampler may take so much."""
        if needed_bytes <= self.least_bytes:
            return min(SAMPLER_SHARE * needed_bytes, needed_bytes + ROWS_BYTES_MIN)
        return max(SAMPLER_SHARE * needed_bytes, self.rows_wanted_bytes + needed_bytes)

    def memory_for_rows(self, needed_bytes: int) -> int:
        """The smallest memory that leaves so much for the rows."""
        if self.ahead_from_bytes:
            needed_bytes += -(-max(0, needed_bytes - self.ahead_from_bytes) // (_AHEAD_SHARE - 1))
        share, of_third = self.least_bytes, -(-needed_bytes // (SAMPLER_SHARE - 1))
        if needed_bytes > self.rows_wanted_bytes:
            share = max(share, of_third)
        if needed_bytes <= ROWS_BYTES_MIN:
            share = min(share, of_third)
        return needed_bytes + min(self.graph_bytes, share)
