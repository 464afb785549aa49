"""What hosts say to each other: a header of 64 bytes, and for some messages a body.

The header is eight int64: magic, kind, number, detail, bytes of the body, check of the body, 0, check of what
comes before. A check is a CRC-32C: of one page its own; of more, that of their CRCs, so that a body of 4 MiB
takes two levels of the pages' kernel. Nothing is pickled.

===== ======================================= ====== ============ =========================================
kind  says                                    number detail       body
===== ======================================= ====== ============ =========================================
HELLO what the host is, and agrees to         0      0            JSON
ASK   send these rows                         its own 0           ids of each table: int64 counts, then ids
ROWS  here they are                           of ASK 0            rows of each table, padded to 64 bytes
ERROR they could not be read                  of ASK 0            JSON, see ``featstore.base.passed_errors``
PING  I am there                              0      0
GONE  a host is gone, and so am I             0      that host    text
BYE   I ask for nothing more                  0      0
END   nothing more is said                    0      0
===== ======================================= ====== ============ =========================================
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

NO_BODY = np.empty(0, np.uint8)


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


def header(
    kind: int, number: int = 0, detail: int = 0, body: NDArray[np.uint8] = NO_BODY
) -> NDArray[np.uint8]:
    """uint8 [64], the header of a message."""
    fields = np.array([_MAGIC, kind, number, detail, len(body), check_of(body), 0, 0], "<i8")
    fields[7] = check_of(fields[_CHECKED].view(np.uint8))
    return fields.view(np.uint8)


def parse_header(raw: NDArray[np.uint8]) -> Header:
    """Raises FormatError for bytes that are no header."""
    fields = raw.view("<i8")
    if int(fields[0]) != _MAGIC or int(fields[7]) != check_of(fields[_CHECKED].view(np.uint8)):
        raise FormatError("has sent a damaged message: its header is not as it was made")
    found = Header(*(int(one) for one in fields[1:6]))
    if not Kind.HELLO <= found.kind <= Kind.END or found.body_bytes < 0:
        raise FormatError(f"has sent a message of kind {found.kind}, which there is not")
    return found


def check_body(found: Header, body: NDArray[np.uint8]) -> None:
    """Raise FormatError for a body that is not the one that was sent."""
    if check_of(body) != found.body_check:
        raise FormatError(
            f"has sent a damaged message: the CRC-32C of its {found.body_bytes:,} bytes is not as it was made"
        )


def padded(byte_count: int) -> int:
    """Bytes of a table's rows in a body: those of the next table begin aligned."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
