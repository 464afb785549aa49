"""Which columns of a table of edges are their ends, and what of it is not stored."""

from __future__ import annotations

from collections.abc import Sequence

from featstore.base.warning import warn
from featstore.errors import SourceError

SOURCE_NAMES = ("src", "source", "from", "u", "source_id", "src_id")


TARGET_NAMES = ("dst", "target", "to", "v", "dest", "destination", "target_id", "dst_id")


#: Ends of names of files of which a column is read as ``PATH:COLUMN``.
BY_COLUMN = (".csv", ".csv.gz", ".parquet", ".arrow", ".feather", ".npz")


def left_out(name: str, what: Sequence[str]) -> None:
    """Warn of data of edges that are not stored."""
    if what:
        column = next((one for one in what if one.isidentifier()), None)
        spelt = f" ('{name}:{column}')" if column is not None and name.lower().endswith(BY_COLUMN) else ""
        warn(
            f"{name}: not stored: {', '.join(what)}. Give what is needed as edge_weights= or edge_times="
            f"{spelt}, or as a table of its own, in the order of your edges",
        )


def ends_named(key: str | Sequence[str], names: Sequence[str], name: str) -> tuple[int, int]:
    """Which of some columns a ``key`` says, as ``"source,target"``. Raises SourceError where that is not two,
    each of them there once."""
    wanted = [part.strip() for part in key.split(",")] if isinstance(key, str) else list(key)
    if len(wanted) != 2 or wanted[0] == wanted[1] or any(list(names).count(one) != 1 for one in wanted):
        raise SourceError(
            f"{name}: no two columns {','.join(wanted)!r}; graph_key='source,target' names two of "
            f"{', '.join(names)}, each there once"
        )
    return names.index(wanted[0]), names.index(wanted[1])


def ends_of(names: Sequence[str]) -> tuple[int, int] | None:
    """Which of some columns are the source and the target of an edge: by name, or the only two, in their
    order unless one is named. None where that would be a guess."""
    lower = ["_".join(name.lower().split()) for name in names]
    source, target = (
        next((i for i, n in enumerate(lower) if n in known), None) for known in (SOURCE_NAMES, TARGET_NAMES)
    )
    if source is not None and target is not None:
        return source, target
    if len(names) != 2:
        return None
    return (1, 0) if source == 1 or target == 0 else (0, 1)
