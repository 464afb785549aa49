"""Where training stands: small, plain data of one shape for every loader and order, to be kept in a
checkpoint.

- ``version``: of this shape;
- ``of``: what it belongs to; all of it must be the same here, or other mini-batches would follow;
- ``epoch``, ``next``: so many mini-batches of this epoch were handed out (of an order: training nodes; of
  what loads partitions: mega-batches);
- ``at``: what else it takes to tell the place; empty where that is all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from featstore.arguments import INT64_MAX, as_count, as_mapping, shown
from featstore.errors import ArgumentError

STATE_VERSION = 1


def state_of(
    whose: Mapping[str, Any], epoch: int, after: int, at: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The state of what ``whose`` tells, after so many of an epoch."""
    return {
        "version": STATE_VERSION, "of": dict(whose), "epoch": epoch, "next": after, "at": dict(at or {})
    }  # fmt: skip


def position_of(
    state: Any, whose: Mapping[str, Any], at: Collection[str] = (), *, most: int = INT64_MAX
) -> tuple[int, int, Mapping[str, Any]]:
    """(``epoch``, ``next``, ``at``) of a state, whose ``at`` has these names and whose ``next`` is at most
    ``most``. Raises ArgumentError for what is no state, or is that of something else."""
    state = as_mapping(state, "state", "what state_dict() returned")
    _check_same(state.get("version"), STATE_VERSION, "version")
    of = as_mapping(state.get("of"), "'of' of the state", "names to values")
    for name in {**whose, **of}:
        _check_same(of.get(name), whose.get(name), name)
    place = as_mapping(state.get("at"), "'at' of the state", "names to values")
    if set(place) != set(at):
        raise ArgumentError(
            f"'at' of the state has the names {shown(list(place))}, not {list(at)}: it is of something else"
        )
    epoch = as_count(state.get("epoch"), "epoch of the state", 0)
    return epoch, as_count(state.get("next"), "next of the state", 0, most), place


def ends_before(after: int, count: int) -> ArgumentError:
    """For a state after more mini-batches than its epoch has here."""
    return ArgumentError(
        f"the state is of an epoch of {after:,} mini-batches or more, and this one has {count:,}: give those "
        "that it was taken with, or begin anew, set_epoch()"
    )


def _check_same(found: Any, here: Any, name: str) -> None:
    if type(found) is not type(here) or found != here:
        raise ArgumentError(
            f"the state has {name} = {shown(found)}, here it is {here!r}: it is of something else, and other "
            "mini-batches would follow; load what state_dict() of the same gave"
        )
