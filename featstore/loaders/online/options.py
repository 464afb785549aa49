"""What may be said to a loader of mini-batches as they come, asked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, known_name
from featstore.base.ids import parse_ids
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.reader.options import check_reading
from featstore.storage.store import OpenStore, Table
from featstore.tiers.chosen import FIRST_POLICY
from featstore.tiers.slots import layout


def check_extraction(
    store: OpenStore, *, policy: str, static: Any, devices: Sequence[Any], device_memory: int,
    device_policy: str, reader: dict[str, Any], halo: Any = None,
) -> None:  # fmt: skip
    """Raise ArgumentError, SourceError, IdError for options of
    :class:`featstore.loaders.online.loader.OnlineLoader` that are wrong, or that contradict each other."""
    known = ["auto", *(name for name in layout.POLICIES if name != "min")]
    if isinstance(policy, str) and policy == "min":
        raise SourceError(
            "the policy 'min' needs the mini-batches beforehand: record and compile them "
            "(featstore.compile_trace)"
        )
    as_choice(policy, "policy", known)
    if static is not None and policy != "static":
        raise SourceError(f"static= says which rows the policy 'static' keeps, but the policy is {policy!r}")
    check_reading(**reader)
    if halo is not None and not isinstance(store, WholeStore):
        raise ArgumentError("halo= keeps rows of other hosts: it is of a store that is split by hosts")
    as_choice(device_policy, "device_policy", [name for name in known if name not in ("auto", "static")])
    if device_policy != FIRST_POLICY and not device_memory:
        raise ArgumentError("device_policy= is of rows kept on a device: say in how much device_memory=")
    if device_memory and not devices:
        raise SourceError("device_memory= keeps rows on a device: say on which, with device=")
    for table in static if isinstance(static, Mapping) else ():
        known_name(table, store.tables, "static: the store has no table")
    for ids in static.values() if isinstance(static, Mapping) else [static]:
        if ids is not None:
            parse_ids(ids)


def static_rows(static: Any, tables: Mapping[str, Table]) -> dict[str, NDArray[np.int64]]:
    """The rows that ``static=`` says are to be kept: distinct node ids of each of ``tables``, those of the
    first mini-batch and of ``static``. Empty where nothing is said. Raises ArgumentError, IdError."""
    if static is None:
        return {}
    known = ", ".join(map(repr, tables))
    if not isinstance(static, Mapping):
        if len(tables) > 1:
            raise ArgumentError(f"static: of which table ({known})? give {{{next(iter(tables))!r}: ids}}")
        static = {next(iter(tables)): static}
    found = {name: np.unique(parse_ids(static.get(name, ())).values) for name in tables}
    for name, ids in found.items():
        for bad in (ids[0], ids[-1]) if len(ids) else ():
            if not 0 <= bad < tables[name].rows:
                raise IdError(
                    f"static: node id {bad} is out of range: table {name!r} has {tables[name].rows:,} rows"
                )
    return found


def static_ids(
    store: OpenStore, static: Any, kept: Mapping[str, NDArray[np.int64]] | None, table: str, most: int
) -> NDArray[Any]:
    """Node ids of a table's rows that stay: those given as ``static=``, which are ``kept``, or
    ``most`` of the highest degree. Raises SourceError."""
    if static is not None:
        return (kept or {}).get(table, np.empty(0, np.int64))
    ranked = store.tables[table].rows_by_degree(max(0, most))
    if ranked is None:
        raise SourceError(
            f"the policy 'static' keeps the rows of the highest degree, which table {table!r} does "
            "not know: pack with a graph, or say which rows with static= (where topology is split, too, no "
            "host knows the degrees of all nodes)"
        )
    node_of_row = store.tables[table].node_of_row()
    return ranked if node_of_row is None else node_of_row[ranked]
