"""Demo report: every way to train in one table, and what it is held against, for programs (``to_json``) and
for people (``render``).

The run from memory is what others are held against. Which of its mini-batches a way has decides what must be
the same (:func:`held_against`): np.memmap, online and rolling have all of them, and must end with the same
weights; compiled has those of epoch 0, again and again; partitions draws its own. The rows of every
mini-batch must be those of the source in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from featstore.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

__all__ = [
    "COLUMNS", "MEANINGS", "TOLERANCE", "WAYS", "DemoReport", "Way", "cells", "facts", "heading",
    "held_against", "notes", "render", "verdict",
]  # fmt: skip

SCHEMA = "featstore.demo/2"
#: All ways to train, as the table has them.
WAYS = ("memory", "np.memmap", "online", "compiled", "rolling", "partitions")
#: By how much test accuracy may fall short where mini-batches differ. On the made-up graph seed 0 gave 0.9
#: points less in mode partitions and 0.3 in mode compiled; rows of wrong nodes would cost tens of points.
TOLERANCE = 0.05
#: Of the table; what they mean; how many letters a bar has.
COLUMNS = (
    "ready", "epoch 0", "an epoch", "waiting", "x memory", "read", "peak", "same losses", "accuracy",
)  # fmt: skip
MEANINGS = {
    "ready": "before epoch 0",
    "an epoch": "the median of those after epoch 0, which ways train in turn",
    "waiting": "of it, without a mini-batch to train on; from memory that is sampling and copying",
    "read": "from disk, in all",
    "peak": "memory beyond what the process held before the first row, the training itself included",
    "same losses": "to the bit as from memory, where mini-batches are the same; compiled repeats those of "
    "epoch 0, partitions draws others",
    "accuracy": "on test nodes; =: the same weights",
    "~": "extrapolated",
}
_BAR = 50


@dataclass(frozen=True)
class Way:
    """One way to train, measured in a process of its own.

    Attributes:
        losses: float.hex of each step's loss.
        digests, row_counts: of each mini-batch's rows, and how many.
        epoch_steps, epoch_seconds: one number an epoch.
        wait_seconds: of each epoch, for which the loop had no mini-batch to train on: sampling, reading and
            copying that nothing else went on beside.
        prepare_seconds: before the first epoch: rows brought into memory, or the loader opened.
        read_bytes: from disk, from there to the last step, by the kernel's account; None where it has none.
        baseline_rss_bytes: what the process held before the first row; ``peak_rss_bytes``: the most it ever
            held until the last step.
        weights: digest of the model's parameters at the end.
        test_accuracy: None where it was not measured.
        extrapolated: it was ended before its last epoch; its last ``epoch_seconds`` is what a whole one would
            take.
        bounded: of np.memmap: a memory cgroup held its page cache within the memory.
        note: what else is to be known.
        report: what the store's loader reports.
        steps_compared: so many losses, from the first on, must be those of the run from memory.
        first_difference: the first step of these where one is not, in any bit, or None.
        rows_identical: the rows of every mini-batch are the source's.
        weights_identical: the weights at the end are those of the run from memory; None where they need not
            be.
    """

    way: str
    losses: Sequence[str]
    digests: Sequence[str]
    row_counts: Sequence[int]
    epoch_steps: Sequence[int]
    epoch_seconds: Sequence[float]
    wait_seconds: Sequence[float]
    prepare_seconds: float
    read_bytes: int | None
    baseline_rss_bytes: int
    peak_rss_bytes: int
    weights: str
    steps_compared: int
    first_difference: int | None
    rows_identical: bool
    weights_identical: bool | None
    test_accuracy: float | None = None
    extrapolated: bool = False
    bounded: bool | None = None
    note: str = ""
    report: dict[str, Any] | None = None

    @property
    def later_epoch_seconds(self) -> float | None:
        """The median of the epochs after the first; None where there was no other."""
        return median(self.epoch_seconds[1:]) if len(self.epoch_seconds) > 1 else None

    @property
    def usual_epoch_seconds(self) -> float:
        """The median of the epochs after the first, or the first where there was no other."""
        return median(self.epoch_seconds[1:] or self.epoch_seconds)

    @property
    def usual_wait_seconds(self) -> float:
        """The median of the waiting of these epochs."""
        return median(self.wait_seconds[1:] or self.wait_seconds)

    @property
    def beyond_bytes(self) -> int:
        """Peak memory beyond what the process held before the first row."""
        return self.peak_rss_bytes - self.baseline_rss_bytes


def held_against(
    memory: dict[str, Any], results: dict[str, Any], way: str, drawn: Sequence[str] | None
) -> Way:
    """What a worker measured, with what comes of comparing it with the run from memory. ``drawn``: of mode
    partitions, the digests of the source's rows of its mini-batches."""
    losses, steps = results["losses"], memory["epoch_steps"][0]
    if way == "partitions":
        assert drawn is not None
        expected, compared = list(drawn), 0
    elif way == "compiled":
        expected, compared = memory["digests"][:steps] * len(memory["epoch_steps"]), steps
    else:
        expected = memory["digests"][: len(losses) if results.get("extrapolated") else None]
        compared = len(expected)
    pairs = zip(losses[:compared], memory["losses"][:compared])
    first = next((step for step, (one, other) in enumerate(pairs) if one != other), None)
    if first is None and len(losses) < compared:
        first = len(losses)
    all_of_it = compared == len(memory["losses"]) and way != "compiled"
    return Way(
        way=way,
        steps_compared=compared,
        first_difference=first,
        rows_identical=results["digests"] == expected,
        weights_identical=results["weights"] == memory["weights"] if all_of_it else None,
        **results,
    )


@dataclass(frozen=True)
class DemoReport:
    """What ``featstore demo`` found. Sizes in bytes, times in seconds; ``test_count`` of ``test_total`` nodes
    were tested. ``ways``: the run from memory first."""

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
    test_count: int
    test_total: int
    seconds: float
    ways: tuple[Way, ...]

    def wrong(self, way: Way) -> str:
        """What is wrong with a way, in words; empty where all is as it should be."""
        if way.first_difference is not None:
            return f"other losses than from memory, from step {way.first_difference} on, a bug"
        if not way.rows_identical:
            return "rows that are not those of the source, a bug"
        if way.weights_identical is False:
            return "other weights at the end than from memory, a bug"
        best = self.ways[0].test_accuracy
        if way.test_accuracy is not None and best is not None and best - way.test_accuracy > TOLERANCE:
            points = f"{100 * (best - way.test_accuracy):.1f} points below that of memory"
            return f"test accuracy {points}, more than {100 * TOLERANCE:.0f}: too few epochs, or a bug"
        return ""

    def times_memory(self, way: Way) -> float:
        """How many times as long as from memory an epoch takes."""
        return way.usual_epoch_seconds / self.ways[0].usual_epoch_seconds

    def read_bytes(self, way: Way) -> int | None:
        """What a way reads from disk in all, extrapolated where it was ended early; None if not known."""
        if way.read_bytes is None or not way.extrapolated:
            return way.read_bytes
        return round(way.read_bytes / len(way.losses) * len(self.ways[0].losses))

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with any way."""
        return not any(self.wrong(way) for way in self.ways)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types (give it to ``json.dumps``), with ``schema`` and what is derived."""
        ways = {
            way.way: asdict(way)
            | {
                "later_epoch_seconds": way.later_epoch_seconds,
                "usual_epoch_seconds": way.usual_epoch_seconds,
                "usual_wait_seconds": way.usual_wait_seconds,
                "times_memory": self.times_memory(way),
                "beyond_bytes": way.beyond_bytes,
                "wrong": self.wrong(way),
            }
            for way in self.ways
        }
        return {"schema": SCHEMA, "good": self.good, "tolerance": TOLERANCE} | asdict(self) | {"ways": ways}


def render(report: DemoReport) -> Group:
    """The report as a rich renderable: what was done, all ways in a table, a picture, and the verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    done = Table.grid(padding=(0, 2))
    for fact in facts(report):
        done.add_row(*fact)
    table = Table(
        title=heading(report),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for way in report.ways:
        table.add_row(way.way, *cells(report, way))
    text, good = verdict(report)
    style = "bold green" if good else "bold red"
    meanings = " ".join(f"{name}: {meaning}." for name, meaning in MEANINGS.items())
    told = [Text(note) for note in (*notes(report), meanings)]
    picture = [Text(line, no_wrap=True) for line in _picture(report)]
    return Group(done, Text(), table, Text(), *picture, Text(), *told, Text(), Text(text, style=style))


def heading(report: DemoReport) -> str:
    """What was trained."""
    memory = format_bytes(report.memory_bytes)
    return f"{report.graph}: GraphSAGE, {report.epochs} epochs, memory {memory}"


def notes(report: DemoReport) -> list[str]:
    """What is to be known of some ways."""
    return [f"{way.way}: {way.note}" for way in report.ways if way.note]


def verdict(report: DemoReport) -> tuple[str, bool]:
    """Whether all is as it should be, in words, and as such."""
    wrong = [f"{way.way.upper()}: {why}" for way in report.ways if (why := report.wrong(way))]
    if wrong:
        return "; ".join(wrong) + ". Please report what is a bug.", False
    rows = sum(sum(way.row_counts) for way in report.ways)
    return f"All {rows:,} rows are the source's, and all losses of the same mini-batches the same bits.", True


def _picture(report: DemoReport) -> list[str]:
    """An epoch of each way as a bar of text; one of more than twice the second longest is cut."""
    seconds = sorted(way.usual_epoch_seconds for way in report.ways)
    unit = min(seconds[-1], 2 * seconds[-2] if len(seconds) > 1 else seconds[-1]) / _BAR
    lines = ["an epoch: █ training, ░ waiting"]
    for way in report.ways:
        whole, waiting = way.usual_epoch_seconds / unit, way.usual_wait_seconds / unit
        busy = min(_BAR, round(whole - waiting))
        bar = "█" * busy + "░" * (min(_BAR, round(whole)) - busy)
        bar = f"{bar[:-4]}//{bar[-2:]}" if whole > _BAR + 0.5 else bar
        lines.append(f"{way.way:<10} {bar} {'~' if way.extrapolated else ''}{way.usual_epoch_seconds:.2f} s")
    return lines


def facts(report: DemoReport) -> list[tuple[str, str]]:
    """What was done, as (name, value)."""
    lines = [
        ("graph", f"{report.node_count:,} nodes, {report.edge_count:,} edges, {report.class_count} classes"),
        ("feature table", f"{format_bytes(report.table_bytes)}, {report.row_bytes:,} B a row (float32)"),
    ]
    if report.generate_seconds:
        lines.append(("generated in", f"{report.generate_seconds:.1f} s"))
    lines += [
        ("packed in", f"{report.pack_seconds:.1f} s into {format_bytes(report.store_bytes)}"),
        ("mini-batches", f"{report.batch_size} seeds, fan-outs {'/'.join(map(str, report.fanouts))}"),
    ]
    if report.test_count < report.test_total:
        lines.append(("accuracy on", f"{report.test_count:,} of {report.test_total:,} test nodes"))
    if report.store_path is not None:
        lines.append(("store kept at", report.store_path))
    return lines


def cells(report: DemoReport, way: Way) -> list[str]:
    """The row of a way in the table, below :data:`COLUMNS`."""
    read, about = report.read_bytes(way), "~" if way.extrapolated else ""
    if way.test_accuracy is not None:
        accuracy = f"{way.test_accuracy:.1%}"
    else:
        accuracy = "-" if not way.weights_identical else f"= {report.ways[0].test_accuracy:.1%}"
    return [
        f"{way.prepare_seconds:.2f} s",
        f"{'' if len(way.epoch_seconds) > 1 else about}{way.epoch_seconds[0]:.2f} s",
        f"{about}{way.usual_epoch_seconds:.2f} s",
        f"{about}{way.usual_wait_seconds:.2f} s",
        f"{about}{report.times_memory(way):.2f}",
        "-" if read is None else f"{about}{_short(read)}",
        _short(way.beyond_bytes),
        _losses(report, way),
        accuracy,
    ]


def _short(number: int) -> str:
    """Bytes, without decimals where there are three digits before them."""
    value, unit = format_bytes(number).split()
    return f"{float(value):.0f} {unit}" if float(value) >= 100 else f"{value} {unit}"


def _losses(report: DemoReport, way: Way) -> str:
    if way is report.ways[0]:
        return "-"
    if way.first_difference is not None:
        return f"NOT {way.first_difference:,}"
    if not way.steps_compared:
        return "others"
    whole = way.steps_compared == len(report.ways[0].losses)
    return f"{'all' if whole else 'first'} {way.steps_compared:,}"
