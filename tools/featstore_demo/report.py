"""Demo report: what the two runs measured, side by side, for programs (``to_json``) and for people
(``render``).

What the reports of both modes share is here: :class:`Run`, what any run measured; :class:`Facts`, the graph,
the settings and the packing; :func:`fact_lines` and :func:`side_by_side`, how they are shown.
:mod:`featstore_demo.mega_report` adds the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from featstore.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["DemoReport", "RunReport", "render"]

SCHEMA = "featstore.demo/1"


@dataclass(frozen=True)
class Run:
    """What any training run measured. Times in seconds; ``losses``: float.hex of each step's loss.

    ``epoch_seconds`` and ``wait_seconds``, of them spent waiting: one number an epoch. ``rows``: rows of all
    mini-batches. ``io``: what the reader counted (empty in the run from memory).
    """

    losses: tuple[str, ...]
    epoch_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    evaluation_seconds: float
    seconds: float
    rows: int
    val_accuracy: float
    test_accuracy: float
    baseline_rss_bytes: int
    peak_rss_bytes: int
    io: dict[str, Any]

    @classmethod
    def of(cls, results: dict[str, Any]) -> Self:
        """The run whose worker sent ``results``; JSON made lists of its tuples."""
        known: dict[str, Any] = {field.name: results[field.name] for field in fields(cls)}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known | lists)


@dataclass(frozen=True)
class RunReport(Run):
    """One training run with rows for each mini-batch: ``rows`` counts those delivered in all.

    ``digests``: of each request's rows, training first, then evaluation. ``load_seconds``: reading the whole
    table into memory.
    """

    digests: tuple[str, ...]
    load_seconds: float


@dataclass(frozen=True)
class Facts:
    """What reports of both modes tell: graph, sizes, settings, packing, and the run from memory that the
    other one is held against. Sizes in bytes, times in seconds; ``val_count`` of ``val_total`` nodes were
    evaluated."""

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
    memory: RunReport
    mlp_test_accuracy: float
    val_count: int
    val_total: int
    test_count: int
    test_total: int
    seconds: float


@dataclass(frozen=True)
class DemoReport(Facts):
    """What ``featstore demo`` found. Sizes in bytes, times in seconds."""

    store: RunReport

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


def render(report: DemoReport) -> Group:
    """The report as a rich renderable: what was done, the two runs side by side, and the verdict."""
    same = f"All {report.steps} losses and all {report.memory.rows:,} rows are bit-identical."
    return side_by_side(
        report,
        facts=fact_lines(report, report.store.io),
        trained=f"{report.steps} steps",
        headers=(f"from the store, memory {format_bytes(report.memory_bytes)}", "all rows in memory"),
        lines=_run_lines(report),
        good=report.identical,
        verdict=same
        if report.identical
        else f"THE RUNS DIFFER{_where(report)}: please report this as a bug.",
    )


def _where(report: DemoReport) -> str:
    step = report.first_difference
    if step is not None:
        return f" from step {step} on"
    return " in their accuracies" if report.rows_identical else " in the rows delivered"


def _first_difference(left: tuple[str, ...], right: tuple[str, ...]) -> int | None:
    """Position of the first difference, the end of the shorter one included; None if both are the same."""
    differing = (place for place, pair in enumerate(zip(left, right)) if pair[0] != pair[1])
    return next(differing, None if len(left) == len(right) else min(len(left), len(right)))


def fact_lines(facts: Facts, io: dict[str, Any], *loading: tuple[str, str]) -> list[tuple[str, str]]:
    """What was done, as (name, value). ``io``: what the reader counted; ``loading``: lines on what came
    before mini-batches."""
    lines = [
        ("graph", f"{facts.node_count:,} nodes, {facts.edge_count:,} edges, {facts.class_count} classes"),
        ("feature table", f"{format_bytes(facts.table_bytes)}, {facts.row_bytes:,} B a row (float32)"),
    ]
    if facts.generate_seconds:
        lines.append(("generated in", f"{facts.generate_seconds:.1f} s"))
    lines += [
        ("packed in", f"{facts.pack_seconds:.1f} s into {format_bytes(facts.store_bytes)}"),
        *loading,
        ("mini-batches", f"{facts.batch_size} seeds, fan-outs {'/'.join(map(str, facts.fanouts))}"),
        ("engine", _cache_state(io)),
        ("own row alone", f"a perceptron without neighbours: test accuracy {facts.mlp_test_accuracy:.3f}"),
    ]
    if (facts.val_count, facts.test_count) != (facts.val_total, facts.test_total):
        part = (
            f"{facts.val_count:,} of {facts.val_total:,} and {facts.test_count:,} of {facts.test_total:,} "
            "nodes"
        )
        lines.append(("accuracy on", f"{part} of the validation and test split, drawn at random"))
    if facts.store_path is not None:
        lines.append(("store kept at", facts.store_path))
    return lines


def side_by_side(
    report: Facts,
    *,
    facts: list[tuple[str, str]],
    trained: str,
    headers: tuple[str, str],
    lines: list[tuple[str, str, str]],
    good: bool,
    verdict: str,
    note: str | None = None,
) -> Group:
    """The facts, the two runs in columns under ``headers`` (``lines``: name, the one, the other), and the
    verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    done = Table.grid(padding=(0, 2))
    for fact in facts:
        done.add_row(*fact)
    runs = Table(title=f"{report.graph}: GraphSAGE, {trained}", title_justify="left")
    runs.add_column("")
    for header in headers:
        runs.add_column(header, justify="right")
    for line in lines:
        runs.add_row(*line)
    notes = [] if note is None else [Text(note)]
    return Group(
        done, Text(), runs, Text(), Text(verdict, style="bold green" if good else "bold red"), *notes
    )


def _run_lines(report: DemoReport) -> list[tuple[str, str, str]]:
    def line(name: str, show: Callable[[RunReport], str]) -> tuple[str, str, str]:
        return name, show(report.store), show(report.memory)

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
