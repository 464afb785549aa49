"""Dense gather and its forecast: requests that touch from one page in a thousand to every page of the table.

    python benchmarks/dense.py --dir /a/directory/on/the/ssd

Three strategies answer the same ids through the same engine: *planned* (the calibrated device model decides
which gaps to read through), *page by page* (a model in which bytes are dear and reads are free: nothing but
wanted pages is read; neighbouring pages still share a read) and *scan* (a model in which reads are dear: the
whole table is read and rows are picked). The limit is fio's sequential bandwidth over the same files in the
same round. The forecast is that of ``reader.plan`` with a model calibrated at the start of this run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import click
import numpy as np
from harness import Claim, Contender, Report, Sample, Series, Settings, measure_rounds, note, shared_options
from numpy.typing import NDArray
from peers import fio
from system import cpu_seconds, free_memory_bytes, touch_memory
from tables import COLUMNS, ROW_BYTES, Tables, check_rows, random_page_ids

import featstore
from featstore.measure.calibrate import measure
from featstore.plan.cost import DeviceModel

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1.0)
HALF = 0.5
SAMPLE_ROWS = 20_000  # small requests are repeated (with other ids) until a sample has so many rows ...
REPEATS_MAX = 20  # ... but not more often than this
CACHE = "cold (direct I/O)"
MB = 10**6
UNIT = "MB/s read"
LIMIT = "fio sequential, 512 KiB"
PLANNED, PAGES, SCAN = "planned", "page by page", "scan"
#: Read nothing but what is wanted; read everything.
ONLY_WANTED = DeviceModel(read_seconds=0.0, byte_seconds=1.0, request_seconds=0.0)
EVERYTHING = DeviceModel(read_seconds=1.0, byte_seconds=1e-12, request_seconds=0.0)


def label(density: float, strategy: str) -> str:
    return f"{density:.1%} of pages, {strategy}"


class Dense:
    """Readers of all strategies over one store."""

    def __init__(self, tables: Tables, engine: str, settings: Settings) -> None:
        self.tables = tables
        self.settings = settings
        path = tables.store()
        note("calibrating")
        self.calibration = measure(path, engine, seconds=max(5.0, settings.seconds))
        self._store = featstore.open(path)
        models = {PLANNED: self.calibration.model, PAGES: ONLY_WANTED, SCAN: EVERYTHING}
        self.readers = {
            name: self._store.reader(memory="768MiB", static=None, engine=engine, model=model)
            for name, model in models.items()
        }
        self.out = np.zeros((tables.pages, COLUMNS), np.float32)
        for reader in self.readers.values():
            # compiles and wakes what there is
            reader.read(np.arange(0, tables.rows, max(1, tables.rows // 100)))

    def ids(self, density: float, number: int, repeat: int) -> NDArray[np.int64]:
        count = max(1, round(self.tables.pages * density))
        return random_page_ids(self.tables, count, seed=1000 * number + repeat)

    def contender(self, density: float, strategy: str) -> Contender:
        reader = self.readers[strategy]
        repeats = max(1, min(REPEATS_MAX, round(SAMPLE_ROWS / (self.tables.pages * density))))

        def run(number: int) -> Sample:
            total = dict.fromkeys(("bytes", "rows", "reads", "seconds", "cpu", "forecast"), 0.0)
            for repeat in range(repeats):
                ids = self.ids(density, number, repeat)
                plan = reader.plan(ids)
                out = self.out[: len(ids)]
                cpu, begin = cpu_seconds(), time.perf_counter()
                reader.read(ids, out=out)
                total["seconds"] += time.perf_counter() - begin
                total["cpu"] += cpu_seconds() - cpu
                check_rows(ids, out)
                total["bytes"] += plan.bytes_read
                total["rows"] += len(ids)
                total["reads"] += plan.reads
                total["forecast"] += plan.forecast_seconds
            extra = {
                "rows": total["rows"],
                "reads": total["reads"],
                "forecast_seconds": total["forecast"],
                "requests": repeats,
            }
            return Sample(total["bytes"] / MB, total["seconds"], total["cpu"], extra)

        return Contender(label(density, strategy), UNIT, CACHE, run)

    def limit(self) -> Contender:
        files = self.tables.chunk_files()

        def run(_: int) -> Sample:
            result = fio.sequential_read(files, self.settings.seconds)
            return Sample(result.bytes / MB, result.seconds, result.cpu_seconds)

        return Contender(LIMIT, UNIT, CACHE, run)

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self._store.close()


def paired(series: dict[str, Series], figure: Callable[..., float], *names: str) -> float:
    """Median over the rounds of a figure made of one sample of each name."""
    return median(figure(*samples) for samples in zip(*(series[name].samples for name in names), strict=True))


def density_rows(series: dict[str, Series]) -> list[dict[str, float]]:
    """The figures of each density."""
    found = []
    for density in DENSITIES:
        planned, pages, scan = (label(density, s) for s in (PLANNED, PAGES, SCAN))
        seconds = paired(series, lambda a: a.seconds / a.extra["requests"], planned)
        found.append(
            {
                "density": density,
                "rows": paired(series, lambda a: a.extra["rows"] / a.extra["requests"], planned),
                "reads": paired(series, lambda a: a.extra["reads"] / a.extra["requests"], planned),
                "seconds": seconds,
                "rows_per_second": paired(series, lambda a: a.extra["rows"] / a.seconds, planned),
                "over_fio": paired(series, lambda a, b: a.rate / b.rate, planned, LIMIT),
                "over_better": paired(
                    series, lambda a, b, c: a.seconds / min(b.seconds, c.seconds), planned, pages, scan
                ),
                "over_pages": paired(series, lambda a, b: a.seconds / b.seconds, planned, pages),
                "over_scan": paired(series, lambda a, b: a.seconds / b.seconds, planned, scan),
                "forecast_error": paired(
                    series, lambda a: a.extra["forecast_seconds"] / a.seconds - 1, planned
                ),
            }
        )
    return found


def fill(report: Report, series: dict[str, Series], dense: Dense) -> None:
    """Claims and tables out of the series."""
    rows = density_rows(series)
    half = next(r for r in rows if r["density"] == HALF)
    worst = max(rows, key=lambda r: r["over_better"])
    errors = [abs(r["forecast_error"]) for r in rows]
    report.claims = [
        Claim(
            "half of all pages: bytes read a second over fio's sequential bandwidth", half["over_fio"], 0.85
        ),
        Claim(
            f"worst density ({worst['density']:.1%}): time over the better of page by page and scan",
            worst["over_better"],
            1.1,
            "<=",
        ),
        Claim("forecast against measured: median error over the densities", median(errors), 0.20, "<="),
        Claim("forecast against measured: largest error", max(errors)),
    ]
    report.table(
        "By density (times of planned over those of the others)",
        [
            "pages touched",
            "rows",
            "reads",
            "ms",
            "rows/s",
            "bytes/s over fio",
            "over page by page",
            "over scan",
            "over the better",
            "forecast error",
        ],
        [
            [
                f"{r['density']:.1%}",
                int(r["rows"]),
                int(r["reads"]),
                r["seconds"] * 1e3,
                r["rows_per_second"],
                r["over_fio"],
                r["over_pages"],
                r["over_scan"],
                r["over_better"],
                f"{r['forecast_error']:+.0%}",
            ]
            for r in rows
        ],
    )
    model, calibration = dense.calibration.model, dense.calibration
    report.notes = [
        f"Calibrated in this run: {model.read_seconds * 1e6:.2f} µs a read, "
        f"{1 / model.byte_seconds / 1e9:.2f} GB/s, {model.request_seconds * 1e6:.0f} µs a request; "
        f"gaps of up to {model.gap_pages_max} pages are read through (largest error of the line over "
        f"the sizes of reads: {calibration.error:.0%}).",
        "Bytes are those read from the device, rows those asked for, one on each page touched.",
    ]
    report.series = list(series.values())


@click.command()
@shared_options(size="2GiB", quick_size="256MiB", rounds=5)
@click.option("--engine", default="uring", show_default=True, type=click.Choice(["uring", "threads"]))
def main(settings: Settings, engine: str) -> None:
    """Gathers from 0.1 % to 100 % of all pages, against fio's bandwidth and against both extremes; and the
    planner's forecast."""
    tables = Tables.of_size(settings.workspace, settings.size_bytes)
    touch_memory(min(free_memory_bytes() // 2, 2 * settings.size_bytes))
    report = Report("dense", "Dense gather and forecast", {
        "table_bytes": tables.rows * ROW_BYTES, "row_bytes": ROW_BYTES, "engine": engine,
        "rounds": settings.rounds, "checksums": "on", "densities": list(DENSITIES),
    }, settings.workspace)  # fmt: skip
    dense = Dense(tables, engine, settings)
    try:
        contenders = [dense.limit()]
        contenders += [
            dense.contender(density, strategy) for density in DENSITIES for strategy in (PLANNED, PAGES, SCAN)
        ]
        series = measure_rounds(contenders, settings.rounds)
    finally:
        dense.close()
    fill(report, series, dense)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
