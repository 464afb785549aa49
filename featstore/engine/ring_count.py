"""How many rings of io_uring are to work, decided by how busy the last one's thread was.

One more works where that thread keeps a core busy, one fewer where it waits. Where cores come and go, as
beside training steps of some milliseconds, the number would swing, and for each change all that is under way
has to end: after every step back the next ring has to be missed for twice as long, until a number of rings
has stood for a while.
"""

from __future__ import annotations

from featstore.base.warning import warn
from featstore.engine.lane import Lane
from featstore.errors import FeatstoreWarning

WINDOW_NS = 5_000_000  # of reading, over which a load is measured
BUSY, SPARE = 0.85, 0.4  # load from which one more ring works, and below which one fewer
PATIENCE_MAX_NS = 640_000_000
RING_EXTENTS_MIN, RING_PAGES_MIN = 32, 64  # a lane has a further ring for so many more of either


def worth_rings(lane: Lane) -> int:
    """How many rings would find enough to do in a lane."""
    return max(1, min(lane.extents, max(lane.extents // RING_EXTENTS_MIN, lane.pages // RING_PAGES_MIN)))


class RingCount:
    """Says by how many rings to change. Times are those of reading, not of the clock."""

    def __init__(self) -> None:
        self._patience_ns = 0  # for so long a ring must have been busy
        self._busy_ns = self._steady_ns = 0

    def step(self, load: float, over_ns: int, working: int, most: int) -> int:
        """1, 0 or -1, by the load of the last of ``working`` rings, of ``most``, over so much time."""
        self._busy_ns = self._busy_ns + over_ns if load >= BUSY else 0
        if load >= BUSY and working < most:
            self._steady_ns = 0
            if self._busy_ns < self._patience_ns:
                return 0
            self._busy_ns = 0
            return 1
        if load < SPARE and working > 1:
            self._patience_ns = min(max(2 * self._patience_ns, 2 * WINDOW_NS), PATIENCE_MAX_NS)
            self._steady_ns = 0
            return -1
        self._steady_ns += over_ns
        if self._steady_ns >= 2 * PATIENCE_MAX_NS:
            self._patience_ns = 0
        return 0


def told_of_fewer(rings: int, error: OSError) -> FeatstoreWarning | None:
    """Warn that no further ring can be opened. Where warnings are errors, returns it: a thread that reads has
    nobody to raise it to."""
    try:
        warn(
            f"reading goes on with {rings} ring{'s' * (rings > 1)} of io_uring: a further one cannot be "
            f"opened ({error.strerror or error}); threads={rings} asks for no more"
        )
    except FeatstoreWarning as told:
        return told
    return None
