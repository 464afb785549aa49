"""What the tests of compiled traces share: small stores and traces whose every row is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import featstore
from featstore.compile.decide import Policy
from featstore.compile.groups import shared_order
from featstore.compile.placement import Forecast, Placement, forecast
from featstore.layout import TableLayout
from featstore.plan.cost import DeviceModel
from featstore.storage.disk import Disk, File
from featstore.trace.trace import Trace


class QuickDisk(Disk):
    """The real disk without durability, for tests that are not about crashes."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def placed(placement: Placement) -> Policy:
    """A policy that takes this placement, whatever it costs."""

    def choose(misses: Any, table_rows: int, *rest: Any, **options: Any) -> tuple[Placement, Forecast]:
        layout, model = (next(r for r in rest if isinstance(r, kind)) for kind in (TableLayout, DeviceModel))
        extent = options["extent_bytes_max"]
        return placement, forecast(placement, misses, table_rows, layout, model, extent_bytes_max=extent)

    return Policy(repr(placement), choose, shared_order)


def rows_of(count: int, row_shape: Sequence[int], dtype: Any, seed: int) -> NDArray[Any]:
    """Rows of random bits, every NaN among them: they are to be moved, not understood."""
    dtype = np.dtype(dtype)
    shape = (count, *row_shape)
    raw = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)), dtype.itemsize), np.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


@dataclass(frozen=True)
class Case:
    """A base store, the rows it was made of (by table), and mini-batches of node ids (by table)."""

    store: featstore.Store
    rows: Mapping[str, NDArray[Any]]
    batches: Sequence[Mapping[str, NDArray[np.int64]]]
    trace: Trace

    def compile(self, name: str = "default", **options: Any) -> Any:
        """Compile the trace; a CompileForecast with ``dry_run``, else None."""
        options = {"memory": "16MiB", "disk_door": QuickDisk(), "overwrite": True} | options
        found = featstore.compile_trace(self.store, self.trace, name, **options)
        if options.get("dry_run"):
            return found
        found.close()
        return None

    def check(self, batches: Iterable[Any], expected: Iterable[int]) -> None:
        """These mini-batches have these numbers, the rows of the source and the sample that was recorded, to
        the bit."""
        numbers = list(expected)
        count = 0
        for batch, number in zip(batches, numbers, strict=True):
            self.check_batch(batch, number)
            count += 1
        assert count == len(numbers)

    def check_batch(self, batch: Any, number: int) -> None:
        assert batch.index == number
        found = batch.x if len(self.rows) > 1 else {next(iter(self.rows)): batch.x}
        assert found.keys() == self.rows.keys()
        for name, ids in self.batches[number].items():
            wanted = self.rows[name][ids]
            got = as_array(found[name])
            assert got.shape == wanted.shape, (number, name)
            assert got.dtype.itemsize == wanted.dtype.itemsize
            assert got.tobytes() == wanted.tobytes(), (number, name)
        assert batch.sample["number"] == number
        assert np.array_equal(batch.sample["noise"], noise_of(number))


def as_array(rows: Any) -> NDArray[Any]:
    """A NumPy array of what may be a tensor."""
    if isinstance(rows, np.ndarray):
        return rows
    import torch

    return rows.view(torch.int16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def noise_of(number: int) -> NDArray[np.int32]:
    """An array that goes with mini-batch ``number``."""
    return np.random.default_rng(number).integers(0, 1000, number % 5, np.int32)


def with_samples(batches: Iterable[Mapping[str, NDArray[np.int64]]]) -> list[Any]:
    """What is recorded: ids (by node type, but for a single table), and a sample."""
    return [
        (
            dict(ids) if len(ids) > 1 else next(iter(ids.values())),
            {"number": number, "noise": noise_of(number)},
        )
        for number, ids in enumerate(batches)
    ]


def make_case(
    folder: Path, rows: Mapping[str, NDArray[Any]], batches: Sequence[Mapping[str, NDArray[np.int64]]], *,
    permuted: bool = False
) -> Case:  # fmt: skip
    """Pack the rows and record the mini-batches."""
    order: dict[str, Any] = {"order": "given"}
    if permuted:
        random = np.random.default_rng(5)
        order = {
            "order": "permutation",
            "permutation": {name: random.permutation(len(r)) for name, r in rows.items()},
        }
    store = featstore.pack(folder / "base", dict(rows), disk=QuickDisk(), memory="64MiB", **order)
    return Case(store, rows, batches, Trace.record(with_samples(batches), folder / "trace", disk=QuickDisk()))


def skewed_batches(
    tables: Mapping[str, int], count: int, largest: int, seed: int, *, repeat: bool = True
) -> list[dict[str, NDArray[np.int64]]]:
    """Mini-batches of 0 to ``largest`` ids of each table (of so many rows), some of them wanted far more
    often than others."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        batch = {}
        for name, rows in tables.items():
            size = int(random.integers(0, largest + 1)) if rows else 0
            ids = (random.random(size) ** 3 * rows).astype(np.int64) * 7 % max(1, rows)
            batch[name] = ids if repeat else np.unique(ids)
        batches.append(batch)
    return batches
