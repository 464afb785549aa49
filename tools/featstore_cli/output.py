"""How commands speak: JSON and tables on stdout, progress and remarks on stderr, progress only on a terminal.

rich draws both. Nothing that comes from a store or the user is read as markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from featstore_cli.options import settings

_WIDTH_PIPED = 4096  # what is read by programs is not wrapped

#: Told what is being done, and how much of how much is done.
Tell = Callable[[str, float, float | None], None]


def print_json(schema: str, data: dict[str, Any]) -> None:
    """One JSON object on stdout: ``schema`` first, such as "featstore.inspect/1"."""
    click.echo(json.dumps({"schema": schema} | data, indent=2, allow_nan=False, default=_plain))


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def remark(text: str) -> None:
    """A sentence for the person at the prompt, on stderr; not with ``-q``."""
    if not settings().quiet:
        click.echo(text, err=True)


def show(*renderables: Any) -> None:
    """Print rich renderables and strings on stdout; for programs as wide as need be, and without trailing
    blanks."""
    import io

    from rich.console import Console

    if sys.stdout.isatty():
        console = Console(markup=False, highlight=False, emoji=False)
    else:
        console = Console(
            markup=False,
            highlight=False,
            emoji=False,
            color_system=None,
            width=_WIDTH_PIPED,
            file=io.StringIO(),
        )
    for renderable in renderables:
        console.print(renderable, soft_wrap=isinstance(renderable, str))
    if isinstance(console.file, io.StringIO):
        click.echo("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()))


def facts(rows: Sequence[tuple[str, str]]) -> Any:
    """Names and values in two columns."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, left: int = 1
) -> Any:
    """A table whose first ``left`` columns are text and whose others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(columns):
        out.add_column(name, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


@contextmanager
def progress(what: str, *, unit: str = "bytes") -> Iterator[Tell]:
    """A progress bar on stderr, where that is a terminal and ``-q`` is not given. ``unit``: "bytes" or
    "steps"."""
    if settings().quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Counted:
        """A column that is empty while nothing is counted: "0/? bytes" says nothing."""

        def __init__(self, column: Any) -> None:
            self.column = column

        def __call__(self, task: Any) -> Any:
            return Text("") if task.total is None and not task.completed else self.column(task)

        def get_table_column(self) -> Any:
            return self.column.get_table_column()

    text = TextColumn("{task.description}", markup=False)
    amount = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(),)
    )
    counted: Any = [Counted(column) for column in (*amount, TimeRemainingColumn())]
    columns = (SpinnerColumn(), text, BarColumn(), *counted[:-1], TimeElapsedColumn(), counted[-1])
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        last: tuple[float, float | None] = (0, None)

        def tell(stage: str, done: float, total: float | None) -> None:
            nonlocal last
            # another count begins, with a clock and a speed of its own
            if done < last[0] or total != last[1]:
                bar.reset(task, completed=int(done), total=total)
            bar.update(task, description=stage, completed=done, total=total)
            last = done, total

        yield tell


def seconds_text(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def rate_text(bytes_per_second: float) -> str:
    """A rate in decimal units, as devices are sold."""
    return (
        f"{bytes_per_second / 1e9:.2f} GB/s"
        if bytes_per_second >= 1e9
        else f"{bytes_per_second / 1e6:.1f} MB/s"
    )
