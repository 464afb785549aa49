"""Edge lists in text, as streams like those of :mod:`featstore.packing.graphs.edges`.

Text is parsed by a kernel on the bytes themselves: columns parted by comma, semicolon, tab or blanks; lines
that begin with ``#`` or ``%`` are comments; columns beyond the two are passed over. Where a tab ends the
first cell of all (of a ``.tsv``, any), each tab parts two columns, and nothing else does. What ``"`` begins
ends with the next one that does not stand twice, whatever is between them; but where tabs part columns, a
quote that does not end with its cell means nothing. A first line that does not begin
with a number is a header, and if it names ``src``/``source``/``from`` and ``dst``/``target``/``to`` these
columns are taken; the comma or semicolon that parts it parts all lines.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.native import INLINED
from featstore.errors import SourceError
from featstore.packing.graphs.columns import SOURCE_NAMES, TARGET_NAMES, ends_named, ends_of, left_out
from featstore.packing.graphs.edges import Edges
from featstore.packing.sources.cells import line_cells
from featstore.packing.sources.columns import refuse_twice
from featstore.packing.sources.lines import line_chunks
from featstore.packing.sources.text import MISSING_TEXTS

ANY = 0  # of commas, semicolons, tabs and blanks parts the columns of a line
_TAB, _COMMA, _SEMICOLON = b"\t,;"
_QUOTE, _QUOTED = 34, rb'"(?:[^"]|"")*"'


@njit(**INLINED)
def end_of_quoted(text: NDArray[np.uint8], at: int) -> np.int64:
    """Where a cell goes on whose quote begins there; a quote in it stands twice. -1 where it does not end in
    its line."""
    at += 1
    while at < text.size and text[at] != 10:
        if text[at] != _QUOTE:
            at += 1
        elif at + 1 < text.size and text[at + 1] == _QUOTE:
            at += 2
        else:
            return np.int64(at + 1)
    return np.int64(-1)


@njit(**INLINED)
def past_blanks(text: NDArray[np.uint8], at: int, parted: int) -> np.int64:
    """Where blanks end, and with them what a line ends with; at a carriage return, one inside of a line."""
    while at < text.size and (text[at] == 32 or text[at] == 13 or (text[at] == 9 and parted != 9)):
        if text[at] == 13:
            after = at
            while after < text.size and text[after] == 13:
                after += 1
            if after < text.size and text[after] != 10:
                break
            at = after - 1
        at += 1
    return np.int64(at)


@njit(cache=True, nogil=True)
def parse_pairs(
    text: NDArray[np.uint8], column_a: int, column_b: int, parted: int, a: NDArray[np.int64],
    b: NDArray[np.int64],
) -> tuple[int, int]:  # fmt: skip
    """Integers of two columns of whole lines, ``parted`` by ANY, or by each byte that is this, and by nothing
    else. Returns ``(pairs, -1)``, or ``(pairs, byte)`` at a malformed line."""
    pairs, at, size = 0, 0, text.size
    tab, comma, semicolon, space = (9, 44, 59, 32) if parted == ANY else (parted, parted, parted, parted)
    while at < size:
        at = past_blanks(text, at, parted)
        if at < size and (text[at] == 35 or text[at] == 37 or text[at] == 10):
            while at < size and text[at] != 10:
                at = past_blanks(text, at + 1, parted)
                if at < size and text[at] == 13:
                    return pairs, at
            at += 1
            continue
        if at >= size:
            break
        found, column, first_of_line = 0, 0, at
        while True:
            if column in (column_a, column_b):
                negative = at < size and text[at] == 45
                at += int(negative)
                first, value = at, 0
                while at < size and 48 <= text[at] <= 57:
                    value = value * 10 + (text[at] - 48)
                    at += 1
                if at == first or at - first > 19 or value < 0:  # beyond int64
                    return pairs, min(first, size - 1)
                if at < size and text[at] not in (10, 13, 32, 9, comma, semicolon):
                    return pairs, at
                if column == column_a:
                    a[pairs] = -value if negative else value
                if column == column_b:
                    b[pairs] = -value if negative else value
                found += 1
            else:
                if at < size and text[at] == _QUOTE:
                    cell, at = at, end_of_quoted(text, at)
                    while parted == 9 and 0 <= at < size and text[at] == 32:
                        at += 1
                    if parted == 9 and (at < 0 or (at < size and text[at] not in (9, 10, 13))):
                        at = cell  # where tabs part cells, many write quotes that mean nothing
                    if at < 0:
                        return pairs, min(first_of_line, size - 1)
                while at < size and text[at] not in (10, 13, tab, comma, semicolon, space):
                    at += 1
            at = past_blanks(text, at, parted)
            if at >= size or text[at] == 10:
                break
            if text[at] == 13:
                return pairs, at
            if text[at] == comma or text[at] == semicolon:
                at += 1
                while at < size and (text[at] == 32 or (text[at] == 9 and parted != 9)):
                    at += 1
            elif parted != ANY:
                return pairs, at
            column += 1
        if found < 2:
            return pairs, min(at, size - 1)
        pairs += 1
        at += 1
    return pairs, -1


def _names(cells: list[bytes]) -> list[str]:
    return [cell.decode("utf-8", "replace").strip(" \"'").lower() for cell in cells]


class TextEdges:
    """Edges of a text file, gzipped or not. ``key``: ``"source,target"``, as the first line calls them."""

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.name, self._key = str(path), key
        self._path = path
        self._columns = (0, 1)
        self._header_lines = 0
        self._is_tsv = ".tsv" in path.name.lower()
        self._kind, self._parted = ANY, rb"[,;\t ]+"
        for chunk, _ in self._chunks():
            self._read_header(chunk)
            break

    def _read_header(self, chunk: bytes) -> None:
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            text = line.strip()
            if b"\r" in line.rstrip(b"\r") and b'"' not in line:
                raise SourceError(
                    f"{self.name}: line {number + 1} ({line[:80].decode('utf-8', 'replace')!r}) has a "
                    "carriage return inside it: end lines with a line feed, or both (dos2unix -c mac)"
                )
            if not text or text[:1] in b"#%":
                continue
            is_header, first_cell = not re.match(rb"-?[0-9]", text), line.partition(b"\t")[0].strip()
            others = rb"[,;]" if is_header else rb"[,; ]"  # names may have blanks in them
            words = set(_names(first_cell.split())) if is_header else set()
            both = bool(words & {*SOURCE_NAMES} and words & {*TARGET_NAMES})  # parted by blanks
            if b"\t" in text and (self._is_tsv or not (both or re.search(others, first_cell))):
                self._kind, self._parted = _TAB, rb" *\t *"
            elif is_header and {*(bare := re.sub(_QUOTED, b"", text))} & {_COMMA, _SEMICOLON}:
                self._kind, self._parted = self._one_of_both(bare), rb"\s*[,;]\s*"
            if is_header:
                self._header_lines = number + 1
                names = self._cells(line.strip(b" \r") if self._kind == _TAB else text)
                while names and not names[-1]:
                    names.pop()
                if self._key is None:
                    self._check_names(names, line)
                ends = ends_of(names) if self._key is None else self._ends_named(names)
                if len(names) > 2:  # else they are the two, whatever they are called
                    refuse_twice(names, [names[k] for k in ends or ()], self.name)
                if ends is not None:
                    self._columns = ends
                    if self._key is None:
                        left_out(self.name, [name for k, name in enumerate(names) if k not in ends])
                elif len(names) > 2:
                    raise SourceError(
                        f"{self.name}: which of the columns {', '.join(names)} are the ends of an "
                        "edge? Say graph_key='source,target' as the first line calls them, or leave that "
                        "line out where they are the first two"
                    )
                return
            if self._key is not None:
                raise SourceError(
                    f"{self.name}: graph_key={self._key!r} names columns, and the first line does not; leave "
                    "it out where the ends are the first two"
                )
            count = len([cell for cell in re.split(self._parted, text) if cell])
            left_out(self.name, [f"column {k + 1}" for k in range(2, count)])
            return

    def _check_names(self, names: list[str], line: bytes) -> None:
        """Raise SourceError where the first line may be an edge that lacks an end, and no names."""
        numbers = any(re.fullmatch(r"[-+]?\d+(\.\d*)?", name) for name in names)
        if not {*names} & {*SOURCE_NAMES, *TARGET_NAMES} and (numbers or {*names} <= MISSING_TEXTS):
            raise SourceError(
                f"{self.name}: the first line ({line[:80].decode('utf-8', 'replace')!r}) may be an edge that "
                "lacks an end, or names of columns: write both ends, or source and target as names"
            )

    def _cells(self, header: bytes) -> list[str]:
        """The names in a header, in lower case."""
        quoted = re.findall(_QUOTED, header)
        if self._kind == ANY and re.search(rb"[,;\t ]", b"".join(quoted)):
            raise SourceError(
                f"{self.name}: the first line has blanks between quotes, {header[:80]!r}, and blanks part "
                "columns: part them by tabs, commas or semicolons, or call them by one word each"
            )
        if self._kind == ANY or not quoted:
            return _names(re.split(self._parted, header))
        cells = line_cells(header, self._kind, self.name, blanks=True)
        return [cell.strip(" \"'").lower() for cell in cells]

    def _ends_named(self, names: list[str]) -> tuple[int, int]:
        return ends_named(str(self._key).lower(), names, self.name)

    def _one_of_both(self, header: bytes) -> int:
        """The comma or semicolon that parts a header."""
        if not {_COMMA, _SEMICOLON} - {*header}:
            raise SourceError(
                f"{self.name}: the first line has commas and semicolons, {header[:80]!r}: which of them part "
                "columns would be a guess; write one of them in it, and between the cells of all lines"
            )
        return _COMMA if _COMMA in header else _SEMICOLON

    def _chunks(self) -> Iterator[tuple[bytes, int]]:
        return (
            (chunk if line else chunk.removeprefix(BOM_UTF8), line) for chunk, line in line_chunks(self._path)
        )

    def blocks(self, block_edges: int) -> Iterator[Edges]:
        """Runs of edges; see `EdgeStream`."""
        for chunk, first_line in self._chunks():
            start = 0
            for _ in range(max(0, self._header_lines - first_line)):
                start = chunk.find(b"\n", start) + 1 or len(chunk)
            lines = chunk.count(b"\n", start) + 1
            sources, targets = np.empty(lines, dtype=np.int64), np.empty(lines, dtype=np.int64)
            text = np.frombuffer(chunk, dtype=np.uint8)[start:]
            pairs, bad = parse_pairs(text, *self._columns, self._kind, sources, targets)
            if bad >= 0:
                number = first_line + chunk.count(b"\n", 0, start + bad) + 1
                line = chunk.split(b"\n")[number - first_line - 1][:80].decode("utf-8", "replace")
                raise SourceError(
                    f"{self.name}: line {number:,} ({line!r}) has no integers in columns "
                    f"{self._columns[0] + 1} and {self._columns[1] + 1}, or a quote that does not end there, "
                    "or a carriage return inside it; write one edge a line, as source and target"
                )
            for low in range(0, pairs, block_edges):
                high = min(pairs, low + block_edges)
                yield sources[low:high], targets[low:high]

    def where(self, edge: int) -> str:
        """The line of an edge, found by another pass."""
        done = 0
        for chunk, first_line in self._chunks():
            for number, line in enumerate(chunk.split(b"\n"), start=first_line):
                text = line.strip()
                if number >= self._header_lines and text and text[:1] not in b"#%":
                    if done == edge:
                        return f"line {number + 1:,}"
                    done += 1
        return f"edge {edge:,}"
