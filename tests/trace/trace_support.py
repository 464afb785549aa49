"""What the tests of traces share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from featstore.storage.disk import Disk, File
from featstore.trace.trace import Trace


class QuickDisk(Disk):
    """The real disk without durability."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def record(batches: Any, path: Path, **options: Any) -> Trace:
    return Trace.record(batches, path, **({"disk": QuickDisk()} | options))


def batches_of(count: int, size: int = 40) -> list[Any]:
    """Pairs (ids, sample), the same each time."""
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, 1000, rng.integers(0, size)), {"number": n, "edge": rng.integers(0, 9, (2, 30))})
        for n in range(count)
    ]
