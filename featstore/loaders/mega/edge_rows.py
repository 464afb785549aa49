"""Rows of the edges of mini-batches drawn from mega-batches: read for each mini-batch, by the edges' numbers.

They stand in the order in which the user gave them, which is none of partitions, so they are not loaded with
these. The reader's memory is of the loader's budget, and the rest is for the mega-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import BudgetError
from featstore.loaders.mega.sets import PartitionSets
from featstore.loaders.mega.sizes import LargestDrawn
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.reader import Reader
from featstore.units import parse_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

_READING_BYTES = 8 * 2**20  # for staging and planning


class EdgeRows:
    """The rows of ``table``, by their numbers; ``options`` are those of
    :class:`featstore.loaders.mega.sets.PartitionSets`."""

    def __init__(
        self, store: OpenStore, table: str, *, memory: int | str = "1GiB", engine: str = "auto",
        queue_depth: int = 128, verify: bool = True, threads: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self._store, self.table = store, store.table(table)
        self._budget_bytes = parse_bytes(memory, "memory")
        need = table_need(self.table, verify)
        self.memory_bytes = own_bytes(self._budget_bytes, [need], _READING_BYTES + 8 * need.row_bytes)
        self.reader = Reader(
            store, tables=[table], memory=self.memory_bytes, static=None, static_memory=0, engine=engine,
            queue_depth=queue_depth, verify=verify, threads=threads,
        )  # fmt: skip

    def beside(self, drawn: LargestDrawn, options: dict[str, Any]) -> PartitionSets:
        """The mega-batches, in what of the memory is left. Raises what PartitionSets raises."""
        drawn = replace(drawn, edge_bytes=drawn.edge_bytes + self.table.row_bytes)
        left = max(1, self._budget_bytes - self.memory_bytes)
        try:
            return PartitionSets(self._store, drawn=drawn, **options | {"memory": left})
        except BudgetError as error:
            self.reader.close()
            needed = error.needed_bytes + self.memory_bytes
            raise BudgetError(needed, self._budget_bytes, error.what) from None
        except BaseException:
            self.reader.close()
            raise

    def of(self, numbers: NDArray[np.int64] | None) -> dict[str, NDArray[Any]]:
        """The rows of these edges, by the table's name."""
        rows: Any = self.reader.read({self.table.name: numbers})
        return dict(rows)
