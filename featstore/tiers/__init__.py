"""Tiers: rows that are already in memory, each tier over another source of rows.

Everything that gives rows is a :class:`RowSource`: the reader, which reads the disk, and whatever stands
over it. A :class:`Tier` is a source over another one, which it asks for what it does not hold. So tiers can
be stacked in any order: rows on a device (:mod:`featstore.tiers.device_tier`) over a buffer that a cache
policy rules (:mod:`featstore.tiers.buffer_tier`) over a fixed set of rows
(:mod:`featstore.tiers.static_tier`) over the disk; a double in a test.

How a tier is wanted is said by a :class:`TierSpec`, which puts it over what lies below, or by a
:class:`SourceSpec`, where nothing does (a shared buffer, whose owner reads the disk):
:meth:`featstore.Store.reader` takes a list of them, the fastest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.engine.request import Request
from featstore.errors import ArgumentError, BudgetError
from featstore.storage.store import OpenStore, Table


def as_tiers(tiers: Any) -> list[Any]:
    """A list of what says how tiers are wanted. Raises ArgumentError for anything else."""
    what = "tiers must be a list of tiers (Static, Buffer, Device of featstore.tiers)"
    if not isinstance(tiers, list | tuple):
        raise ArgumentError(f"{what}, not {shown(tiers)}")
    for spec in tiers:
        if not all(callable(getattr(spec, name, None)) for name in ("over", "host_bytes", "least_bytes")):
            raise ArgumentError(f"{what}, not of {shown(spec)}")
    return list(tiers)


class PolicyNow(NamedTuple):
    """The policy that decides now which rows of a table stay, and why it is that."""

    name: str
    because: str


class RowSource(Protocol):
    """What gives rows of some tables of a store. One may have ``submit_waiting`` as well, like ``submit`` but
    for who waits for the rows at once, in whose thread they may then be put where they go."""

    @property
    def store(self) -> OpenStore:
        """The store whose rows these are."""

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        """Begin to put the row of ``ids[table][i]`` (int64 [n], node ids; duplicates are fine) at row
        ``at[table][i]`` of ``out[table]``, [rows, *row shape], or at row i where there is no ``at``.

        The result is ``out``; where that is None, new arrays (on a device: tensors there), by table. The ids
        are not changed by anybody until the request is done, and ``out`` belongs to it until then.
        """

    def close(self) -> None:
        """Wait for what is under way and give everything back, but not what lies below. May be called more
        than once."""


class Tier(RowSource, Protocol):
    """Rows in memory, over another source. One that a cache policy rules may have ``policies()`` as well, a
    :class:`PolicyNow` by table: statistics and plans tell it."""

    @property
    def name(self) -> str:
        """What plans, statistics and budgets call it."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that it holds."""

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n], which of these rows it would give now without asking below."""

    def hits(self) -> int:
        """Rows that it has given without asking below."""


class TierSpec(Protocol):
    """How a tier is wanted."""

    def host_bytes(self, tables: Sequence[Table]) -> int | None:
        """Bytes of host memory that it is to have for these; None for a share of what is left over."""

    def least_bytes(self, tables: Sequence[Table]) -> int:
        """Bytes of host memory below which it does not work."""

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        """The tier, in so much host memory. Raises BudgetError where that is too little."""


class SourceSpec(TierSpec, Protocol):
    """How a tier is wanted that has every row, and so is the last: nothing stands below it, not even the
    disk."""

    def tables_of(self, store: OpenStore) -> list[str]:
        """Names of the tables that it has. Raises ArgumentError where it is of another store."""

    def as_source(self, store: OpenStore, tables: Sequence[str], memory_bytes: int) -> Tier:
        """The tier, for these tables of a store, in so much host memory. Raises BudgetError where that is too
        little."""


def is_source_spec(spec: TierSpec) -> TypeGuard[SourceSpec]:
    """Whether a tier is wanted that has every row."""
    return callable(getattr(spec, "as_source", None)) and callable(getattr(spec, "tables_of", None))


def source_tables(source: RowSource) -> list[Table]:
    """The tables of a source."""
    return [source.store.table(name) for name in source.tables]


def table_shares(tables: Sequence[Table], memory_bytes: int) -> dict[str, int]:
    """Memory by table: a row of each, and the rest in proportion to the tables' sizes. Raises BudgetError
    where there is too little for the rows."""
    needed, total = sum(t.row_bytes for t in tables), sum(max(1, t.data_bytes) for t in tables)
    if memory_bytes < needed:
        raise BudgetError(needed, memory_bytes, "keep one row of each table")
    rest = memory_bytes - needed
    return {t.name: t.row_bytes + rest * max(1, t.data_bytes) // total for t in tables}
