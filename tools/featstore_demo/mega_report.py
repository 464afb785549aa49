"""Demo report of mega-batches: what was measured, beside training from memory, and whether the accuracies
agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from featstore.units import format_bytes
from featstore_demo.report import Facts, Run, fact_lines, side_by_side

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["TOLERANCE", "MegaReport", "MegaRunReport", "render_mega"]

SCHEMA = "featstore.demo-mega/1"
#: By how much test accuracy may fall short. On the made-up graph, of which no order keeps most neighbours
#: together, four seeds gave 0 to 3 points less with the default budget, up to 4.5 with two thirds of it, and
#: seeds alone make runs in memory differ by 2.5; rows of wrong nodes would cost tens of points (a model
#: without neighbours is 60 points below).
TOLERANCE = 0.05


@dataclass(frozen=True)
class MegaRunReport(Run):
    """The run by mega-batches. Times in seconds; ``rows``: rows of training mini-batches.

    One number an epoch: ``load_seconds``, of loading beside the training, and ``build_seconds``, of it making
    the subgraph; ``draw_seconds``, of sampling mini-batches and gathering their rows, beside it as well;
    ``wait_seconds``, that the training waited for all that; ``read_bytes``; ``kept_shares``, of all
    neighbours of nodes in memory those that were in memory, too. ``io``: what the reader counted, and the
    loader's sizes.
    """

    load_seconds: tuple[float, ...]
    build_seconds: tuple[float, ...]
    draw_seconds: tuple[float, ...]
    read_bytes: tuple[int, ...]
    kept_shares: tuple[float, ...]

    @property
    def train_seconds(self) -> tuple[float, ...]:
        """Of each epoch, the time that is no waiting."""
        parts = zip(self.epoch_seconds, self.wait_seconds, strict=True)
        return tuple(whole - wait for whole, wait in parts)


@dataclass(frozen=True)
class MegaReport(Facts):
    """What ``featstore demo --mode mega`` found. Sizes in bytes, times in seconds. ``edge_cut``: the share of
    edges between partitions, where the order of the rows tells it."""

    order: str
    edge_cut: float | None
    mega: MegaRunReport

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


def render_mega(report: MegaReport) -> Group:
    """The report as a rich renderable: what was done, the two runs side by side, and the verdict."""
    points, most = 100 * report.shortfall, f"{100 * TOLERANCE:.0f} points"
    apart = f"{abs(points):.1f} points {'below' if points >= 0 else 'above'} training in memory"
    close = f"Test accuracy is {apart}: within {most}, as it should be."
    return side_by_side(
        report,
        facts=fact_lines(report, report.mega.io, ("mega-batches", _mega_batches(report))),
        trained=f"{report.epochs} epochs",
        headers=(f"mega-batches, memory {format_bytes(report.memory_bytes)}", "neighbour sampling in memory"),
        lines=_run_lines(report),
        good=report.agrees,
        verdict=close if report.agrees else f"TEST ACCURACY IS {apart.upper()}, more than {most}.",
        note=(
            "Losses are not compared: the two runs draw other mini-batches, and a mega-batch lacks "
            "neighbours that are in none of its partitions. Both models are tested on the same nodes with "
            "neighbours from the whole graph."
        ),
    )


def _mega_batches(report: MegaReport) -> str:
    io = report.mega.io
    cut = "" if report.edge_cut is None else f", {report.edge_cut:.0%} of the edges cross"
    resident = (
        f"{io['resident']} of {io['partitions']} partitions ({report.order}{cut}) and {io['hubs']:,} hubs"
    )
    return f"{io['mega_batches']} an epoch, each of {resident}"


def _run_lines(report: MegaReport) -> list[tuple[str, str, str]]:
    mega, memory = report.mega, report.memory

    def both(name: str, show: Callable[[Run], str]) -> tuple[str, str, str]:
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
        ("  waiting for mini-batches", seconds(mega.wait_seconds), "-"),
        ("  training", seconds(mega.train_seconds), "-"),
        ("beside it, drawing mini-batches", seconds(mega.draw_seconds), "-"),
        ("beside it, loading mega-batches", seconds(mega.load_seconds), "-"),
        ("  of it, building subgraphs", seconds(mega.build_seconds), "-"),
        both("peak memory of the training", lambda run: format_bytes(run.peak_rss_bytes)),
        both("of it before it began", lambda run: format_bytes(run.baseline_rss_bytes)),
        both("held on top of that", lambda run: format_bytes(run.peak_rss_bytes - run.baseline_rss_bytes)),
    ]
