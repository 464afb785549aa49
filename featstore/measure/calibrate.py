"""Calibration: the numbers of the device model, measured through featstore's own engines.

Extents of five sizes, from one page to the longest read, are read at random distinct places of chunk files,
in ascending order as the planner issues them, at full queue depth, with checksums verified. The sizes take
turns over several rounds, so that a disturbance hits all of them alike, and each size's median counts. Then
runs that want every second page of a region, at random, are planned with different longest gaps: the longest
gap that is about as fast as the best is ``gap_pages``. ``read_seconds`` and ``byte_seconds`` are the plane
through the times of all these runs over reads and bytes, by least squares on the relative error: no pattern
may be off by much, however fast. What a request costs besides is the median time of a read of one row through
a :class:`featstore.reader.reader.Reader`, less that read's cost.

First reads of a page take turns through one ring, two, four ... and, where the engine is to be chosen,
through the engine ``threads`` (:mod:`featstore.measure.engine_rates`); all else is measured with the best.

``write_byte_seconds`` is what a larger store takes longer than a smaller one to be packed beside what is
measured, over the bytes that it has more: of several, the median; what any pack takes, a few dozen fsyncs,
is not in it. It is left out where nothing may be written.

Everything is read cold: with direct I/O the page cache is not involved, and for the others the files are
dropped from it before each run. A store with too little data for that, or a directory without a store, gets a
temporary store beside it.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_function, as_number, as_path
from featstore.base.folders import real_path
from featstore.base.progress import OnStep
from featstore.base.system import asking, free_bytes, is_directory, is_there
from featstore.engine import EngineName, choose
from featstore.errors import DiskFullError, FeatstoreWarning, SourceError
from featstore.measure.calibration import Calibration, GapSample, Sample
from featstore.measure.engine_rates import decide_engine, measure_engines
from featstore.measure.lane_bench import LaneBench, drop_cached
from featstore.measure.scratch import scratch_store
from featstore.plan.cost import DeviceModel, device_key, save_model
from featstore.reader.reader import Reader
from featstore.storage.manifest import MANIFEST_NAME
from featstore.storage.store import OpenStore, Table
from featstore.units import EXTENT_BYTES_MAX, PAGE_BYTES, parse_bytes

#: Sizes of the reads measured, in bytes.
EXTENT_SIZES = (PAGE_BYTES, 16 * 1024, 64 * 1024, 256 * 1024, EXTENT_BYTES_MAX)
#: A store with less data than this is measured on a temporary store beside it.
DATA_BYTES_MIN = 512 * 2**20
CALIBRATION_ROUNDS = 5
#: Of the two stores that are packed to see what writing costs.
WRITTEN_BYTES = (16 * 2**20, 144 * 2**20)
WRITE_ROUNDS = 3
SECONDS = 6.0
#: Longest gaps tried on the dense pattern, in pages; and its size.
GAPS = (2, 3, 4, 6, 8)
DENSE_BYTES = 96 * 2**20
DENSE_ROUNDS = 3
# a longer gap this close to the best is chosen: when the device is faster, it is the better one
_GAP_TOLERANCE = 1.04
_PILOT_READS = 256
_REQUESTS = 101
_READER_BYTES = 64 * 2**20
_SECONDS_MIN = 1e-12  # a model's numbers stay positive: a device may well be too fast for one of them to show


def calibrate(path: str | os.PathLike[str], engine: str = "auto", *, seconds: float = SECONDS) -> DeviceModel:
    """Measure the device that holds ``path`` (a store or a directory) through an engine, and keep the model
    for all readers.

    Warns (FeatstoreWarning) where the engine or the number of rings is left open. Raises what :func:`measure`
    raises.
    """
    result = measure(path, engine, seconds=seconds, data_bytes_min=DATA_BYTES_MIN)
    if result.open_because:
        warnings.warn(result.left_open, FeatstoreWarning, stacklevel=2)
    keep(result)
    return result.model


def keep(result: Calibration) -> Path:
    """Keep the model for all readers, and the engine, if it was chosen; returns the file. Raises what
    :func:`featstore.plan.cost.save_model` raises."""
    if result.model.engine is not None:
        save_model(result.auto_key, result.model)
    return save_model(result.key, msgspec.structs.replace(result.model, engine=None, engine_rates=None))


def measure(
    path: str | os.PathLike[str],
    engine: str = "auto",
    *,
    seconds: float = SECONDS,
    data_bytes_min: int = DATA_BYTES_MIN,
    progress: OnStep | None = None,
) -> Calibration:
    """Measure, and keep nothing.

    ``path``: a store, or any directory on the device. ``engine``: as for a reader. ``seconds``: about how
    long to measure, beyond the writing of a temporary store. ``data_bytes_min``: a store with less data is
    not measured itself.

    Raises SourceError (no such directory, or none that may be written), DiskFullError, CorruptionError,
    DeviceError; ValueError and OSError for an engine that does not exist or work here.
    """
    begin = time.perf_counter()
    choice = choose(engine)
    seconds = as_number(seconds, "seconds", above=True)
    data_bytes_min = as_count(data_bytes_min, "data_bytes_min", 0)
    tell = _nobody if progress is None else as_function(progress, "progress")
    with _store_to_measure(Path(os.path.abspath(as_path(path, "path"))), data_bytes_min, tell) as (
        store,
        temporary,
    ):
        table = max(store.tables.values(), key=lambda t: t.layout.pages)
        engines = [choice.name]
        if (engine, choice.name) == ("auto", "uring"):
            engines.append("threads")
        rates, others = measure_engines(store, table, engines, seconds * 0.2, tell)
        decision = decide_engine(rates, others)
        name = decision.best.engine
        bench = LaneBench(store, table, name, threads=decision.threads)
        try:
            samples = _samples(bench, seconds * 0.5, tell)
            gaps = _gaps(bench, tell)
        finally:
            bench.close()
        model = fit_model(samples, gaps)
        if bench.access == "mapped":  # pages that nobody looks at are not read, see reading_model
            model = msgspec.structs.replace(model, gap_pages=0)
        model = msgspec.structs.replace(
            model, threads=decision.threads, read_cpu_seconds=decision.best.cpu_seconds
        )
        model = _with_request_seconds(model, store, table, name, seconds * 0.1)
        beside = store.path.parent.parent if temporary else real_path(store.path).parent
        model = msgspec.structs.replace(model, write_byte_seconds=_write_byte_seconds(beside, store.path))
        if len(engines) > 1 and bench.access == "direct" and not decision.open_because:
            best = {one: max(r.reads_per_second for r in rates if r.engine == one) for one in engines}
            model = msgspec.structs.replace(model, engine=name, engine_rates=best)
        tell("measure", 1, 1)
        return Calibration(
            device_key(store.path, name, bench.access),
            device_key(store.path, "auto", "direct"),
            name,
            bench.access,
            bench.access_because,
            model,
            samples,
            gaps,
            rates,
            decision.open_because,
            temporary,
            time.perf_counter() - begin,
        )


def fit_model(samples: tuple[Sample, ...], gaps: tuple[GapSample, ...] = ()) -> DeviceModel:
    """Prices of a read and of a byte, least squares on the relative error over all patterns, both positive;
    and the longest gap that is about as fast as the best one."""
    times = np.array([s.seconds_per_read for s in samples] + [g.median_seconds for g in gaps], np.float64)
    reads = np.array([1.0] * len(samples) + [g.reads for g in gaps], np.float64) / times
    sizes = np.array([s.extent_bytes for s in samples] + [g.bytes_read for g in gaps], np.float64) / times
    (read, byte), *_ = np.linalg.lstsq(np.stack([reads, sizes], axis=1), np.ones(len(times)), rcond=None)
    if read < 0:  # each byte costs and nothing else, as with page faults
        read, byte = 0.0, float(sizes.sum() / (sizes**2).sum())
    elif byte < 0:
        read, byte = float(reads.sum() / (reads**2).sum()), 0.0
    gap = None
    if gaps:
        best = min(g.median_seconds for g in gaps)
        gap = max(g.gap_pages for g in gaps if g.median_seconds <= best * _GAP_TOLERANCE)
    return DeviceModel(max(float(read), _SECONDS_MIN), max(float(byte), _SECONDS_MIN), 0.0, gap)


def _samples(bench: LaneBench, seconds: float, tell: OnStep) -> tuple[Sample, ...]:
    sizes = [size for size in EXTENT_SIZES if bench.places(size) >= 1]
    each = seconds / (len(sizes) * (CALIBRATION_ROUNDS + 1))
    reads: dict[int, int] = {}
    times: dict[int, list[float]] = {}
    steps, step = len(sizes) * (CALIBRATION_ROUNDS + 1), 0
    # find how many reads fill the time; the first run also compiles and wakes what there is
    for size in sizes:
        pilot = min(_PILOT_READS, bench.places(size))
        bench.run(size, pilot)
        rate = pilot / bench.run(size, pilot)
        reads[size] = max(1, min(bench.places(size), int(rate * each)))
        times[size] = []
        tell("measure", step := step + 1, steps)
    for _ in range(CALIBRATION_ROUNDS):
        for size in sizes:
            times[size].append(bench.run(size, reads[size]) / reads[size])
            tell("measure", step := step + 1, steps)
    return tuple(Sample(size, reads[size], tuple(times[size])) for size in sizes)


def _gaps(bench: LaneBench, tell: OnStep) -> tuple[GapSample, ...]:
    """The dense pattern with each longest gap, in turns."""
    times: dict[int, list[float]] = {gap: [] for gap in GAPS}
    counts: dict[int, tuple[int, int]] = {}
    for turn in range(DENSE_ROUNDS):
        for gap in GAPS:
            reads, read_bytes, seconds = bench.run_dense(gap, DENSE_BYTES // PAGE_BYTES)
            counts[gap] = (reads, read_bytes)
            times[gap].append(seconds)
        tell("measure gaps", turn + 1, DENSE_ROUNDS)
    return tuple(GapSample(gap, *counts[gap], tuple(times[gap])) for gap in GAPS)


def _with_request_seconds(
    model: DeviceModel, store: OpenStore, table: Table, engine: EngineName, seconds: float
) -> DeviceModel:
    """The model with ``request_seconds``: the median of reads of one row, less what the read itself costs."""
    random = np.random.default_rng(1)
    times: list[float] = []
    memory_bytes = _READER_BYTES + 8 * table.rows + 4 * table.layout.pages + 16 * table.row_bytes
    for chunk in range(table.layout.chunks):
        drop_cached(store.path / table.entry.chunk_path(chunk))
    with Reader(
        store, memory=memory_bytes, tables=[table.name], static=None, engine=engine, model=model
    ) as reader:
        out = np.empty((1, *table.row_shape), table.dtype)
        until = time.perf_counter() + seconds
        while len(times) < _REQUESTS and (len(times) < 3 or time.perf_counter() < until):
            ids = random.integers(0, table.rows, 1)
            begin = time.perf_counter()
            reader.read(ids, out=out)
            times.append(time.perf_counter() - begin)
        plan = reader.plan(ids)
    rest = statistics.median(times) - model.seconds(plan.reads, plan.bytes_read)
    return msgspec.structs.replace(model, request_seconds=max(rest, _SECONDS_MIN))


def _write_byte_seconds(directory: Path, store: Path) -> float | None:
    """Seconds for a byte of a store that is packed there, beside ``store``; None where it cannot be, or would
    be on another device."""
    if os.stat(directory).st_dev != os.stat(store).st_dev:
        return None
    if not os.access(directory, os.W_OK | os.X_OK) or free_bytes(directory) < 2 * max(WRITTEN_BYTES):
        return None
    times: dict[int, list[float]] = {size: [] for size in WRITTEN_BYTES}
    for _ in range(WRITE_ROUNDS):
        for size in WRITTEN_BYTES:
            with scratch_store(real_path(directory)) as scratch:
                begin = time.perf_counter()
                with _temporary_store(scratch, size, _nobody):
                    times[size].append(time.perf_counter() - begin)
    small, large = WRITTEN_BYTES
    longer = statistics.median(times[large]) - statistics.median(times[small])
    return max(longer / (large - small), _SECONDS_MIN)


@contextmanager
def _store_to_measure(path: Path, data_bytes_min: int, tell: OnStep) -> Iterator[tuple[OpenStore, bool]]:
    """The store at ``path`` if it has data enough, else a temporary one on the same device; and whether it is
    temporary.
    """
    if not is_directory(path):
        raise SourceError(
            f"{path} is {'a file' if is_there(path) else 'not there'}; give a store or a directory on "
            "the device to measure"
        )
    directory = path
    if is_there(path / MANIFEST_NAME):
        with OpenStore(path) as store:
            if max((t.data_bytes for t in store.tables.values()), default=0) >= data_bytes_min:
                yield store, False
                return
        directory = real_path(path).parent  # nothing but a pack writes into a store
    _check_writable(directory, path, data_bytes_min)
    with (
        scratch_store(real_path(directory)) as scratch,
        _temporary_store(scratch, data_bytes_min, tell) as store,
    ):
        yield store, True


def _check_writable(directory: Path, path: Path, data_bytes: int) -> None:
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SourceError(
            f"{directory} cannot be written, and {path} has too little data to measure on; name a "
            "directory that can"
        )
    with asking(directory, "look at"):
        elsewhere, status = os.stat(directory).st_dev != os.stat(path).st_dev, os.statvfs(directory)
    if elsewhere:
        raise SourceError(
            f"{path} has too little data to measure on, and {directory} is another device; name a "
            "directory on the same one"
        )
    needed, free = data_bytes + data_bytes // 16, status.f_bavail * status.f_frsize
    if free < needed:
        raise DiskFullError(directory, needed, free)


def _temporary_store(path: Path, data_bytes: int, tell: OnStep) -> OpenStore:
    from featstore.packing.packing import pack

    block = np.random.default_rng(0).integers(0, 2**32, (2048, 128), dtype=np.uint32)  # 1 MiB
    blocks = max(1, data_bytes // block.nbytes)

    def rows() -> Iterator[NDArray[np.uint32]]:
        for k in range(blocks):
            block[:, 0] = k
            tell("write", k, blocks)
            yield block

    return OpenStore(pack(path, rows(), memory=parse_bytes("128MiB")))


def _nobody(stage: str, done: int, total: int) -> None:
    """Nobody watches."""
