"""Which columns of a table with names are features, and which says whose row it is.

The rule is one for text, Parquet and Arrow. Without ``columns``, every column is a feature, or the table is
refused: for a column that can be none (text, a list beside numbers), and for one that looks like ids, by its
name or by its values. Nothing is left out that was not named so. With ``id``, rows are placed by that column,
which must hold 0 to n-1, each once.

What looks like ids by its values: of columns of whole numbers, the one column whose values are all different,
in the first thousands of rows, while every other column repeats some value or has fractions. With fewer than
`SAMPLE_ROWS_MIN` rows nothing is concluded from differing values, as few of anything differ, but from values
that count up by one from 0 or 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.warning import warn
from featstore.errors import SourceError

__all__ = [
    "ALL_COLUMNS",
    "ChosenColumns",
    "Column",
    "KeyColumn",
    "choose_columns",
    "refuse_id_values",
    "refuse_twice",
    "whole_ids",
]

#: ``columns`` of this takes every column as a feature, whatever it looks like.
ALL_COLUMNS = "*"
SAMPLE_ROWS_MAX = 4096
SAMPLE_ROWS_MIN = 16
_NAMES_SHOWN = 12

_ID_WORDS = {"id", "ids", "nid", "idx", "uid", "uuid", "guid", "gid", "vid", "oid", "pk"}
_THING = (
    "node|vertex|vertice|row|edge|user|item|paper|author|entity|object|record|sample|doc|document|product|"
    "customer|account"
)
_ID_NAME = re.compile(
    rf"({_THING})s?(_?(id|ids|idx|index|key|no|nr|num|number))?|unnamed:? *\d+|index(_level_\d+)?|key", re.I
)


class KeyColumn(str):
    """As ``id``: the name of a column of keys. Rows stay in the order of the file, which numbers the nodes,
    and the column says what the user calls them."""


@dataclass(frozen=True)
class Column:
    """A column: its name, whether it holds ``number``, ``list`` (of numbers) or ``other``, and its type."""

    name: str
    kind: str
    type: str


@dataclass(frozen=True)
class ChosenColumns:
    """Positions of the columns taken as features, in order, of the column of ids (or None), and all names.
    ``keyed``: the column of ids holds keys, and rows are not placed by it."""

    taken: tuple[int, ...]
    id: int | None
    names: tuple[str, ...]
    keyed: bool = False

    @property
    def placing(self) -> bool:
        """Whether rows are placed by ids."""
        return self.id is not None and not self.keyed

    def described(self) -> dict[str, str]:
        """For people: what is taken, what is left out, and what places the rows."""
        rest = [k for k in range(len(self.names)) if k not in set(self.taken) and k != self.id]
        out = {"columns": listed(self.names[k] for k in self.taken)}
        if rest:
            out["left_out"] = listed(self.names[k] for k in rest)
        out["placed_by"] = "the order of the file"
        if self.id is not None:
            out["placed_by"] = (
                f"{'the order of the file, keys' if self.keyed else 'id'} {self.names[self.id]!r}"
            )
        return out


def listed(names: Iterable[str]) -> str:
    """Names for a message; of very many the first and the last."""
    found = list(names)
    if len(found) > _NAMES_SHOWN:
        return f"{', '.join(found[: _NAMES_SHOWN - 1])}, ... {found[-1]} ({len(found):,} columns)"
    return ", ".join(found)


def looks_like_id(name: str) -> bool:
    """Whether a column of this name holds ids, by the habits of those who name columns."""
    plain = name.strip().strip("_")
    if not plain or _ID_NAME.fullmatch(plain):  # the first column that pandas writes has no name
        return True
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", plain)
    return bool(words) and words[-1].lower() in _ID_WORDS


def choose_columns(
    columns: Sequence[Column], wanted: str | int | Sequence[str | int] | None, id: str | int | None, name: str
) -> ChosenColumns:
    """The columns to take; see the module's text. Raises SourceError that names columns and what to do."""
    names = tuple(column.name for column in columns)
    placed_by, keyed = None if id is None else _position(names, id, "id", name), isinstance(id, KeyColumn)
    if placed_by is not None and columns[placed_by].kind != "number" and not keyed:
        raise SourceError(
            f"{name}: id={names[placed_by]!r} is a column of {columns[placed_by].type}; ids must be whole "
            "numbers, 0 to n-1, each once. Where it holds the keys that you know the rows by, say so: "
            "node_keys='id' (--node-keys id)"
        )
    if wanted is None or wanted == ALL_COLUMNS:
        taken = [k for k in range(len(columns)) if k != placed_by]
    else:
        given = [wanted] if isinstance(wanted, str | int) else list(wanted)
        taken = [_position(names, one, "columns", name) for one in given]
        again = sorted({names[k] for k in taken if taken.count(k) > 1})
        if again:
            raise SourceError(f"{name}: columns= names {listed(again)} more than once; name each once")
    unusable = [k for k in taken if columns[k].kind == "other"]
    if unusable or not taken:
        raise SourceError(
            f"{name}: no column of numbers or of lists of numbers: "
            f"{listed(f'{columns[k].name} ({columns[k].type})' for k in unusable) or 'nothing is left'}; say "
            "which columns are features with columns=, and which holds the ids of the rows with id=. The "
            f"columns are: {_typed(columns)}"
        )
    if wanted is None:
        suspects = [columns[k].name for k in taken if looks_like_id(columns[k].name)]
        if suspects:
            raise id_error(name, suspects[0], "by its name")
    lists = [columns[k].name for k in taken if columns[k].kind == "list"]
    types = {columns[k].type for k in taken}
    if lists and len(taken) > 1:
        raise SourceError(
            f"{name}: a column of lists is a table of its own; give columns=, one of: {', '.join(lists)} "
            f"(and id= where another column holds the ids of the rows). The columns are: {_typed(columns)}"
        )
    if len(types) > 1:
        raise SourceError(
            f"{name}: the columns {listed(columns[k].name for k in taken)} cannot stand side by side in a "
            f"row, their types are {', '.join(sorted(types))}; name columns of one type with columns=, and "
            "the one that holds ids with id=, or convert them first"
        )
    return ChosenColumns(tuple(taken), placed_by, names, keyed)


def check_beside(shapes: Mapping[str, tuple[int, ...] | None], taken: str, name: str) -> None:
    """What is beside the array that is ``taken`` unasked: raises SourceError for one with the name of ids and
    one value for each of its rows; warns, as FeatstoreWarning, of others, which are not packed. A shape is
    None of what is no array that can be read."""
    rows = (shapes[taken] or ())[:1]
    for key, shape in shapes.items():
        if key != taken and shape in (None, rows) and looks_like_id(key.rpartition("/")[2]):
            raise SourceError(
                f"{name}: {key!r} looks like the ids of the rows of {taken!r}, which would stay in the "
                f"order of the file: place the rows by them first, rows[ids] = x; or say key={taken!r} "
                "where row i is node i"
            )
    others = sorted(key for key in shapes if key != taken)
    if others:
        warn(
            f"{name}: {taken!r} is packed, and not {', '.join(map(repr, others))} beside it: say "
            f"key={taken!r}, and give small arrays that are to be kept as arrays={{{others[0]!r}: ...}}",
        )


def refuse_twice(names: Sequence[str], taken: Iterable[str], where: str) -> None:
    """Raise SourceError where a column that is taken has a name that another one has, too."""
    twice = next((name for name in taken if names.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"{where}: two columns are called {twice!r}; rename one of them")


def refuse_id_values(values: NDArray[Any], names: Sequence[str], name: str) -> None:
    """Raise SourceError where one of the columns [rows, columns] looks like ids by its values."""
    if values.shape[1] < 2 or values.shape[0] < 2 or values.dtype.kind not in "iuf":
        return
    with np.errstate(invalid="ignore"):
        whole = [
            k
            for k in range(values.shape[1])
            if not np.any(values[:, k] % 1) and np.isfinite(values[:, k]).all()
        ]
    distinct = [
        k for k in whole if np.unique(values[:, k]).size == values.shape[0] and values[:, k].min() >= 0
    ]
    if len(distinct) != 1:
        return
    column = values[:, distinct[0]]
    counted = (
        column[0] in (0, 1) and bool(np.all(np.diff(column) == 1)) and (len(whole) == 1 or len(column) > 2)
    )
    if counted or len(column) >= SAMPLE_ROWS_MIN:
        raise id_error(
            name,
            names[distinct[0]],
            "it counts up" if counted else "of all columns it alone has whole numbers that differ",
        )


def whole_ids(values: NDArray[Any], first: int, name: str, column: str) -> NDArray[np.int64]:
    """Ids as int64. Raises SourceError that names the first row whose id is no whole number."""
    if values.dtype.kind in "iu":
        wrong = values > np.iinfo(np.int64).max if values.dtype == np.uint64 else np.zeros(0, bool)
    elif values.dtype.kind == "f":
        wrong = ~np.isfinite(values) | (np.abs(values) > 2**53)
        wrong |= np.where(wrong, 0, values) % 1 != 0
    else:
        wrong = np.ones(len(values), bool)
    bad = np.flatnonzero(wrong)
    if bad.size:
        at = int(bad[0])
        raise SourceError(
            f"{name}: the id in row {first + at:,}, column {column!r}, is {values[at]}; ids are whole "
            "numbers, 0 to n-1, each once"
        )
    return values.astype(np.int64)


def id_error(name: str, column: str, why: str) -> SourceError:
    """What is said of a column that looks like ids."""
    return SourceError(
        f"{name}: column {column!r} looks like the ids of the rows ({why}), not like a feature. Say "
        f"id={column!r} and rows are placed by it; or name the features with columns= (rows then stay in the "
        f"order of the file); columns={ALL_COLUMNS!r} takes every column as a feature"
    )


def _position(names: Sequence[str], wanted: str | int, what: str, name: str) -> int:
    if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(names):
        return wanted
    found = [k for k, one in enumerate(names) if one == wanted]
    if len(found) == 1:
        return found[0]
    trouble = f"{len(found)} columns are called" if found else "there is no column"
    raise SourceError(f"{name}: {what}: {trouble} {wanted!r}; the columns are: {listed(names)}")


def _typed(columns: Sequence[Column]) -> str:
    return listed(f"{column.name} ({column.type})" for column in columns)
