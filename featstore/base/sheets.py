"""What objects show of themselves: a sheet of facts, tables and bars, as text and as HTML.

An object says what stands on its sheet, once; ``str(object)`` and a notebook (``_repr_html_``) draw it. The
HTML is for any page: no scripts, nothing that is fetched, every text escaped, colours from the text's own
(``currentColor``), so that it is as dark as its surroundings. Where a page drops styles (a notebook that is
not trusted, a viewer of another site), the text shows instead. The idea of such a fallback is xarray's.

Sheets are short: a table shows its first rows and says how many there are more, a long text loses its middle,
which three dots say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from featstore.units import format_bytes

#: Rows of a table, and characters of a cell and of a fact, on a sheet.
LINES_MAX, CELL_MAX, FACT_MAX = 20, 60, 300

STYLE = """
.fs{color:inherit;--fs-accent:#2a6db0;line-height:1.4}
@media (prefers-color-scheme:dark){.fs{--fs-accent:#7fb4ec}}
.fs h4{margin:.2em 0}.fs table{border-collapse:collapse;margin:.4em 0;color:inherit}
.fs caption{text-align:left;opacity:.75}
.fs th,.fs td{padding:.1em .7em .1em 0;text-align:right;background:none;border:0;color:inherit}
.fs th{font-weight:600;border-bottom:1px solid currentColor}
.fs .fs-l{text-align:left}.fs .fs-k{text-align:left;opacity:.75;font-weight:400;border:0}
.fs svg.fs-bar{width:12em;height:.7em;vertical-align:middle}
.fs-text{display:none}.fs-sheet{display:block!important}
"""


def shortened(text: Any, most: int = CELL_MAX) -> str:
    """A text of at most so many characters: a longer one loses its middle."""
    whole = str(text)
    if len(whole) <= most:
        return whole
    tail = (most - 1) // 2
    return f"{whole[: most - 1 - tail]}…{whole[len(whole) - tail :]}"


def safe(text: Any, most: int | None = None) -> str:
    """A text as it may stand in HTML, XML and their attributes."""
    whole = str(text) if most is None else shortened(text, most)
    # Control characters, and halves of pairs that names of files may hold, are no XML whatever is escaped.
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in whole))


def bar(share: float, label: str = "") -> str:
    """A bar of which ``share`` (0 to 1) is filled, as SVG."""
    share = min(1.0, max(0.0, share))
    return (
        f'<svg class="fs-bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(label or format(share, ".0%"))}">'
        '<rect width="100" height="6" fill="currentColor" opacity=".12"/>'
        f'<rect width="{100 * share:.2f}" height="6" style="fill:var(--fs-accent,currentColor)"/></svg>'
    )


@dataclass(frozen=True)
class Grid:
    """A table: ``columns`` are its heads, ``rows`` texts. The first ``left`` columns are words, the others
    numbers; a number of ``bars`` (a share, 0 to 1, of each row) is drawn behind it in HTML."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: int = 1
    bars: Sequence[float] = ()

    def _more(self, most: int) -> str:
        left = len(self.rows) - most
        return f"... and {left:,} more" if left > 0 else ""

    def lines(self, most: int = LINES_MAX) -> list[str]:
        """As lines of text."""
        cells = [[shortened(c) for c in row] for row in (self.columns, *self.rows[:most])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        drawn = [
            "  ".join(
                cell.ljust(width) if k < self.left else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return [*filter(None, (self.title, *drawn, self._more(most)))]

    def html(self, most: int = LINES_MAX) -> str:
        """As an HTML table."""

        def row(tag: str, cells: Sequence[str], drawn: str) -> str:
            parts = [
                f"<{tag}{' class=fs-l' if k < self.left else ''}>{safe(cell, CELL_MAX)}</{tag}>"
                for k, cell in enumerate(cells)
            ]
            return f"<tr>{''.join(parts)}{drawn}</tr>"

        caption = f"<caption>{safe(self.title)}</caption>" if self.title else ""
        shares = [f"<td>{bar(share)}</td>" for share in self.bars[:most]] or [""] * len(self.rows[:most])
        head = row("th", self.columns, "<th></th>" if self.bars else "") if any(self.columns) else ""
        body = [row("td", cells, drawn) for cells, drawn in zip(self.rows[:most], shares, strict=True)]
        more = f"<p>{self._more(most)}</p>" if self._more(most) else ""
        return f"<table>{caption}{head}{''.join(body)}</table>{more}"


def bars_of(
    title: str, values: Mapping[str, float], words: Callable[[float], str] = format_bytes,
    whole: float | None = None,
) -> Grid:  # fmt: skip
    """Numbers by name, each with its share of ``whole`` (by default of their sum)."""
    total = sum(values.values()) if whole is None else whole
    shares = [value / total if total else 0.0 for value in values.values()]
    rows = [
        [name, words(value), f"{share:.1%}"]
        for (name, value), share in zip(values.items(), shares, strict=True)
    ]
    return Grid(("", "", ""), rows, title, bars=shares)


@dataclass(frozen=True)
class Sheet:
    """A title, facts by name, and tables."""

    title: str
    facts: Mapping[str, str]
    grids: Sequence[Grid] = field(default=())

    def text(self) -> str:
        """As lines of text."""
        width = max(map(len, self.facts), default=0)
        lines = [shortened(self.title, FACT_MAX)]
        lines += [f"  {name.ljust(width)}  {shortened(text, FACT_MAX)}" for name, text in self.facts.items()]
        for grid in self.grids:
            lines += ["", *(f"  {line}" for line in grid.lines())]
        return "\n".join(lines)

    def html(self, text: str | None = None) -> str:
        """As a piece of HTML. ``text``: what shows where styles are dropped; its own by default."""
        facts = "".join(
            f'<tr><th class="fs-k">{safe(name)}</th><td class="fs-l">{safe(value, FACT_MAX)}</td></tr>'
            for name, value in self.facts.items()
        )
        table = f"<table>{facts}</table>" if facts else ""
        grids = "".join(grid.html() for grid in self.grids)
        return (
            f'<div class="fs"><style>{STYLE}</style><pre class="fs-text">{safe(text or self.text())}</pre>'
            f'<div class="fs-sheet" style="display:none"><h4>{safe(self.title, FACT_MAX)}</h4>{table}{grids}'
            "</div></div>"
        )


class Shown:
    """What shows a sheet of itself: as text where it is printed, as HTML in notebooks."""

    def _sheet(self) -> Sheet:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._sheet().text()

    def _repr_html_(self) -> str:
        return self._sheet().html()
