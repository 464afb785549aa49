"""How those who wait are told how far something is: a line on standard error, or a function of theirs.

What works long takes ``progress=``: a function, which is told of every step, or True for
:class:`ProgressLine`, which loaders write as well.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TextIO, TypeVar

from featstore.units import format_bytes

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Told the stage, and how many of how many steps are done.
OnStep = Callable[[str, int, int], None]

_SECONDS = 0.5  # from one line to the next
_SECONDS_ELSEWHERE = 30.0  # where each is a line of its own: files, pipes


class ProgressLine:
    """A line that tells how far something is. On a terminal, and in a notebook, it is written over, some
    times a second; elsewhere there is a line every half minute, and one at the end. Safe from any thread."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._over = self._out.isatty() or "ipykernel" in sys.modules
        self._begin = self._told = time.perf_counter()
        self._width = 0
        self.stage = ""  # that was told last
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether it is time for the next line."""
        return time.perf_counter() - self._told >= (_SECONDS if self._over else _SECONDS_ELSEWHERE)

    def tell(self, text: str, end: bool = False) -> None:
        """Write it; at the ``end`` what comes next is on a line of its own."""
        with self._lock:
            self._told = time.perf_counter()
            if self._over:
                print("\r" + text.ljust(self._width), end="\n" if end else "", file=self._out, flush=True)
                self._width = 0 if end else len(text)
            else:
                print(text, file=self._out, flush=True)

    def step(self, *told: Any) -> None:
        """What a function for ``progress=`` is told: here on the line, when it is due or another stage
        begins."""
        stage, text = told_text(*told)
        if self.due() or (self._over and stage != self.stage):
            self.stage = stage
            self.tell(text)

    def end(self, what: str) -> None:
        """The last line: how long it took."""
        self.tell(f"{what} in {time.perf_counter() - self._begin:.1f} s", end=True)


def told_text(*told: Any) -> tuple[str, str]:
    """The stage, and how far it is, in words: of a stage with counts of steps, or of one object that counts
    bytes (``done_bytes`` of ``total_bytes``) or mini-batches."""
    if len(told) == 3:
        stage, done, total = told
        return stage, f"{stage}: {done:,} of {total:,}"
    (now,) = told
    if hasattr(now, "done_batches"):
        of = "" if now.total_batches is None else f" of {now.total_batches:,}"
        return "record", f"record: {now.done_batches:,}{of} mini-batches, {format_bytes(now.bytes)}"
    stage = f"{now.stage} {now.table}" if hasattr(now, "stage") else "check"
    if now.total_bytes is None:
        return stage, f"{stage}: {format_bytes(now.done_bytes)}" if now.done_bytes else stage
    return stage, f"{stage}: {format_bytes(now.done_bytes)} of {format_bytes(now.total_bytes)}"


def watched(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """``make``, whose ``progress=`` may also be True, for a :class:`ProgressLine`, or False, for none."""

    what = make.__name__.partition("_")[0]

    @functools.wraps(make)
    def told(*args: _P.args, **options: _P.kwargs) -> _R:
        progress = options.get("progress")
        if not isinstance(progress, bool):
            return make(*args, **options)
        line = ProgressLine() if progress else None
        options["progress"] = None if line is None else line.step
        try:
            made = make(*args, **options)
        except BaseException:
            if line is not None:
                line.end(f"{what}: stopped")
            raise
        if line is not None:
            line.end(f"{what}: done")
        return made

    return told
