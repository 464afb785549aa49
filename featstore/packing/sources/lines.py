"""Text files as bytes: streams, decompressed where need be, and whole lines of them."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featstore.errors import SourceError
from featstore.packing.sources.base import open_binary

__all__ = ["CSV_BLOCK_BYTES", "CSV_LINE_BYTES_MAX", "line_chunks", "open_text"]

CSV_BLOCK_BYTES = 1 << 20
CSV_LINE_BYTES_MAX = 64 << 20


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """A text file's bytes, decompressed when its name ends in ``.gz``. Errors of gzip come with the reads."""
    with open_binary(path) as file:
        if path.suffix.lower() != ".gz":
            yield file
            return
        with gzip.GzipFile(fileobj=file, mode="rb") as text:
            yield text


def line_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Whole lines of a text file, about a mebibyte at a time, with the number of the first of them. Raises
    SourceError."""
    rest, line = b"", 0
    try:
        with open_text(path) as file:
            while data := file.read(CSV_BLOCK_BYTES):
                cut = data.rfind(b"\n") + 1
                if cut == 0:
                    rest += data
                    if len(rest) > CSV_LINE_BYTES_MAX:
                        raise SourceError(
                            f"{path}: line {line + 1:,} has no end; this is no text file of lines"
                        )
                    continue
                whole, rest = rest + data[:cut], data[cut:]
                yield whole, line
                line += whole.count(b"\n")
            if rest:
                yield rest, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: cannot be decompressed ({error}); it is damaged or cut off") from error
