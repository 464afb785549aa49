"""What each way to train would cost, as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from featstore.base.sheets import Grid, Sheet
from featstore.units import format_bytes

_HEAD = ["mode", "prepare", "an epoch", "reads", "writes", "disk", "needs memory", "hits", ""]


@dataclass(frozen=True)
class ModeCost:
    """What one mode would cost. An epoch here is one in which buffers are warm.

    Attributes:
        mode: its name.
        possible: whether it can be had; else ``reason`` says why not, and what it would need.
        reason: why it cannot be had, or what a forecast leaves out; may be empty.
        changes: how what is learned differs from fresh mini-batches; empty where it does not.
        prepare_seconds: once, before the first mini-batch.
        epoch_seconds: of an epoch: the longest of what works beside each other, or what all of it asks of the
            cores and of the device, whichever is more.
        seconds: of an epoch by stage: ``read`` (the device alone), ``sample``, ``assemble`` (copying rows and
            handing over), ``bring back`` (rows that an epoch begins with, read before its first mini-batch),
            ``prepare`` (rolling: of the next epoch, beside this one), ``train``, where known.
        cpu_seconds: of the cores, in an epoch.
        bytes_read, reads: from disk, in an epoch, what is prepared beside it included.
        bytes_written: in an epoch.
        prepare_bytes_read, prepare_bytes_written: once.
        disk_bytes: taken beside the store's tables, at most.
        memory_needed_bytes: the smallest ``memory=`` that works; None where it is not known.
        hit_rate: of the rows asked for, the share expected in memory; None where that is no question.
        extrapolated: from the mini-batches that were looked at, or from a model of them. Else bytes are what
            will be read.
    """

    mode: str
    possible: bool
    reason: str = ""
    changes: str = ""
    prepare_seconds: float = 0.0
    epoch_seconds: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    bytes_read: int = 0
    reads: int = 0
    bytes_written: int = 0
    prepare_bytes_read: int = 0
    prepare_bytes_written: int = 0
    disk_bytes: int = 0
    memory_needed_bytes: int | None = None
    hit_rate: float | None = None
    extrapolated: bool = True

    def total_seconds(self, epochs: int) -> float:
        """Of so many epochs, and of preparing for them."""
        return self.prepare_seconds + epochs * self.epoch_seconds


@dataclass(frozen=True)
class LoaderCosts:
    """What each mode would cost, and which one ``mode="auto"`` takes; ``print(costs)`` shows a table.

    Attributes:
        mode, because: what ``mode="auto"`` takes, and why.
        modes: by name, see :class:`ModeCost`.
        memory_bytes, disk_bytes: the budgets; ``disk_bytes`` None: none was given.
        epochs: over which preparing is spread.
        epoch_batches: mini-batches of an epoch; ``looked_at`` of them were sampled for this, in
            ``looked_seconds``.
        repeats: mini-batches are the same in every epoch.
        calibrated: the device's prices were measured (``featstore calibrate``), not assumed.
        train_seconds: of a training step; None where nobody said.
    """

    mode: str
    because: str
    modes: Mapping[str, ModeCost]
    memory_bytes: int
    disk_bytes: int | None
    epochs: int
    epoch_batches: int
    looked_at: int
    looked_seconds: float
    repeats: bool
    calibrated: bool
    train_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """For notebooks; :meth:`__str__` where styles are dropped."""
        grid = Grid(_HEAD, [_cells(one) for one in self.modes.values()])
        disk = "no disk=" if self.disk_bytes is None else format_bytes(self.disk_bytes)
        facts = {
            "mode='auto' takes": f"{self.mode}, because {self.because}",
            "memory": format_bytes(self.memory_bytes),
            "disk": disk,
            "looked at": f"{self.looked_at:,} of an epoch's {self.epoch_batches:,} mini-batches",
            "device model": "calibrated" if self.calibrated else "not calibrated: run `featstore calibrate`",
        }
        return Sheet("What each mode would cost", facts, [grid]).html(str(self))

    def __str__(self) -> str:
        lines = [_HEAD, *(_cells(one) for one in self.modes.values())]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
        model = "calibrated" if self.calibrated else "not calibrated: run `featstore calibrate`"
        disk = "no disk=" if self.disk_bytes is None else f"disk {format_bytes(self.disk_bytes)}"
        return "\n".join(
            [
                f"memory {format_bytes(self.memory_bytes)}, {disk}; {self.looked_at:,} of an epoch's "
                f"{self.epoch_batches:,} mini-batches looked at, in {self.looked_seconds:.1f} s",
                *(line.rstrip() for line in text),
                f"~ extrapolated from the mini-batches looked at; device model {model}",
                f"auto: {self.mode}, because {self.because}",
            ]
        )


def _cells(one: ModeCost) -> list[str]:
    """A line of the table."""
    needed = "?" if one.memory_needed_bytes is None else format_bytes(one.memory_needed_bytes)
    if not one.possible:
        return [one.mode, "-", "-", "-", "-", "-", needed, "-", f"not to be had: {one.reason}"]
    about = "~" if one.extrapolated else ""
    hits = "-" if one.hit_rate is None else f"{about}{one.hit_rate:.0%}"
    remarks = "; ".join(filter(None, (one.changes, one.reason)))
    return [
        one.mode, seconds_text(one.prepare_seconds, about), seconds_text(one.epoch_seconds, about),
        *(about + format_bytes(n) if n else "-" for n in (one.bytes_read, one.bytes_written, one.disk_bytes)),
        needed, hits, remarks,
    ]  # fmt: skip


def seconds_text(seconds: float, about: str = "") -> str:
    """Seconds with three digits; ``-`` for none."""
    if seconds == 0:
        return "-"
    return about + (f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s")
