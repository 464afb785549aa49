"""CRC-32C (Castagnoli) of 4 KiB pages, and digests of files built from them.

A page's checksum is the CRC-32C of its 4096 bytes; the last, partial page of a file counts as if it were
filled up with zero bytes. There are three ways to it, bit-identical to any other CRC-32C:

- Where the processor multiplies vectors without carries, the page is folded (:mod:`featstore.base.folding`).
- Where it has the CRC-32C instruction alone, the page is read as four streams of 1 KiB side by side (the
  instruction has a latency of three cycles but starts one a cycle), and the four states are joined with a
  linear shift over GF(2), which is tabulated here.
- Elsewhere eight tables do eight bytes a step ("slicing by 8"; Kounavis and Berry, 2005).

The first two are faster than a page comes from memory, so the next page is fetched meanwhile.

A file's digest is the SHA-256 over the little-endian checksums of its pages: as strong in binding the
manifest to the checksums as a digest of the bytes would be, and an order of magnitude faster to compute.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.folding import fold_page
from featstore.base.native import (
    HAS_CRC_INSTRUCTION,
    HAS_FOLDING,
    address_of,
    crc32c_instruction,
    load_u8,
    load_u64,
    prefetch,
)
from featstore.units import PAGE_BYTES

_POLYNOMIAL = 0x82F63B78
_STREAM_BYTES = PAGE_BYTES // 4
_LINE_BYTES = 64


def byte_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def _slicing_tables() -> NDArray[np.uint32]:
    tables = np.empty((8, 256), np.uint32)
    tables[0] = byte_table()
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0][tables[k - 1] & 0xFF]
    return tables


def _shift_tables() -> NDArray[np.uint32]:
    """[3, 4, 256]: what a state becomes after 1, 2 and 3 KiB of zero bytes, by the state's four bytes."""
    bits = (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
    table = byte_table()
    shifted = np.empty((3, 4, 256), np.uint32)
    values = np.arange(256, dtype=np.uint32)
    for k in range(3):
        for _ in range(_STREAM_BYTES):
            bits = (bits >> 8) ^ table[bits & 0xFF]
        for byte in range(4):
            column = np.zeros(256, np.uint32)
            for bit in range(8):
                column ^= np.where(values >> bit & 1, bits[8 * byte + bit], 0).astype(np.uint32)
            shifted[k, byte] = column
    return shifted


_SLICING = _slicing_tables()
_SHIFT = _shift_tables()


@njit(nogil=True, inline="always")
def _shift(crc: Any, k: Any) -> Any:
    c = np.uint32(crc)
    return (
        _SHIFT[k, 0, c & np.uint32(0xFF)]
        ^ _SHIFT[k, 1, (c >> np.uint32(8)) & np.uint32(0xFF)]
        ^ _SHIFT[k, 2, (c >> np.uint32(16)) & np.uint32(0xFF)]
        ^ _SHIFT[k, 3, c >> np.uint32(24)]
    )


@njit(nogil=True)
def _crc_page_folded(address: Any, following: Any) -> Any:
    return np.uint32(fold_page(address, following)) ^ np.uint32(0xFFFFFFFF)


@njit(nogil=True)
def _crc_page_instruction(address: Any, following: Any) -> Any:
    a = np.uint64(0xFFFFFFFF)
    b = np.uint64(0)
    c = np.uint64(0)
    d = np.uint64(0)
    for offset in range(0, _STREAM_BYTES, _LINE_BYTES // 4):  # so far in each stream, and a line in all
        prefetch(following + 4 * offset)
        for at in range(address + offset, address + offset + _LINE_BYTES // 4, 8):
            a = crc32c_instruction(a, load_u64(at))
            b = crc32c_instruction(b, load_u64(at + _STREAM_BYTES))
            c = crc32c_instruction(c, load_u64(at + 2 * _STREAM_BYTES))
            d = crc32c_instruction(d, load_u64(at + 3 * _STREAM_BYTES))
    return np.uint32(_shift(a, 2) ^ _shift(b, 1) ^ _shift(c, 0) ^ np.uint32(d) ^ np.uint32(0xFFFFFFFF))


@njit(nogil=True)
def _crc_page_tables(address: Any, following: Any) -> Any:  # slower than memory: nothing is fetched
    crc = np.uint32(0xFFFFFFFF)
    for offset in range(0, PAGE_BYTES, 8):
        at = address + offset
        x = np.uint32(0)
        for k in range(4):
            x |= np.uint32(load_u8(at + k)) << np.uint32(8 * k)
        x ^= crc
        crc = (
            _SLICING[7, x & np.uint32(0xFF)]
            ^ _SLICING[6, (x >> np.uint32(8)) & np.uint32(0xFF)]
            ^ _SLICING[5, (x >> np.uint32(16)) & np.uint32(0xFF)]
            ^ _SLICING[4, x >> np.uint32(24)]
            ^ _SLICING[3, load_u8(at + 4)]
            ^ _SLICING[2, load_u8(at + 5)]
            ^ _SLICING[1, load_u8(at + 6)]
            ^ _SLICING[0, load_u8(at + 7)]
        )
    return np.uint32(crc ^ np.uint32(0xFFFFFFFF))


#: CRC-32C of the 4096 bytes at ``address``; those at ``following``, which need not be there, are fetched into
#: the caches meanwhile. For use inside kernels.
crc_page = (
    _crc_page_folded if HAS_FOLDING else _crc_page_instruction if HAS_CRC_INSTRUCTION else _crc_page_tables
)


@njit(cache=True, nogil=True)
def _crc_pages(address: int, page_count: int, out: NDArray[np.uint32]) -> None:
    for page in range(page_count):
        out[page] = crc_page(address + page * PAGE_BYTES, address + (page + 1) * PAGE_BYTES)


def crc_pages(data: NDArray[np.uint8], out: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
    """CRC-32C of each 4 KiB page of ``data`` (uint8, C-contiguous); a partial last page is filled up with
    zeros.

    Returns uint32 [ceil(bytes / 4096)].
    """
    whole, rest = divmod(data.size, PAGE_BYTES)
    if out is None:
        out = np.empty(whole + (rest > 0), np.uint32)
    _crc_pages(address_of(data), whole, out)
    if rest:
        last = np.zeros(PAGE_BYTES, np.uint8)
        last[:rest] = data[whole * PAGE_BYTES :]
        _crc_pages(address_of(last), 1, out[whole:])
    return out


def digest_of_checksums(checksums: NDArray[np.uint32]) -> str:
    """The digest of a file, from the checksums of its pages (uint32, in file order)."""
    return hashlib.sha256(np.ascontiguousarray(checksums, dtype="<u4").tobytes()).hexdigest()
