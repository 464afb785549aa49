"""The seconds that tuning was given: what each stage has of them, when it has to end, and what had to be left
out for it.

A stage measures each of its options for a part of its share. Where that is too short for the fewest
mini-batches that tell anything, the stage ends all the same: the first option, with which the others are
compared, is always measured, the others are left out, by name. What a stage takes too long or does not use is
shared by all that come after it.
"""

from __future__ import annotations

import time

#: Of the time, in the order in which stages come.
SHARES = {"sample": 0.1, "extract": 0.05, "workers": 0.1, "read": 0.25, "train": 0.1, "try": 0.4}
#: Nothing is left out before: so long does a little of everything take.
LEAST_SECONDS = 5.0


class Timetable:
    """``seconds``: for all stages together. The clock runs from :meth:`start` on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left_out: list[str] = []
        self._ends: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._begin = time.perf_counter()

    def part(self, stage: str, parts: int = 1) -> float:
        """Seconds for one of so many parts of a stage."""
        return self.seconds * SHARES[stage] / parts

    def left(self, stage: str) -> float:
        """Seconds until a stage, which begins when this is first asked, has to end; below 0 where it should
        have."""
        now = time.perf_counter()
        if stage not in self._ends:
            rest = max(0.0, self._begin + max(self.seconds, LEAST_SECONDS) - now)
            shares = list(SHARES.values())[list(SHARES).index(stage) :]
            self._ends[stage] = now + rest * shares[0] / sum(shares)
        return self._ends[stage] - now

    def leaves_out(self, stage: str, what: str, needed_seconds: float = 0.0) -> bool:
        """Whether there is no time in a stage for what takes so long; then it is noted as left out."""
        if self.left(stage) > needed_seconds:
            return False
        self.left_out.append(what)
        return True


def counted(count: int, what: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {what}{'s' * (count != 1)}"
