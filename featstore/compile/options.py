"""What a trace is compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_sequence
from featstore.errors import ArgumentError
from featstore.storage.manifest import EPOCHS, MADE_OF
from featstore.units import parse_bytes


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of :func:`featstore.compile.build.compile_trace` of these names. ``cache_bytes`` 0:
    nothing stays."""

    memory_bytes: int
    disk_bytes: int | None
    train_bytes: int
    cache_bytes: int | None
    device_bytes: int
    residency: str
    seed: int
    policy: str
    epoch_batches: tuple[int, ...]
    read_times: int | None
    sampled_by: str | None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What a compiled trace says of the mini-batches that were recorded."""
        found: dict[str, NDArray[Any]] = {}
        if len(self.epoch_batches) > 1:
            found[EPOCHS] = np.cumsum([0, *self.epoch_batches])
        if self.sampled_by is not None:
            found[MADE_OF] = np.frombuffer(self.sampled_by.encode(), np.uint8)
        return found


def size_or_nothing(given: int | str, name: str) -> int:
    """A size that may be nothing."""
    nothing = isinstance(given, int | str) and not isinstance(given, bool) and given in (0, "0")
    return 0 if nothing else parse_bytes(given, name)


def batches_of_epochs(given: Sequence[int] | None, batches: int) -> tuple[int, ...]:
    """Mini-batches of each epoch. Raises ArgumentError unless they are those of the trace."""
    if given is None:
        return (batches,)
    counts = as_sequence(given, "epoch_batches", "numbers of mini-batches, one for each epoch")
    epochs = tuple(as_count(count, "a number of epoch_batches", 0) for count in counts)
    if not epochs or sum(epochs) != batches:
        raise ArgumentError(
            f"epoch_batches are those of {sum(epochs):,} mini-batches, the trace has {batches:,}"
        )
    return epochs
