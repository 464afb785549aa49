"""A line that tells how a loader is doing, while it runs: on standard error, a few times a second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, TypeVar

from featstore.base.modules import loaded
from featstore.base.progress import ProgressLine
from featstore.units import format_bytes

if TYPE_CHECKING:
    from featstore.loaders.report import LoaderReport

Coming = TypeVar("Coming")


class Watch:
    """Of one loader, on a :class:`~featstore.base.progress.ProgressLine`."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.line = ProgressLine(out)
        self._before: tuple[float, int, int] | None = None

    def begin(self, report: LoaderReport) -> None:
        """An epoch begins: rates are from here on."""
        self._before = (time.perf_counter(), report.batches, report.bytes_read)

    def due(self) -> bool:
        """Whether it is time for the next line; a report is only asked for then."""
        return self.line.due()

    def tell(
        self, report: LoaderReport, epoch: int, done: int, length: int | None, end: bool = False
    ) -> None:
        """``done`` of ``length`` mini-batches (None: nobody knows how many) of this epoch."""
        text = line(report, epoch, done, length, self._before, time.perf_counter())
        self.line.tell(text, end)


def line(
    report: LoaderReport, epoch: int, done: int, length: int | None,
    before: tuple[float, int, int] | None, now: float,
) -> str:  # fmt: skip
    """What is told: rates since ``before`` (time, mini-batches, bytes), shares of all that was counted."""
    begin, batches, read = before or (now, report.batches, report.bytes_read)
    seconds = max(now - begin, 1e-9)
    waited = report.seconds.get("wait", 0.0)
    stages = ", ".join(
        f"{name} {took:.1f} s"
        for name, took in sorted(report.seconds.items(), key=lambda one: -one[1])[:4]
        if took >= 0.05 and name != "wait"
    )
    parts = [
        f"epoch {epoch}: {done}{'' if length is None else f'/{length}'} mini-batches",
        f"{(report.batches - batches) / seconds:.1f}/s",
        f"{format_bytes(round((report.bytes_read - read) / seconds))}/s from disk",
        f"hits {report.hit_rate:.0%}",
        f"waited {waited:.1f} s",
        f"slowest: {report.slowest}" + (f" ({stages})" if stages else ""),
    ]
    return ", ".join(parts)


def spans(items: Iterable[Coming], name: str) -> Iterator[Coming]:
    """The items; what each takes to come is a span of this name in a trace of PyTorch's profiler, where the
    program has torch."""
    torch = loaded("torch", "profiler")
    record = None if torch is None else torch.profiler.record_function
    coming = iter(items)
    while True:
        if record is None:
            item = next(coming, _OVER)
        else:
            with record(name):
                item = next(coming, _OVER)
        if item is _OVER:
            return
        yield item  # type: ignore[misc]
        del item


_OVER = object()
