"""The corpus of the fuzzer: a small store of everything, a trace, the trace compiled twice, a saved cache;
packs, a compilation and a recording that were stopped in the middle; measured device models. Made from a
seed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import featstore
import featstore.layout.table
from featstore.compile import segment_plan, segments
from featstore.compile.decide import Policy
from featstore.compile.groups import shared_order
from featstore.compile.placement import Forecast, Location, Placement, forecast
from featstore.engine import ENGINES
from featstore.layout import TableLayout
from featstore.packing import permute, spill, spill_files
from featstore.plan.cost import DEFAULT, DeviceModel, device_key, save_model
from featstore.storage.disk import Disk, File
from featstore.tiers import saved
from featstore.trace import recorder

ROWS, WIDTH, PARTITIONS, EDGES = 130, 40, 4, 700
#: The store, and the same again with what was made for it: packs, a saved cache.
STORE, BASE, TRACE, RECORDING = "store", "base", "trace", "recording"
PACKS = ("moving", "fixed")
#: Packs that were stopped, by how their rows find their places; a compilation that was, in the store.
UNFINISHED = ("graph", "spill", "buckets", "given")
HALF = "half"
_BATCHES = 5
_POLICY: list[Policy] = []


class Stopped(BaseException):
    """The process was killed, as far as what it was doing can tell."""


class QuickDisk(Disk):
    """The real disk without durability: nobody cuts the power of a fuzzer."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


class StoppingDisk(QuickDisk):
    """Ends the process's work when the journal has been written so often."""

    def __init__(self, journals: int) -> None:
        self._left = journals

    def replace_file(self, path: Path, data: Any) -> None:
        super().replace_file(path, data)
        self._left -= path.suffix == ".journal"
        if self._left == 0:
            raise Stopped


def rows_of(seed: int) -> np.ndarray[Any, Any]:
    """float32 [ROWS, WIDTH]; no two rows are alike, and rows straddle pages."""
    return np.random.default_rng([seed, 1]).standard_normal((ROWS, WIDTH), np.float32)


def edges_of(seed: int) -> np.ndarray[Any, Any]:
    """int64 [2, EDGES]: some nodes are named far more often than others."""
    rng = np.random.default_rng([seed, 2])
    return np.stack([(rng.random(EDGES) ** 3 * ROWS).astype(np.int64), rng.integers(0, ROWS, EDGES)])


def batches_of(seed: int) -> list[tuple[Any, Any]]:
    """Pairs of node ids and graph sample."""
    rng = np.random.default_rng([seed, 4])
    ids = [rng.integers(0, ROWS, rng.integers(10, 60)) for _ in range(_BATCHES)]
    return [(one, {"number": n, "edge_index": rng.integers(0, 60, (2, 2 * n))}) for n, one in enumerate(ids)]


def mixed() -> Policy:
    """Rows from everywhere: some stay in the store, some are shared by mini-batches, some packed for one."""
    if _POLICY:
        return _POLICY[0]
    base, shared, packed = int(Location.BASE), int(Location.SHARED), int(Location.PACKED)
    placement = Placement(3, (base, shared, packed), 1, 0.5, packed)

    def choose(misses: Any, table_rows: int, *rest: Any, **options: Any) -> tuple[Placement, Forecast]:
        layout, model = (next(r for r in rest if isinstance(r, kind)) for kind in (TableLayout, DeviceModel))
        extent = options["extent_bytes_max"]
        return placement, forecast(placement, misses, table_rows, layout, model, extent_bytes_max=extent)

    _POLICY.append(Policy("mixed", choose, shared_order))
    return _POLICY[0]


@contextmanager
def small_pieces() -> Iterator[None]:
    """Several chunks, buckets, flushes and checkpoints in a table of some pages."""
    values: dict[Any, dict[str, int]] = {
        featstore.layout.table: {"CHUNK_BYTES": 8192},
        permute: {"SOURCE_BLOCK_BYTES": 4096, "CHECKPOINT_BYTES": 6000},
        spill: {"PIECE_BYTES": 4096, "CHECKPOINT_BYTES": 60_000},
        spill_files: {"FLUSH_BYTES_MAX": 4096, "FLUSH_BYTES_MIN": 4096, "CHECKPOINT_BYTES": 60_000},
        segments: {"SEGMENTS_CHECKPOINT_BYTES": 3000},
        segment_plan: {"SLAB_BYTES_MAX": 4000},
        recorder: {"_HOLD_BYTES": 300, "LOG_CHECKPOINT_BYTES": 900},
    }  # fmt: skip
    with ExitStack() as stack:
        for module, sizes in values.items():
            for name, value in sizes.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def do_pack(path: Path, way: str, seed: int, disk: Disk, **options: Any) -> Path:
    """Pack the rows, in one of the ways of :data:`UNFINISHED`."""
    from featstore.packing.packing import pack

    rng = np.random.default_rng([seed, 5])
    if way == "graph":
        options |= {"graph": edges_of(seed), "order": "ldg", "partitions": PARTITIONS, "hubs": 0.1}
    elif way in ("spill", "buckets"):
        options |= {"order": "permutation", "permutation": rng.permutation(ROWS)}
    memory = {"graph": "64MiB", "given": "1MiB"}.get(way, 268_000)
    rows = np.tile(rows_of(seed), (1, 12)) if way in ("spill", "buckets") else rows_of(seed)
    with small_pieces():
        return pack(
            path, {"features": rows}, arrays={"labels": rng.integers(0, 7, ROWS)},
            seed=seed, memory=memory, disk=disk, **options,
        )  # fmt: skip


def do_compile(store: featstore.Store, trace: featstore.Trace, name: str, disk: Disk, **options: Any) -> None:
    """Compile the trace with rows from everywhere."""
    from featstore.compile.build import compile_trace

    with small_pieces():
        compile_trace(
            store, trace, name, memory="16MiB", cache=20 * WIDTH * 4, residency="min", policy=mixed(),
            disk_door=disk, **options,
        )  # fmt: skip


def do_record(path: Path, seed: int, batches: Any, **options: Any) -> featstore.Trace:
    with small_pieces():
        return featstore.Trace.record(batches, path, fingerprint={"seed": seed}, disk=QuickDisk(), **options)


def _stopped(work: Callable[[], Any]) -> None:
    """Do some work that is stopped in the middle."""
    try:
        work()
    except Stopped:
        return
    raise AssertionError("the work came to its end")


def make(folder: Path, seed: int = 0) -> None:
    """Write the corpus below ``folder``."""
    rng = np.random.default_rng([seed, 3])
    arrays = {
        "labels": rng.integers(0, 7, ROWS),
        "train": rng.permutation(ROWS)[:60],
        "matrix": rng.random((3, 5)),
    }
    with small_pieces():
        store = featstore.pack(
            folder / STORE, {"features": rows_of(seed)}, graph=edges_of(seed), order="ldg",
            partitions=PARTITIONS, hubs=0.1,
            arrays=arrays, seed=seed, disk=QuickDisk(), memory="64MiB",
        )  # fmt: skip
    batches = batches_of(seed)
    trace = do_record(folder / TRACE, seed, batches)
    store.close()
    shutil.copytree(folder / STORE, folder / BASE)
    with featstore.open(folder / BASE) as store, trace:
        for name, residency in zip(PACKS, ("min", "fixed"), strict=True):
            options: dict[str, Any] = {"memory": "16MiB", "cache": 20 * WIDTH * 4, "residency": residency}
            options |= {"policy": mixed()} if name == PACKS[0] else {"device_memory": 9 * WIDTH * 4}
            made = featstore.compile_trace(store, trace, name, **options, disk_door=QuickDisk())
            assert isinstance(made, featstore.Store)
            made.close()
        saved.save(
            store,
            "warm",
            {"features": lambda: iter([rng.permutation(ROWS)[:70]])},
            policies={"features": "lru"},
        )
        _stopped(lambda: do_compile(store, trace, HALF, StoppingDisk(3)))
    for way, journals in zip(UNFINISHED, (3, 4, 9, 3), strict=True):
        _stopped(lambda: do_pack(folder / way, way, seed, StoppingDisk(journals)))  # noqa: B023

    def some() -> Iterator[Any]:
        yield from batches[:4]
        raise Stopped

    _stopped(lambda: do_record(folder / RECORDING, seed, some()))


def save_models(folder: Path) -> None:
    """Measured models of the device below ``folder``, of each engine, where ``FEATSTORE_CACHE`` says."""
    for engine in ENGINES:
        for access in ("direct", "buffered", "mapped"):
            save_model(device_key(folder, engine, access), DEFAULT)
