"""Rows of the edges of mini-batches drawn from mega-batches: read for each mini-batch, by the edges' numbers.

They stand in the order in which the user gave them, which is none of partitions, so they are not loaded with
these. The reader's memory is of the loader's budget, and the rest is for the mega-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from featstore.base.environment import MEMORY
from featstore.errors import BudgetError
from featstore.loaders.batch import check_numbered
from featstore.loaders.mega.drawing import LocalSample
from featstore.loaders.mega.largest import LargestDrawn
from featstore.loaders.mega.sets import PartitionSets
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import as_memory
from featstore.reader.reader import Reader
from featstore.storage.edge_types import joined_name

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table

_READING_BYTES = 8 * 2**20  # for staging and planning


class EdgeRows:
    """The rows of ``tables`` of edges, one or several, by their numbers; ``options`` are those of
    :class:`featstore.loaders.mega.sets.PartitionSets`. Of a store with types a table is called as its graph
    is; else there is one of each."""

    def __init__(
        self, store: OpenStore, tables: str | Sequence[str], *, memory: int | str = MEMORY,
        engine: str = "auto", queue_depth: int = 128, verify: bool = True, threads: int | None = None,
        **_: Any,
    ) -> None:  # fmt: skip
        self._store, tables = store, [tables] if isinstance(tables, str) else list(tables)
        self.tables: dict[str, Table] = {name: store.table(name) for name in tables}
        types = {joined_name(edge_type): edge_type for edge_type in store.edge_types}
        self._types = {name: types.get(name) for name in self.tables}
        self._budget_bytes = as_memory(memory)
        needs = [table_need(table, verify) for table in self.tables.values()]
        beside = _READING_BYTES + 8 * max(need.row_bytes for need in needs)
        self.memory_bytes = own_bytes(self._budget_bytes, needs, beside)
        self.reader = Reader(
            store, tables=tables, memory=self.memory_bytes, static=None, static_memory=0, engine=engine,
            queue_depth=queue_depth, verify=verify, threads=threads,
        )  # fmt: skip

    def beside(self, drawn: LargestDrawn, options: dict[str, Any]) -> PartitionSets:
        """The mega-batches, in what of the memory is left. Raises what PartitionSets raises."""
        known = set(drawn.edges) & set(self.tables) or set(drawn.edges)
        (first, *_) = self.tables.values()
        more = {name: self.tables.get(name, first).row_bytes for name in known}
        left = max(1, self._budget_bytes - self.memory_bytes)
        try:
            drawn = drawn.with_edge_bytes(more)
            return PartitionSets(self._store, drawn=drawn, **options | {"memory": left})
        except BudgetError as error:
            self.reader.close()
            needed = error.needed_bytes + self.memory_bytes
            raise BudgetError(needed, self._budget_bytes, error.what) from None
        except BaseException:
            self.reader.close()
            raise

    def of(self, sample: LocalSample) -> dict[str, NDArray[Any]]:
        """The rows of a mini-batch's edges, by table. Raises what reading raises."""
        numbers = {name: sample.e_id_of(of) for name, of in self._types.items()}
        for name, of_edges in numbers.items():
            check_numbered(of_edges, f"edge_table={name!r}", self._types[name])
        rows: Any = self.reader.read(numbers)
        return dict(rows)
