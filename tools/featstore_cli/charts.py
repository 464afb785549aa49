"""Charts as SVG that stands in a page: no scripts, texts escaped, lines and letters in the text's own
colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from featstore.base.sheets import safe

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 10, 40
#: Of parts side by side: told apart on light and on dark ground, and by most who see colours otherwise.
_COLOURS = ("#4e8ecb", "#e0953c", "#5aa469", "#b76bb0", "#c9b037", "#8a8f98", "#d0605e")


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{safe(label)}" '
        f'fill="currentColor"><title>{safe(label)}</title>{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", most: int = 80) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text, most)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float = 0.25) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" '
        f'opacity="{opacity}"/>'
    )


def compact(number: float) -> str:
    """A number as an axis says it: ``20k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:g}{unit}"
    return f"{number:g}"


class _Axis:
    """Where numbers stand between two places, by themselves or by their logarithms."""

    def __init__(self, low: float, high: float, begin: float, end: float, log: bool) -> None:
        self.log, self.begin, self.end = log, begin, end
        if log:
            low, high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        self.low, self.high = low, high if high > low else low + 1
        size = (self.high - self.low) / 4
        unit = 10.0 ** math.floor(math.log10(size))
        self._step = next(k * unit for k in (1, 2, 2.5, 5, 10) if k * unit >= size * 0.999)

    def place(self, value: float) -> float:
        """The place of a number."""
        at = math.log10(value) if self.log else value
        return self.begin + (at - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Numbers to name."""
        if self.log:
            step = max(1, math.ceil((self.high - self.low) / 8))
            return [10.0**k for k in range(int(self.low), int(self.high) + 1, step)]
        count = math.floor((self.high - self.low) / self._step * 1.001)
        return [self.low + self._step * k for k in range(count + 1)]


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, *, log_x: bool = False,
    log_y: bool = False, joined: bool = True, words: Callable[[float], str] = compact,
    marked: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """Lines (or points) of (x, y), each series of a name of its own. An axis with a logarithm takes numbers
    above 0; ``words``: of the numbers at the upright one; ``marked``: a number at the other one where an
    upright line stands, and its text."""
    xs, ys = ([point[axis] for points in series.values() for point in points] for axis in (0, 1))
    x = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log_x)
    y = _Axis(min(ys) if log_y else 0.0, max(ys), _HEIGHT - _BOTTOM, _TOP, log_y)
    body = []
    for tick in x.ticks():
        body += [_line(x.place(tick), _TOP, x.place(tick), _HEIGHT - _BOTTOM, 0.12)]
        body += [_text(x.place(tick), _HEIGHT - _BOTTOM + 14, compact(tick))]
    for tick in y.ticks():
        body += [_line(_LEFT, y.place(tick), _WIDTH - _RIGHT, y.place(tick))]
        body += [_text(_LEFT - 5, y.place(tick) + 4, words(tick), "end")]
    for k, (name, points) in enumerate(series.items()):
        colour, placed = _COLOURS[k % len(_COLOURS)], [(x.place(a), y.place(b)) for a, b in points]
        if joined:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (a, b), (value, height) in zip(placed, points, strict=True):
            title = f"{name}: {compact(value)}, {words(height)}"
            circle = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}">'
            body.append(f"{circle}<title>{safe(title)}</title></circle>")
    if marked is not None:
        at = x.place(marked[0])
        anchor, beside = ("start", 5) if at < (_LEFT + _WIDTH) / 2 else ("end", -5)
        body += [_line(at, _TOP, at, _HEIGHT - _BOTTOM, 0.8)]
        body += [_text(at + beside, _HEIGHT - _BOTTOM - 6, marked[1], anchor)]
    body.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, across))
    body.append(f'<g transform="rotate(-90 12 {_HEIGHT / 2})">{_text(12, _HEIGHT / 2, up)}</g>')
    legend = _legend(list(series)) if len(series) > 1 else ""
    return _svg(_WIDTH, _HEIGHT, f"{up} over {across}", body) + legend


def _legend(names: Sequence[str]) -> str:
    marks = (
        f'<span><svg class="mark" viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" '
        f'fill="{_COLOURS[k % len(_COLOURS)]}"/></svg> {safe(name, 60)}</span>'
        for k, name in enumerate(names)
    )
    return f'<p class="legend">{" ".join(marks)}</p>'


def columns(values: Sequence[float], across: str, up: str) -> str:
    """An upright bar for each number, none below 0."""
    y = _Axis(0.0, max(values), _HEIGHT - _BOTTOM, _TOP, False)
    width = (_WIDTH - _LEFT - _RIGHT) / len(values)
    body = []
    for tick in y.ticks():
        body += [_line(_LEFT, y.place(tick), _WIDTH - _RIGHT, y.place(tick))]
        body += [_text(_LEFT - 5, y.place(tick) + 4, compact(tick), "end")]
    for k, value in enumerate(values):
        top = y.place(value)
        body.append(
            f'<rect x="{_LEFT + k * width:.2f}" y="{top:.2f}" width="{0.9 * width:.2f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.2f}" fill="{_COLOURS[0]}"><title>{value:,.0f}</title></rect>'
        )
    body.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, across))
    body.append(f'<g transform="rotate(-90 12 {_HEIGHT / 2})">{_text(12, _HEIGHT / 2, up)}</g>')
    return _svg(_WIDTH, _HEIGHT, f"{up} by {across}", body)


def stacks(
    rows: Mapping[str, Sequence[float]], names: Sequence[str], label: str, words: Callable[[float], str]
) -> str:
    """A bar for each row, cut into its parts; each row is as wide as any other."""
    body, height = [], 22
    for k, (name, parts) in enumerate(rows.items()):
        at, total = 150.0, sum(parts) or 1.0
        body.append(_text(145, k * height + 15, name, "end", 24))
        for number, value in enumerate(parts):
            wide = (_WIDTH - 150) * value / total
            title = f"{names[number]}: {words(value)}, {value / total:.1%}"
            body.append(
                f'<rect x="{at:.2f}" y="{k * height + 3}" width="{wide:.2f}" height="16" '
                f'fill="{_COLOURS[number % len(_COLOURS)]}"><title>{safe(title)}</title></rect>'
            )
            at += wide
    return _svg(_WIDTH, max(1, len(rows)) * height, label, body) + _legend(names)


def heat(
    shares: Sequence[Sequence[float]], label: str, down: str, across: str, things: tuple[int, int]
) -> str:
    """A square for each number of a matrix, the fuller the larger: by the square root of its part of the
    largest, so that small ones are seen. ``things``: how many are ``down`` and ``across``, which rows and
    columns are even groups of; the first of each is its number."""
    side, most = min(24.0, 480 / max(1, len(shares))), max(max(row) for row in shares) or 1.0
    left, top, rows, columns = 60.0, 40.0, len(shares), len(shares[0])
    wide, high = side * columns, side * rows
    body = [
        f'<rect x="{left + j * side:.1f}" y="{top + i * side:.1f}" width="{side:.1f}" height="{side:.1f}" '
        f'opacity="{math.sqrt(share / most):.3f}"><title>{i}, {j}: {share:.3%}</title></rect>'
        for i, row in enumerate(shares)
        for j, share in enumerate(row)
    ]
    body.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="none" '
        'stroke="currentColor"/>'
    )
    for k in _some(columns):
        body.append(_text(left + (k + 0.5) * side, top - 5, f"{-(-k * things[1] // columns):,}"))
    for k in _some(rows):
        body.append(_text(left - 5, top + (k + 0.5) * side + 4, f"{-(-k * things[0] // rows):,}", "end"))
    body.append(_text(left + wide / 2, 12, across))
    middle = top + high / 2
    body.append(f'<g transform="rotate(-90 12 {middle:.1f})">{_text(12, middle, down)}</g>')
    return _svg(max(left + wide + 30, 180.0), max(top + high + 10, 130.0), label, body)


def _some(count: int) -> list[int]:
    """A few numbers below ``count``, the first and the last of them, evenly."""
    return sorted({round(k * (count - 1) / 4) for k in range(5)})


def panels(
    names: Sequence[str], values: Mapping[str, Sequence[Sequence[float] | None]],
    words: Sequence[Callable[[float], str]], parts: Sequence[str], label: str,
) -> str:  # fmt: skip
    """Panels side by side, each with a title and a lying bar from 0 for each name, its length in words behind
    it. ``values``: by title for each name one number, or one for each of ``parts``, or None where nothing is
    known, and is grey where it has no parts; ``words``: of a panel's numbers. A bar of more than twice the
    second longest is cut, and the cut drawn: else nothing could be told of the others."""
    left, behind, height, top, width = 80, 72, 24, 26, 1.25 * _WIDTH
    wide, bottom = (width - left) / len(values) - behind, top + len(names) * height
    body = [_text(left - 8, top + k * height + 16, name, "end", 14) for k, name in enumerate(names)]
    for number, (title, bars) in enumerate(values.items()):
        x, say = left + number * (wide + behind), words[number]
        lengths = [0.0, 0.0, *sorted(sum(bar) for bar in bars if bar is not None)]
        most = min(lengths[-1], 2 * lengths[-2] or lengths[-1]) or 1.0
        body += [_text(x, 14, title, "start"), _line(x, top - 4, x, bottom + 2, 0.6)]
        for k, bar in enumerate(bars):
            at, y = x, top + k * height
            for part, value in enumerate(bar or ()):
                long, whole = min(value / most * wide, x + wide - at), len(bar or ()) == 1
                name = names[k] if whole else f"{names[k]}, {parts[part]}"
                colour, said = _COLOURS[5 if whole else part], safe(f"{name}: {say(value)}")
                body.append(
                    f'<rect x="{at:.1f}" y="{y + 3}" width="{long:.1f}" height="18" '
                    f'fill="{colour}"><title>{said}</title></rect>'
                )
                at += long
            if sum(bar or ()) > most:
                path = f"M{at - 16:.1f} {y + 24}l5 -24m4 0l-5 24"
                body.append(f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>')
            body.append(_text(at + 5, y + 16, "not known" if bar is None else say(sum(bar)), "start", 14))
    return _svg(width, bottom + 6, label, body) + _legend(parts)
