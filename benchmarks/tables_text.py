"""Results as text: for the terminal (rich) and for the documentation (Markdown). Both show the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Cells = tuple[list[str], list[list[str]]]


def number(value: Any) -> str:
    """A figure for people: two to four significant digits, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        if size < 0.1 and size > 0:
            return f"{value:.2g}"
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}"
    return str(value)


def claim_cells(result: dict[str, Any]) -> Cells:
    rows = []
    for claim in result["claims"]:
        bar = "" if claim["bar"] is None else f"{claim['direction']} {number(claim['bar'])}"
        met = {True: "met", False: "NOT MET", None: ""}[claim["met"]]
        unit = f" {claim['unit']}" if claim["unit"] else ""
        rows.append([claim["text"], number(claim["value"]) + unit, bar, met])
    return ["claim", "measured", "bar", ""], rows


def series_cells(result: dict[str, Any]) -> Cells:
    rows = [
        [
            s["name"],
            number(float(s["median"])),
            f"{number(float(s['min']))} to {number(float(s['max']))}",
            s["unit"],
            number(s["cpu_microseconds"]),
            s["cache"],
        ]
        for s in result["series"]
    ]
    return ["", "median", "range", "unit", "CPU µs each", "cache"], rows


def all_cells(result: dict[str, Any]) -> list[tuple[str, Cells]]:
    """Every table of a result, with its title."""
    found: list[tuple[str, Cells]] = []
    if result["claims"]:
        found.append(("Claims", claim_cells(result)))
    if result["series"]:
        found.append(("Measured", series_cells(result)))
    found += [
        (t["title"], (t["columns"], [[number(c) for c in row] for row in t["rows"]]))
        for t in result["tables"]
    ]
    return found


def print_result(result: dict[str, Any]) -> None:
    """All tables of a result, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    wide = Console(width=140) if not console.is_terminal else console
    for title, (columns, rows) in all_cells(result):
        table = Table(title=f"{result['benchmark']}: {title}", title_justify="left")
        for k, column in enumerate(columns):
            table.add_column(column, justify="left" if k == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        wide.print(table)
    for text in result["notes"]:
        wide.print(f"- {text}", markup=False, highlight=False)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(lines)
