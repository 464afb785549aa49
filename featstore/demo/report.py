"""Demo report: what the two runs measured, side by side, for programs (``to_json``) and for people (``render``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from featstore.units import format_bytes

__all__ = ["DemoReport", "RunReport", "render"]

SCHEMA = "featstore.demo/1"


@dataclass(frozen=True)
class RunReport:
    """One training run. Times in seconds; ``losses``: float.hex of each step's loss; ``rows``: rows delivered in all.

    ``digests``: of each request's rows, training first, then evaluation. ``io``: what the reader counted (empty in
    the run from memory). ``load_seconds``: reading the whole table into memory.
    """

    losses: tuple[str, ...]
    digests: tuple[str, ...]
    epoch_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    evaluation_seconds: float
    seconds: float
    rows: int
    val_accuracy: float
    test_accuracy: float
    baseline_rss_bytes: int
    peak_rss_bytes: int
    load_seconds: float
    io: dict[str, Any]


@dataclass(frozen=True)
class DemoReport:
    """What ``featstore demo`` found. Sizes in bytes, times in seconds."""

    graph: str
    node_count: int
    edge_count: int
    class_count: int
    row_bytes: int
    table_bytes: int
    memory_bytes: int
    epochs: int
    batch_size: int
    fanouts: tuple[int, ...]
    hidden: int
    seed: int
    generate_seconds: float
    pack_seconds: float
    store_bytes: int
    store_path: str | None
    store: RunReport
    memory: RunReport
    mlp_test_accuracy: float
    val_count: int
    val_total: int
    test_count: int
    test_total: int
    seconds: float

    @property
    def steps(self) -> int:
        """Training steps of each run."""
        return len(self.memory.losses)

    @property
    def first_difference(self) -> int | None:
        """The first step whose losses differ in any bit, or None."""
        return _first_difference(self.store.losses, self.memory.losses)

    @property
    def losses_identical(self) -> bool:
        """Whether every loss is the same float64 in both runs."""
        return self.first_difference is None

    @property
    def rows_identical(self) -> bool:
        """Whether all rows of all requests were the same bytes in both runs."""
        return _first_difference(self.store.digests, self.memory.digests) is None

    @property
    def identical(self) -> bool:
        """Whether the two runs cannot be told apart: rows, losses and accuracies."""
        same_val = self.store.val_accuracy == self.memory.val_accuracy
        same_test = self.store.test_accuracy == self.memory.test_accuracy
        return self.rows_identical and self.losses_identical and same_val and same_test

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types (give it to ``json.dumps``), with ``schema`` and what is derived."""
        derived = {
            "schema": SCHEMA,
            "steps": self.steps,
            "losses_identical": self.losses_identical,
            "first_difference": self.first_difference,
            "rows_identical": self.rows_identical,
            "identical": self.identical,
        }
        return derived | asdict(self)


def render(report: DemoReport) -> Any:
    """The report as a rich renderable: what was done, the two runs side by side, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    runs = Table(title=f"{report.graph}: GraphSAGE, {report.steps} steps", title_justify="left")
    runs.add_column("")
    runs.add_column(f"from the store, memory {format_bytes(report.memory_bytes)}", justify="right")
    runs.add_column("all rows in memory", justify="right")
    for line in _side_by_side(report):
        runs.add_row(*line)
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(report):
        facts.add_row(name, value)
    verdict = (
        Text(f"All {report.steps} losses and all {report.memory.rows:,} rows are bit-identical.", style="bold green")
        if report.identical
        else Text(f"THE RUNS DIFFER{_where(report)}: please report this as a bug.", style="bold red")
    )
    return Group(facts, Text(), runs, Text(), verdict)


def _where(report: DemoReport) -> str:
    step = report.first_difference
    if step is not None:
        return f" from step {step} on"
    return " in their accuracies" if report.rows_identical else " in the rows delivered"


def _first_difference(left: tuple[str, ...], right: tuple[str, ...]) -> int | None:
    """Position of the first difference, the end of the shorter one included; None if both are the same."""
    differing = (place for place, pair in enumerate(zip(left, right)) if pair[0] != pair[1])
    return next(differing, None if len(left) == len(right) else min(len(left), len(right)))


def _facts(report: DemoReport) -> list[tuple[str, str]]:
    io = report.store.io
    facts = [
        ("graph", f"{report.node_count:,} nodes, {report.edge_count:,} edges, {report.class_count} classes"),
        ("feature table", f"{format_bytes(report.table_bytes)}, {report.row_bytes:,} B a row (float32)"),
        ("packed in", f"{report.pack_seconds:.1f} s into {format_bytes(report.store_bytes)}"),
        ("mini-batches", f"{report.batch_size} seeds, fan-outs {'/'.join(map(str, report.fanouts))}"),
        ("engine", _cache_state(io)),
        ("own row alone", f"a perceptron without neighbours: test accuracy {report.mlp_test_accuracy:.3f}"),
    ]
    if report.generate_seconds:
        facts.insert(2, ("generated in", f"{report.generate_seconds:.1f} s"))
    if (report.val_count, report.test_count) != (report.val_total, report.test_total):
        part = f"{report.val_count:,} of {report.val_total:,} and {report.test_count:,} of {report.test_total:,} nodes"
        facts.append(("accuracy on", f"{part} of the validation and test split, drawn at random"))
    if report.store_path is not None:
        facts.append(("store kept at", report.store_path))
    return facts


def _side_by_side(report: DemoReport) -> list[tuple[str, str, str]]:
    both = (report.store, report.memory)

    def line(name: str, show: Any) -> tuple[str, str, str]:
        return name, show(both[0]), show(both[1])

    lines = [
        line("validation accuracy", lambda run: f"{run.val_accuracy:.4f}"),
        line("test accuracy", lambda run: f"{run.test_accuracy:.4f}"),
        line("last loss", lambda run: f"{float.fromhex(run.losses[-1]):.6f}"),
        line("time per epoch (median)", lambda run: f"{median(run.epoch_seconds):.2f} s"),
        line("of it waiting for rows (median)", lambda run: f"{median(run.wait_seconds):.2f} s"),
        line("peak memory of the process", lambda run: format_bytes(run.peak_rss_bytes)),
        line("of it before the first row", lambda run: format_bytes(run.baseline_rss_bytes)),
        line("held on top of that", lambda run: format_bytes(run.peak_rss_bytes - run.baseline_rss_bytes)),
        line("rows delivered", lambda run: f"{run.rows:,}"),
    ]
    return lines + [(name, value, "-") for name, value in _io_lines(report)]


def _io_lines(report: DemoReport) -> list[tuple[str, str]]:
    """What the reader counted: hits per tier, bytes, rates."""
    io, run = report.store.io, report.store
    rows = max(1, io["rows_asked"])
    tiers = [(f"rows from the {tier} tier", f"{hits / rows:.1%}") for tier, hits in io["hits"].items()]
    return [
        *tiers,
        ("bytes asked", format_bytes(io["bytes_asked"])),
        ("bytes read", f"{format_bytes(io['bytes_read'])} in {io['reads']:,} reads"),
        ("read rate over the whole run", f"{io['bytes_read'] / run.seconds / 1e6:,.0f} MB/s"),
        ("rows a second over the whole run", f"{run.rows / run.seconds:,.0f}"),
    ]


def _cache_state(io: dict[str, Any]) -> str:
    """Which engine read, and whether the page cache could help it."""
    states = {
        "direct": "direct I/O: past the page cache, so each row that no tier holds is a cold read",
        "buffered": f"through the page cache, so reads may be warm ({io['access_because']})",
        "mapped": "memory-mapped: through the page cache, so reads may be warm",
    }
    return f"{io['engine']}, {states[io['access']]}"
