"""What the owner of a loader that ranks share knows of each of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from featstore.loaders.host.line import Line


class Begin(NamedTuple):
    """A rank's wish: an epoch, from its mini-batch ``step`` on, as the mode counts them; ``at``: its state
    there, None at an epoch's begin. ``run``: the number that the rank gives it; ``next``: of the first
    mini-batch, as the loop counts, which has had ``handed`` of all epochs."""

    run: int
    epoch: int
    step: int
    at: Mapping[str, Any] | None
    next: int
    handed: int


@dataclass
class Rank:
    """A rank of this host, as the owner knows it."""

    number: int
    line: Line
    free: list[int]  # slots
    held: dict[int, int] = field(default_factory=dict)  # slots by numbers of mini-batches
    kept: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    begun: Begin | None = None  # and the epoch has not
    active: Begin | None = None  # in the epoch under way
    closed: bool = False
    heard: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """The epoch that it has begun is under way."""
        self.active, self.begun = self.begun, None

    def end(self, kind: str, *what: Any) -> None:
        """Its epoch is over."""
        if self.active is not None:
            self.line.say(kind, self.active.run, *what)
        self.active = None

    def leave(self) -> None:
        """It is gone."""
        self.closed, self.active, self.begun = True, None, None
