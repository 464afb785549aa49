"""``np.memmap``: what most programs do today.

Run as a script it measures one gather in its own process, so that it can be put into a memory cgroup: it is
given and prints a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Memmap:
    """An ``.npy`` file as ``np.load(..., mmap_mode="r")`` opens it."""

    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, mmap_mode="r")

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill ``out`` ([n, columns])."""
        np.take(self._rows, ids, axis=0, out=out, mode="clip")  # "clip": without a buffer between

    def touch(self) -> None:
        """Touch every page, so that no page fault is left."""
        self._rows.reshape(-1)[:: 4096 // self._rows.itemsize].sum()


def main() -> None:
    """Gather rows in small batches until they are all there or the time is up."""
    given = json.loads(sys.argv[1])
    ids = np.load(given["ids"])
    rows = Memmap(Path(given["path"]))
    out = np.empty((len(ids), given["columns"]), np.float32)
    done, begin = 0, time.perf_counter()
    while done < len(ids) and time.perf_counter() - begin < given["seconds"]:
        batch = ids[done : done + 64]
        rows.read(batch, out[done : done + len(batch)])
        done += len(batch)
    seconds = time.perf_counter() - begin
    np.save(given["out"], out[:done])
    print(json.dumps({"rows": done, "seconds": seconds}))


if __name__ == "__main__":
    main()
