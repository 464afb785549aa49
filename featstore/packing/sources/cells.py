"""Keys in text: a column of comma- or tab-separated cells, or a key a line.

A cell is what stands between two separators, blanks and zeros in front of numbers included; one in quotes is
what is in them, where ``""`` stands for a quote (RFC 4180, but for line ends in quotes, which are refused).
Lines without anything are passed over; a cell without anything is no key.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.keys import KeyBlock, checked_strings
from featstore.errors import SourceError
from featstore.packing.sources.lines import line_chunks

__all__ = ["COMMA", "column_blocks", "line_cells", "separator_of", "take_cells", "text_blocks"]

COMMA, _TAB, _LINE, _QUOTE, _RETURN = 44, 9, 10, 34, 13
#: Instead of a separator: a line is one cell, and quotes are nothing special.
_WHOLE_LINE = _LINE


@njit(cache=True, nogil=True)
def take_cells(
    text: NDArray[np.uint8], separator: int, column: int, out: NDArray[np.uint8], ends: NDArray[np.int64]
) -> tuple[int, int]:
    """The cells of one column of whole lines, one after the other in ``out``, and where each ends in ``ends``
    from its second element on. Returns ``(lines, -1)``, or ``(lines, byte)`` at a line that has none
    there."""
    lines, at, size, to = 0, 0, text.size, 0
    while at < size:
        end = at
        while end < size and text[end] != _LINE:
            end += 1
        after = end + 1
        if end > at and text[end - 1] == _RETURN:
            end -= 1
        if end == at:
            at = after
            continue
        number, begin = 0, at
        while True:
            taken, first = number == column, to
            if separator != _WHOLE_LINE and at < end and text[at] == _QUOTE:
                at += 1
                while True:
                    if at >= end:
                        return lines, begin
                    if text[at] == _QUOTE:
                        if at + 1 < end and text[at + 1] == _QUOTE:
                            at += 1
                        else:
                            break
                    if taken:
                        out[to] = text[at]
                        to += 1
                    at += 1
                at += 1
                if at < end and text[at] != separator:
                    return lines, begin
            else:
                while at < end and text[at] != separator:
                    if taken:
                        out[to] = text[at]
                        to += 1
                    at += 1
            if taken:
                if to == first:
                    return lines, begin
                break
            if at >= end:
                return lines, begin
            at += 1
            number += 1
        lines += 1
        ends[lines] = to
        at = after
    return lines, -1


def separator_of(path: Path) -> int | None:
    """What parts the cells of a text file, by its name; None where that is not known."""
    name = path.name.lower().removesuffix(".gz")
    return COMMA if name.endswith(".csv") else _TAB if name.endswith(".tsv") else None


def line_cells(line: bytes, separator: int, name: str, *, blanks: bool = False) -> list[str]:
    """The cells of one line, that of names for instance. ``blanks``: those before a quote are passed over.
    Raises SourceError."""
    text = line.decode("utf-8-sig", "replace").rstrip("\r\n")
    try:
        rows = csv.reader([text], delimiter=chr(separator), skipinitialspace=blanks)
        return [cell.strip() for cell in next(rows, [])]
    except csv.Error as error:
        raise SourceError(f"{name}: its first line cannot be read ({error})") from error


def text_blocks(path: Path) -> Iterator[KeyBlock]:
    """Keys of a file with one a line."""
    return (blocks[0] for blocks in column_blocks(path, _WHOLE_LINE, (0,), 0))


def column_blocks(
    path: Path, separator: int, columns: tuple[int, ...], skipped: int
) -> Iterator[tuple[KeyBlock, ...]]:
    """The cells of some columns, a block of each, of the lines after the first ``skipped``. Raises
    SourceError that names the first line without such a cell."""
    first = 0
    for chunk, first_line in line_chunks(path):
        start = 0
        for _ in range(max(0, skipped - first_line)):
            start = chunk.find(b"\n", start) + 1 or len(chunk)
        if first_line == 0 and start == 0 and chunk.startswith(b"\xef\xbb\xbf"):
            start = 3  # of a mark of byte order
        text = np.frombuffer(chunk, np.uint8)[start:]
        found = []
        for column in columns:
            out, ends = np.empty(len(text), np.uint8), np.zeros(chunk.count(b"\n", start) + 2, np.int64)
            lines, bad = take_cells(text, separator, column, out, ends)
            if bad >= 0:
                number = first_line + chunk.count(b"\n", 0, start + bad)
                line = chunk.split(b"\n")[number - first_line][:80].decode("utf-8", "replace")
                raise SourceError(
                    f"{path}: line {number + 1:,} ({line!r}) has no key in column {column + 1}, or a quote "
                    "that does not end there"
                )
            block = KeyBlock(out[: ends[lines]].copy(), ends[: lines + 1].copy())
            found.append(checked_strings(block, str(path), first))
        yield tuple(found)
        first += len(found[0])
