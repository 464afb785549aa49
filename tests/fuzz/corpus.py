"""The corpus of the fuzzer: a small store of everything, a trace, the trace compiled twice, a saved cache.
Made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import featstore
import featstore.layout.table
from featstore.compile.decide import Policy
from featstore.compile.groups import shared_order
from featstore.compile.placement import Forecast, Location, Placement, forecast
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.storage.disk import Disk, File
from featstore.tiers import saved

ROWS, WIDTH, PARTITIONS, EDGES = 260, 96, 6, 1500
STORE, TRACE = "store", "trace"
PACKS = ("moving", "fixed")


class QuickDisk(Disk):
    """The real disk without durability: nobody cuts the power of a fuzzer."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def rows_of(seed: int) -> np.ndarray[Any, Any]:
    """float32 [ROWS, WIDTH]; no two rows are alike, and rows straddle pages."""
    return np.random.default_rng([seed, 1]).standard_normal((ROWS, WIDTH), np.float32)


def edges_of(seed: int) -> np.ndarray[Any, Any]:
    """int64 [2, EDGES]: some nodes are named far more often than others."""
    rng = np.random.default_rng([seed, 2])
    return np.stack([(rng.random(EDGES) ** 3 * ROWS).astype(np.int64), rng.integers(0, ROWS, EDGES)])


def mixed() -> Policy:
    """Rows from everywhere: some stay in the store, some are shared by mini-batches, some packed for one."""
    base, shared, packed = int(Location.BASE), int(Location.SHARED), int(Location.PACKED)
    placement = Placement(3, (base, shared, packed), 1, 0.5, packed)

    def choose(misses: Any, table_rows: int, *rest: Any, **options: Any) -> tuple[Placement, Forecast]:
        layout, model = (next(r for r in rest if isinstance(r, kind)) for kind in (TableLayout, DeviceModel))
        extent = options["extent_bytes_max"]
        return placement, forecast(placement, misses, table_rows, layout, model, extent_bytes_max=extent)

    return Policy("mixed", choose, shared_order)


def make(folder: Path, seed: int = 0) -> None:
    """Write the corpus below ``folder``."""
    rng = np.random.default_rng([seed, 3])
    arrays = {
        "labels": rng.integers(0, 7, ROWS),
        "train": rng.permutation(ROWS)[:90],
        "matrix": rng.random((3, 5)),
    }
    with mock.patch.object(featstore.layout.table, "CHUNK_BYTES", 16 * 1024):
        store = featstore.pack(
            folder / STORE, {"features": rows_of(seed)}, graph=edges_of(seed), order="ldg",
            partitions=PARTITIONS, hubs=0.1,
            arrays=arrays, seed=seed, disk=QuickDisk(), memory="64MiB",
        )  # fmt: skip
    batches = [rng.integers(0, ROWS, rng.integers(1, 60)) for _ in range(9)]
    samples = [{"number": n, "edge_index": rng.integers(0, 60, (2, 2 * n))} for n in range(len(batches))]
    trace = featstore.Trace.record(zip(batches, samples, strict=True), folder / TRACE, disk=QuickDisk())
    with store, trace:
        for name, residency in zip(PACKS, ("min", "fixed"), strict=True):
            options: dict[str, Any] = {"memory": "16MiB", "cache": 40 * WIDTH * 4, "residency": residency}
            options |= {"policy": mixed()} if name == PACKS[0] else {}
            made = featstore.compile_trace(store, trace, name, **options, disk_door=QuickDisk())
            assert isinstance(made, featstore.Store)
            made.close()
        saved.save(
            store,
            "warm",
            {"features": lambda: iter([rng.permutation(ROWS)[:70]])},
            policies={"features": "lru"},
        )
