"""Demo report of mega-batches: what was measured, beside training from memory, and whether the accuracies agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from featstore.demo.report import RunReport, _cache_state
from featstore.units import format_bytes

__all__ = ["TOLERANCE", "MegaReport", "MegaRunReport", "render_mega"]

SCHEMA = "featstore.demo-mega/1"
#: By how much test accuracy may fall short. On the made-up graph, of which no order keeps most neighbours together, four seeds
#: gave 0 to 3 points less with the default budget, up to 4.5 with two thirds of it, and seeds alone make runs in memory
#: differ by 2.5; rows of wrong nodes would cost tens of points (a model without neighbours is 60 points below).
TOLERANCE = 0.05


@dataclass(frozen=True)
class MegaRunReport:
    """The run by mega-batches. Times in seconds; ``losses``: float.hex of each step's loss.

    One number an epoch: ``epoch_seconds``; ``load_seconds``, of loading beside the training, and ``build_seconds``, of it making
    the subgraph; ``wait_seconds``, that the training waited for it; ``draw_seconds``, of sampling mini-batches and gathering
    their rows; ``read_bytes``; ``kept_shares``, of all neighbours of nodes in memory those that were in memory, too. ``rows``: rows of
    training mini-batches. ``io``: what the reader counted, and the loader's sizes.
    """

    losses: tuple[str, ...]
    epoch_seconds: tuple[float, ...]
    load_seconds: tuple[float, ...]
    build_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    draw_seconds: tuple[float, ...]
    read_bytes: tuple[int, ...]
    kept_shares: tuple[float, ...]
    evaluation_seconds: float
    seconds: float
    rows: int
    val_accuracy: float
    test_accuracy: float
    baseline_rss_bytes: int
    peak_rss_bytes: int
    io: dict[str, Any]

    @property
    def train_seconds(self) -> tuple[float, ...]:
        """Of each epoch, the time that is neither waiting nor drawing."""
        parts = zip(self.epoch_seconds, self.wait_seconds, self.draw_seconds, strict=True)
        return tuple(whole - wait - draw for whole, wait, draw in parts)


@dataclass(frozen=True)
class MegaReport:
    """What ``featstore demo --mode mega`` found. Sizes in bytes, times in seconds."""

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
    order: str
    edge_cut: float | None
    store_bytes: int
    store_path: str | None
    mega: MegaRunReport
    memory: RunReport
    mlp_test_accuracy: float
    val_count: int
    val_total: int
    test_count: int
    test_total: int
    seconds: float

    @property
    def shortfall(self) -> float:
        """By how much the test accuracy is below that of the run from memory; negative where it is above."""
        return self.memory.test_accuracy - self.mega.test_accuracy

    @property
    def agrees(self) -> bool:
        """Whether the test accuracy is at most ``TOLERANCE`` below that of the run from memory."""
        return self.shortfall <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types (give it to ``json.dumps``), with ``schema`` and what is derived."""
        derived: dict[str, Any] = {
            "schema": SCHEMA,
            "agrees": self.agrees,
            "shortfall": self.shortfall,
            "tolerance": TOLERANCE,
        }
        found = derived | asdict(self)
        found["mega"]["train_seconds"] = self.mega.train_seconds
        return found


def render_mega(report: MegaReport) -> Any:
    """The report as a rich renderable: what was done, the two runs side by side, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    runs = Table(title=f"{report.graph}: GraphSAGE, {report.epochs} epochs", title_justify="left")
    runs.add_column("")
    runs.add_column(f"mega-batches, memory {format_bytes(report.memory_bytes)}", justify="right")
    runs.add_column("neighbour sampling in memory", justify="right")
    for line in _side_by_side(report):
        runs.add_row(*line)
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(report):
        facts.add_row(name, value)
    points = 100 * report.shortfall
    apart = f"{abs(points):.1f} points {'below' if points >= 0 else 'above'} training in memory"
    verdict = (
        Text(f"Test accuracy is {apart}: within {100 * TOLERANCE:.0f} points, as it should be.", style="bold green")
        if report.agrees
        else Text(f"TEST ACCURACY IS {apart.upper()}, more than {100 * TOLERANCE:.0f} points.", style="bold red")
    )
    note = Text(
        "Losses are not compared: the two runs draw other mini-batches, and a mega-batch lacks neighbours that are in none of its "
        "partitions. Both models are tested on the same nodes with neighbours from the whole graph."
    )
    return Group(facts, Text(), runs, Text(), verdict, note)


def _facts(report: MegaReport) -> list[tuple[str, str]]:
    io = report.mega.io
    cut = "" if report.edge_cut is None else f", {report.edge_cut:.0%} of the edges cross"
    resident = f"{io['resident']} of {io['partitions']} partitions ({report.order}{cut}) and {io['hubs']:,} hubs"
    facts = [
        ("graph", f"{report.node_count:,} nodes, {report.edge_count:,} edges, {report.class_count} classes"),
        ("feature table", f"{format_bytes(report.table_bytes)}, {report.row_bytes:,} B a row (float32)"),
        ("packed in", f"{report.pack_seconds:.1f} s into {format_bytes(report.store_bytes)}"),
        ("mega-batches", f"{io['mega_batches']} an epoch, each of {resident}"),
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


def _side_by_side(report: MegaReport) -> list[tuple[str, str, str]]:
    mega, memory = report.mega, report.memory

    def both(name: str, show: Any) -> tuple[str, str, str]:
        return name, show(mega), show(memory)

    def seconds(values: tuple[float, ...]) -> str:
        return f"{median(values):.2f} s"

    read = median(mega.read_bytes)
    return [
        both("validation accuracy", lambda run: f"{run.val_accuracy:.4f}"),
        both("test accuracy", lambda run: f"{run.test_accuracy:.4f}"),
        both("training steps", lambda run: f"{len(run.losses):,}"),
        ("neighbours in memory", f"{median(mega.kept_shares):.1%}", "100.0%"),
        ("read an epoch", f"{format_bytes(read)}, {read / report.table_bytes:.2f} x the feature table", "-"),
        both("time per epoch (median)", lambda run: seconds(run.epoch_seconds)),
        ("  waiting for mega-batches", seconds(mega.wait_seconds), "-"),
        ("  drawing mini-batches", seconds(mega.draw_seconds), "-"),
        ("  training", seconds(mega.train_seconds), "-"),
        ("beside it, loading mega-batches", seconds(mega.load_seconds), "-"),
        ("  of it, building subgraphs", seconds(mega.build_seconds), "-"),
        both("peak memory of the training", lambda run: format_bytes(run.peak_rss_bytes)),
        both("of it before it began", lambda run: format_bytes(run.baseline_rss_bytes)),
        both("held on top of that", lambda run: format_bytes(run.peak_rss_bytes - run.baseline_rss_bytes)),
    ]
