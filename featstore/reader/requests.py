"""What a reader is asked for: ids, runs, where rows go, and what makes the result of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import known_name
from featstore.base.buffers import empty_rows
from featstore.base.ids import (
    Ids,
    check_out,
    finished,
    parse_ids,
    parse_places,
    parse_row_places,
    parse_runs,
    rows_of,
    unshared,
)
from featstore.errors import ArgumentError, IdError
from featstore.reader.lookup import NONE, Part, RunPart, TableState

States = Mapping[str, TableState]


def as_tables(names: Collection[str], value: Any, who: str = "this reader") -> dict[str, Any]:
    """What is given for tables, by name; of a reader of one table without a mapping, too. ``who``: whose
    tables, for the message."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in names:
                known_name(name, names, f"{who} has no table")
        return dict(value)
    if len(names) != 1:
        raise IdError(
            f"{who} has {len(names)} tables; say which: {{'{next(iter(names), 'table')}': ids}}; there are "
            f"{', '.join(map(repr, names))}"
        )
    return {next(iter(names)): value}


@dataclass(frozen=True)
class ByTable:
    """What was asked of several tables, by name: ids, and where given, where their rows go."""

    ids: dict[str, Ids]
    out: dict[str, Any]
    at: dict[str, Any]

    @classmethod
    def parse(
        cls, names: Collection[str], ids: Any, out: Any, at: Any, *, copy: bool, who: str = "this reader"
    ) -> ByTable:
        """Raises ArgumentError where one is given without the other, IdError, UnknownNameError."""
        asked = {n: parse_ids(value, copy=copy) for n, value in as_tables(names, ids, who).items()}
        outs = {} if out is None else as_tables(names, out, who)
        places = {} if at is None else as_tables(names, at, who)
        for name in (*outs, *places):
            if name not in asked:
                raise ArgumentError(f"out or at is given for table {name!r}, ids are not")
        if (out is not None and len(outs) < len(asked)) or (at is not None and len(places) < len(asked)):
            raise ArgumentError("out and at, where given, are given for every table that ids are given for")
        if at is not None and out is None:
            raise ArgumentError("at says where in out rows go; give out too")
        return cls(asked, outs, places)


def parse_request(
    states: States, ids: Any, out: Any, *, copy: bool, at: Any = None
) -> tuple[Callable[[], Any], list[Part]]:
    """A request's parts, and what makes its result of them when they are filled."""
    asked = as_tables(states, ids)
    outs = {} if out is None else as_tables(states, out)
    places = {} if at is None else as_tables(states, at)
    for name in (*outs, *places):
        if name not in asked:
            raise ArgumentError(f"out or at is given for table {name!r}, ids are not")
    given_as: dict[str, tuple[Ids, tuple[int, ...], NDArray[np.uint8], Any]] = {}
    parts: list[Part] = []
    for name, value in asked.items():
        table, parsed = states[name].table, parse_ids(value, copy=copy)
        shape = (*parsed.shape, *table.row_shape)
        given, to = outs.get(name), NONE
        if name in places:
            if given is None:
                raise ArgumentError("at says where in out rows go; give out too")
            shape = (rows_of(given), *table.row_shape)
            to = parse_row_places(places[name], len(parsed.values), shape[0])
        rows = (
            empty_rows(len(parsed.values), table.row_bytes)
            if given is None
            else check_out(given, shape, table.dtype)
        )
        given_as[name] = (parsed, shape, rows, given)
        parts.append(Part(states[name], parsed.values, states[name].row_map, rows, to))
    if outs:  # none puts rows over another's ids
        filled = [part.out for part in parts]
        for part, (parsed, *_) in zip(parts, given_as.values(), strict=True):
            part.ids = unshared(parsed, filled).values

    def finish() -> Any:
        done = {
            name: finished(rows, shape, states[name].table.dtype, parsed.tensor) if given is None else given
            for name, (parsed, shape, rows, given) in given_as.items()
        }
        return done if isinstance(ids, Mapping) else next(iter(done.values()))

    return finish, parts


def parse_run_request(
    states: States, runs: Any, out: Any, at: Any
) -> tuple[Callable[[], Any], list[RunPart]]:
    """The parts of a request for runs, and what makes its result."""
    outs = {} if out is None else as_tables(states, out)
    places = {} if at is None else as_tables(states, at)
    filled: dict[str, Any] = {}
    parts = []
    asked = as_tables(states, runs)
    for name in (*outs, *places):
        if name not in asked:
            raise ArgumentError(f"out or at is given for table {name!r}, runs are not")
    for name, value in asked.items():
        table = states[name].table
        wanted, given = parse_runs(value, table.rows, name), outs.get(name)
        count, places_of = int((wanted[:, 1] - wanted[:, 0]).sum()), None
        if name in places:
            if given is None:
                raise ArgumentError("at says where in out runs go; give out too")
            count = rows_of(given)
            places_of = parse_places(places[name], wanted, count)
        shape = (count, *table.row_shape)
        rows = empty_rows(count, table.row_bytes) if given is None else check_out(given, shape, table.dtype)
        filled[name] = finished(rows, shape, table.dtype, False) if given is None else given
        parts.append(RunPart(states[name], wanted, places_of, rows))
    return lambda: filled if isinstance(runs, Mapping) else next(iter(filled.values())), parts
