"""What hosts say to each other: messages of a header of 64 bytes, and for some a body.

The header is eight int64: magic, kind, number, detail, bytes of the body, check of the body, 0, check of what
comes before. A check is a CRC-32C: of one page its own; of more, that of their CRCs, so that a body of 4 MiB
takes two levels of the pages' kernel. Nothing is pickled.

===== ======================================= ====== ====== ============================================
kind  says                                    number detail body
===== ======================================= ====== ====== ============================================
HELLO what the host is, and agrees to         0      0      JSON
ASK   send these rows                         its    0      ids of each table: int64 counts, then ids
PICK  send neighbours of these nodes          its    0      int64s, see :mod:`featstore.hosts.questions`
ROWS  here is what was asked for              asked  0      rows of each table, padded to 64 bytes; or lists
ERROR it could not be read                    asked  0      JSON, see ``featstore.base.passed_errors``
PING  I am there                              0      0
GONE  a rank of a host is gone, and so am I   rank   host   text
BYE   I ask for nothing more                  0      0
SAME  my n-th loader has options of a digest  n      digest
STEPS an epoch of one of my loaders has steps which  steps
      -1: how many has yours? -2: never mind
      -3: I have closed it, and say no more
BEGIN an iteration of a loader begins         loader epoch  int64s: step, mini-batches handed out before
END   nothing more is said; comes twice       0      0
===== ======================================= ====== ====== ============================================
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import ALIGNMENT
from featstore.base.checksum import crc_pages
from featstore.errors import FormatError
from featstore.units import PAGE_BYTES

HEADER_BYTES = 64
_MAGIC = 0x31545358_54414546  # "FEATXST1"
_CHECKED = slice(0, 7)  # of the header's fields

TEXT_BYTES_MAX = 1 << 16  # of a body that is text


class Kind(IntEnum):
    """What a message is; see the module's text."""

    HELLO = 1
    ASK = 2
    ROWS = 3
    ERROR = 4
    PING = 5
    GONE = 6
    BYE = 7
    END = 8
    SAME = 9
    STEPS = 10
    PICK = 11
    BEGIN = 12


class Header(NamedTuple):
    """What a message says of itself."""

    kind: int
    number: int
    detail: int
    body_bytes: int
    body_check: int


def check_of(body: NDArray[np.uint8]) -> int:
    """CRC-32C of a body's pages, of their CRCs, and so on, until it is one; 0 where there is none."""
    while len(body):
        sums = crc_pages(body)
        if len(body) <= PAGE_BYTES:
            return int(sums[0])
        body = sums.view(np.uint8)
    return 0


def message(body_bytes: int) -> NDArray[np.uint8]:
    """Memory for a message, whose body begins at :data:`HEADER_BYTES`."""
    return np.zeros(HEADER_BYTES + body_bytes, np.uint8)


def seal(raw: NDArray[np.uint8], kind: int, number: int = 0, detail: int = 0) -> None:
    """Write the header of a message, whose body is in it."""
    body = raw[HEADER_BYTES:]
    fields = raw[:HEADER_BYTES].view("<i8")
    fields[:] = _MAGIC, kind, number, detail, len(body), check_of(body), 0, 0
    fields[7] = check_of(fields[_CHECKED].view(np.uint8))


def text_message(kind: int, text: bytes, number: int = 0, detail: int = 0) -> NDArray[np.uint8]:
    """A message of text, which is cut where it is longer than any may be."""
    text = text[:TEXT_BYTES_MAX]
    raw = message(len(text))
    raw[HEADER_BYTES:] = np.frombuffer(text, np.uint8)
    seal(raw, kind, number, detail)
    return raw


def parse_header(raw: NDArray[np.uint8]) -> Header:
    """What the message says of itself that begins in ``raw``. Raises FormatError for what is none, and for
    one that is larger than ``raw``."""
    fields = raw[:HEADER_BYTES].view("<i8")
    if int(fields[0]) != _MAGIC or int(fields[7]) != check_of(fields[_CHECKED].view(np.uint8)):
        raise FormatError("has sent a damaged message: its header is not as it was made")
    found = Header(*(int(one) for one in fields[1:6]))
    if found.kind not in set(Kind):
        raise FormatError(f"has sent a message of kind {found.kind}, which there is not")
    if not 0 <= found.body_bytes <= len(raw) - HEADER_BYTES:
        raise FormatError(
            f"has sent {found.body_bytes:,} bytes where {len(raw) - HEADER_BYTES:,} had been agreed"
        )
    return found


def body_of(found: Header, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The body of a message. Raises FormatError for one that is not as it was sent."""
    body = raw[HEADER_BYTES : HEADER_BYTES + found.body_bytes]
    if check_of(body) != found.body_check:
        raise FormatError(
            f"has sent a damaged message: the CRC-32C of its {found.body_bytes:,} bytes is not as it was made"
        )
    return body


def padded(byte_count: int) -> int:
    """Bytes of a table's rows in a body: those of the next table begin aligned."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
