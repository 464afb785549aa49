"""Where a loader stands: small, plain data of one shape for every loader, to be kept in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featstore.arguments import INT64_MAX, as_count, check_state

STATE_VERSION = 1


def loader_state(store: str, epoch: int, after: int) -> dict[str, Any]:
    """The mini-batches of ``epoch`` that were handed out, ``after`` of them, of a loader over the store (or
    the compiled trace) of this uuid."""
    return {"version": STATE_VERSION, "store": store, "epoch": epoch, "next": after}


def position_of(state: Any, store: str, most: int = INT64_MAX) -> tuple[int, int]:
    """(epoch, mini-batches of it handed out, ``most`` of them) of a state. Raises ArgumentError for what is
    none, or is that of a loader over something else."""
    checked: Mapping[str, Any] = check_state(
        state, {"version": STATE_VERSION, "store": store}, "this loader has"
    )
    epoch = as_count(checked.get("epoch"), "epoch of the state", 0)
    return epoch, as_count(checked.get("next"), "next of the state, a mini-batch,", 0, most)
