"""Which rows the buffers of a table hold, written down and read again (:mod:`featstore.tiers.saved`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.tiers import saved
from featstore.tiers.slots.choose import CANDIDATES

if TYPE_CHECKING:
    from featstore.tiers.buffer import FeatureBuffer
    from featstore.tiers.device import DeviceBuffer
    from featstore.tiers.slots.choose import PolicyChoice


def cached_pieces(
    buffer: FeatureBuffer, above: DeviceBuffer | None, kept: bool
) -> Iterator[NDArray[np.int64]]:
    """The ids of the rows in a buffer and on devices above it, in pieces: those kept for good, if they count,
    at the end, and those on devices last. They are wanted most."""
    for ids in chain(buffer.cached_pieces(), buffer.kept_pieces() if kept else ()):
        yield ids if above is None else ids[~above.holds(ids)]
    if above is not None:
        yield from above.cached_pieces()


def load_rows(
    cache: saved.SavedCache, table: str, buffer: FeatureBuffer, above: DeviceBuffer | None,
    staging: Callable[[], NDArray[np.uint8]],
) -> None:  # fmt: skip
    """Read the rows that were saved: the last ones, as many as fit, and of those that do not fit on devices
    the last ones into the host's buffer."""
    ids, left = partial(cache.ids, table), cache.counts.get(table, 0)
    others = ids()
    if above is not None:
        memory = staging()
        for wanted, _ in above.last_that_fit(ids):
            above.load(wanted, memory, uses=saved.USES)
            left -= len(wanted)
        others = (rest for _, rest in above.last_that_fit(ids))
    buffer.load_last(others, left, uses=saved.USES)


def go_on(
    cache: saved.SavedCache, table: str, buffer: FeatureBuffer, choice: PolicyChoice, spare_slots: int
) -> bool:
    """Begin with the policy that had been chosen when the cache was saved; whether all rows were loaded with
    that. ``spare_slots`` are left beside rows kept for good."""
    policy = cache.policies.get(table)
    if policy not in CANDIDATES:
        return False
    choice.policy = policy
    if policy != "static":
        buffer.switch(policy)
        return False
    first = max(0, cache.counts[table] - max(0, buffer.slots - spare_slots))

    def kept() -> Iterator[NDArray[np.int64]]:
        before = first
        for piece in cache.ids(table):
            yield piece[before:]
            before -= min(before, len(piece))

    buffer.switch(policy, kept())
    return True
