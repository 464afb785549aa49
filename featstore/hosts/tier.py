"""All hosts as the last tier of a reader: rows of the other hosts come by the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featstore.arguments import check_options, shown
from featstore.base.called import called
from featstore.errors import ArgumentError, BudgetError
from featstore.hosts.source import HostsRows
from featstore.hosts.split_store import WholeStore
from featstore.plan.budget import own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import READING, check_reading
from featstore.storage.store import OpenStore, Table
from featstore.tiers import RowSource, Tier
from featstore.units import parse_bytes


class Hosts:
    """Rows of a store that is split by hosts: this host's from its disk, others' from them.

    ``memory``: of the reader of this host's own rows, bytes or a size; a share of what is left over by
    default. ``options``: of that reader, see :class:`featstore.Reader`. Raises
    ArgumentError.
    """

    def __init__(self, memory: int | str | None = None, **options: Any) -> None:
        check_options(options, READING, "Hosts")
        check_reading(**options)
        self.memory = None if memory is None else parse_bytes(memory, "memory")
        self.options = options

    def tables_of(self, store: OpenStore) -> list[str]:
        """Names of the tables that hosts have. Raises ArgumentError for a store that is not split."""
        return list(_whole(store).tables)

    def host_bytes(self, tables: Sequence[Table]) -> int | None:
        return self.memory

    def least_bytes(self, tables: Sequence[Table]) -> int:
        verify = self.options.get("verify", True)
        return own_bytes(1, [table_need(one, verify) for table in tables for one in table.tables_on_disk])

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        raise ArgumentError(
            "Hosts stands over nothing: it has the rows of all hosts, and what lies below would never be "
            "asked; make it the last of tiers="
        )

    def as_source(self, store: OpenStore, tables: Sequence[str], memory_bytes: int) -> HostsRows:
        """The tier, for these tables of a store."""
        least = self.least_bytes([store.table(name) for name in tables])
        if memory_bytes < least:
            raise BudgetError(least, memory_bytes, "read this host's own rows")
        return _whole(store).source(tables, memory=memory_bytes, **self.options)

    def __repr__(self) -> str:
        return called("featstore.Hosts", memory=self.memory, **self.options)


def _whole(store: OpenStore) -> WholeStore:
    if not isinstance(store, WholeStore):
        raise ArgumentError(
            f"Hosts is of a store that is split by hosts (featstore.open_split), not of {shown(store)}"
        )
    return store
