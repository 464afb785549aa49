"""Epochs through a shared buffer by a torch DataLoader in a process of its own; given and prints a JSON
object.

First the same loader with rows of zeros, nothing of featstore open: the bare processes, with all that Python,
torch and the loader take. Memory is looked at when an epoch has ended and no mini-batch is under way; workers
persist, so theirs is there to be seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ROOT  # noqa: F401  (makes featstore importable)
from tables import COLUMNS, check_rows

import featstore
from featstore.shared.client import BufferClient

BUFFER = "memfd:featstore-buffer"
CHECKED_EVERY = 128  # rows
SEEN = ("Rss", "Pss", "Pss_Anon", "Pss_Shmem", "Shared_Clean", "Shared_Dirty")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process as the kernel accounts for them, and of ``Pss`` those of the buffer's rows."""
    found = {"rows": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, _ = line.split()
        if name[:-1] in SEEN:
            found[name[:-1]] = 1024 * int(value)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = BUFFER in line
        elif inside and first == "Pss:":
            found["rows"] += 1024 * int(rest[0])
    return found


class Batches(torch.utils.data.Dataset[Any]):
    """Mini-batch k of an order of all ids, and its rows: zeros without a client."""

    def __init__(self, order: np.ndarray, batch_rows: int, client: BufferClient | None) -> None:
        self.order, self.batch_rows, self.client = order, batch_rows, client

    def __len__(self) -> int:
        return len(self.order) // self.batch_rows

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(self.order[k * self.batch_rows : (k + 1) * self.batch_rows])
        return ids, torch.zeros(len(ids), COLUMNS) if self.client is None else self.client.read(ids)


def epochs(given: dict[str, Any], client: BufferClient | None, count: int) -> dict[str, Any]:
    """Seconds of the last epoch, and the memory of all processes after it; the owner's comes first."""
    workers = given["workers"]
    order = np.random.default_rng(given["seed"]).permutation(given["rows"])
    loader = torch.utils.data.DataLoader(
        Batches(order, given["batch_rows"], client), batch_size=None, num_workers=workers, shuffle=True,
        generator=torch.Generator().manual_seed(given["seed"]), persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None, timeout=60 if workers else 0,
    )  # fmt: skip
    rows, seconds = 0, 0.0
    for _ in range(count):
        kept, rows, begin = [], 0, time.perf_counter()
        for ids, x in loader:
            rows += len(ids)
            kept.append((ids[::CHECKED_EVERY].clone().numpy(), x[::CHECKED_EVERY].clone().numpy()))
            del ids, x
        seconds = time.perf_counter() - begin
        for ids, x in kept if client is not None else []:
            check_rows(ids, x)
        del kept
    children = sorted(child.pid or 0 for child in multiprocessing.active_children())
    if len(children) != workers:
        raise RuntimeError(f"{len(children)} workers are there, not {workers}")
    return {"rows": rows, "seconds": seconds, "memory": [memory_of(pid) for pid in (os.getpid(), *children)]}


def main() -> None:
    """Bare first, then through a buffer."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    bare = epochs(given, None, 1)
    with (
        featstore.open(given["path"]) as store,
        featstore.SharedBuffer(store, memory=given["memory_bytes"]) as shared,
        shared.client() as client,
    ):
        found = epochs(given, client, 2)
        stats = shared.stats()
        found |= {"cache_bytes": shared.memory()["rows"], "hits": stats.hits, "misses": stats.misses}
    print(json.dumps({"bare": bare, "shared": found}))


if __name__ == "__main__":
    main()
