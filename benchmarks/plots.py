"""Line plots as SVG, a few lines of our own: what ``docs/plots`` needs and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 36, 48
_COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f")
_DASHES = ("", "5 4")

#: By name: for each place on the x axis a value, or None; and whether the line is dashed.
Lines = Mapping[str, tuple[Sequence[float | None], bool]]


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within a range, and the next beyond either end."""
    steps = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        for m in (1, 2, 5)
    ]
    first = max(k for k, step in enumerate(steps) if step <= low)
    last = min(k for k, step in enumerate(steps) if step >= high)
    return steps[first : last + 1]


def line_plot(title: str, x_label: str, y_label: str, places: Sequence[str], lines: Lines) -> str:
    """Lines over equally spaced places; y is logarithmic. Lines that are None at all places are left out."""
    values = [v for line, _ in lines.values() for v in line if v is not None]
    marks = ticks(min(values), max(values))
    low, high = math.log(marks[0]), math.log(marks[-1])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    xs = [LEFT + (right - LEFT) * (k + 0.5) / len(places) for k in range(len(places))]

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * (math.log(value) - low) / max(high - low, 1e-9)

    def text(at_x: float, at_y: float, what: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{more}>{escape(what)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, title, "start", ' font-weight="bold"'),
        text((LEFT + right) / 2, HEIGHT - 10, x_label),
        text(16, (TOP + bottom) / 2, y_label, more=f' transform="rotate(-90 16 {(TOP + bottom) / 2:.1f})"'),
    ]
    for mark in marks:
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y(mark) + 4, f"{mark:g}", "end"))
    parts += [text(x, bottom + 18, place) for x, place in zip(xs, places, strict=True)]
    names = [name for name, (line, _) in lines.items() if any(v is not None for v in line)]
    for number, name in enumerate(names):
        line, dashed = lines[name]
        colour = _COLOURS[(number // 2) % len(_COLOURS)]
        style = f'stroke="{colour}" stroke-width="2" fill="none" stroke-dasharray="{_DASHES[dashed]}"'
        known = [(x, y(v)) for x, v in zip(xs, line, strict=True) if v is not None]
        parts.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in known)}" {style}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in known]
        at = TOP + 8 + 18 * number
        parts.append(f'<line x1="{right + 8}" x2="{right + 30}" y1="{at}" y2="{at}" {style}/>')
        parts.append(text(right + 36, at + 4, name, "start", ' font-size="10"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def plot_of_table(table: Mapping[str, Any], title: str, x_label: str, y_label: str) -> str:
    """A plot of a result's table, whose first column is the x axis and whose others come in pairs, the second
    of each dashed."""
    names = [str(name) for name in table["columns"][1:]]
    places = [str(row[0]) for row in table["rows"]]
    lines = {name: ([row[k + 1] for row in table["rows"]], k % 2 == 1) for k, name in enumerate(names)}
    return line_plot(title, x_label, y_label, places, lines)
