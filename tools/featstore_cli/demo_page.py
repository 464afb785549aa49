"""``featstore demo --html``: what the demo found as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from featstore_demo.report import COLUMNS, MEANINGS, DemoReport, cells, facts, heading, notes, verdict

from featstore.base.sheets import Grid, Sheet, safe
from featstore.units import format_bytes
from featstore_cli.charts import panels
from featstore_cli.html_report import document


def page(report: DemoReport) -> str:
    """The report as HTML: whether all is well, a picture, the table, and what was done."""
    text, good = verdict(report)
    table = Grid(("", *COLUMNS), [[way.way, *cells(report, way)] for way in report.ways])
    told = "".join(f"<p>{safe(note)}</p>" for note in notes(report))
    body = (
        f"<p>{'' if good else '<strong>'}{safe(text)}{'' if good else '</strong>'}</p>"
        f"<section><h2>What an epoch takes, and what it needs</h2>{_picture(report)}</section>"
        f"<section><h2>Every way to train</h2>{table.html()}{told}{Sheet('', MEANINGS).html()}</section>"
        f"<section><h2>What was done</h2>{Sheet('', dict(facts(report))).html()}</section>"
    )
    return document("demo", heading(report), body)


def _picture(report: DemoReport) -> str:
    ways = report.ways
    seconds = [(w.usual_epoch_seconds - w.usual_wait_seconds, w.usual_wait_seconds) for w in ways]
    read: list[Sequence[float] | None] = []
    for way in ways:
        number = report.read_bytes(way)
        read.append(None if number is None else (number / report.epochs,))
    values: dict[str, Sequence[Sequence[float] | None]] = {
        "seconds an epoch": seconds,
        "peak memory": [(way.beyond_bytes,) for way in ways],
        "read from disk an epoch, mean of all": read,
    }
    words = ("{:.2f} s".format, format_bytes, format_bytes)
    names = [way.way for way in ways]
    return panels(names, values, words, ("training", "waiting"), "seconds, memory and bytes of each way")
