"""What the owner of a shared buffer tells its clients of it: which store, which tables, where their rows
are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from featstore.base.dtypes import dtype_from_name, dtype_name
from featstore.storage.relations import feature_tables

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore, Table

_PIECE_IDS_MAX = 1 << 16  # ids that a client asks for at once, at most: what it is answered takes memory


@dataclass(frozen=True)
class SharedTable:
    """A table whose rows a shared buffer gives: ``rows`` rows of shape ``row_shape`` and type ``dtype``,
    ``row_bytes`` each.

    ``number``: of the table, in messages. ``batch_rows``: ids of a request, at most. ``offset``: of its slots
    in the shared memory, in bytes. ``of_nodes``: its rows are features of nodes.
    """

    name: str
    rows: int
    row_shape: tuple[int, ...]
    row_bytes: int
    dtype: np.dtype[Any]
    number: int
    batch_rows: int
    offset: int
    of_nodes: bool  # not of edges, nor copies of other hosts' rows, nor of nodes without features

    @property
    def piece_rows(self) -> int:
        """Ids that a client asks for at once, at most."""
        return min(self.batch_rows, _PIECE_IDS_MAX)


@dataclass(frozen=True)
class About:
    """What the owner says of its buffer: ``uuid`` and ``path`` are the store's."""

    uuid: str
    path: str
    tables: Mapping[str, SharedTable]

    @classmethod
    def of(
        cls, store: OpenStore, tables: list[Table], batch_rows: Mapping[str, int], offsets: Mapping[str, int]
    ) -> About:
        """Of these tables of a store."""
        told = {
            table.name: SharedTable(
                table.name, table.rows, table.row_shape, table.row_bytes, table.dtype, number,
                batch_rows[table.name], offsets[table.name], table.name in feature_tables(store),
            )
            for number, table in enumerate(tables)
        }  # fmt: skip
        return cls(store.uuid, str(store.path), told)

    def encode(self) -> bytes:
        """As JSON."""
        tables = [
            {**vars(one), "dtype": dtype_name(one.dtype), "row_shape": list(one.row_shape)}
            for one in self.tables.values()
        ]
        return json.dumps({"uuid": self.uuid, "path": self.path, "tables": tables}).encode()

    @classmethod
    def parse(cls, text: bytes) -> About:
        said = json.loads(text)
        tables = [
            SharedTable(
                str(one["name"]), int(one["rows"]), tuple(map(int, one["row_shape"])), int(one["row_bytes"]),
                dtype_from_name(one["dtype"]), int(one["number"]), int(one["batch_rows"]), int(one["offset"]),
                bool(one["of_nodes"]),
            )
            for one in said["tables"]
        ]  # fmt: skip
        return cls(str(said["uuid"]), str(said["path"]), {table.name: table for table in tables})
