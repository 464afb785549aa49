"""A digest of a table's content that does not depend on the order of its rows.

The sum, modulo 2**64, over all rows of ``mix(node id, CRC-32C of the row's bytes)``. It is computed once over
the rows as they come from the source and once over the rows as they are written, and the two must agree: so a
pack proves to itself that the permutation, the spill and the memory in between did what they should. Sums of
parts add up, so an interrupted pack goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.checksum import byte_table
from featstore.base.compilation import njit
from featstore.base.hashing import GOLDEN, mix64
from featstore.base.native import HAS_CRC_INSTRUCTION, INLINED, crc32c_instruction, load_u8, load_u64

_TABLE = byte_table()


@njit(nogil=True)
def _crc_bytes_instruction(address: Any, byte_count: Any) -> Any:
    crc = np.uint64(0xFFFFFFFF)
    whole = byte_count // 8 * 8
    for offset in range(0, whole, 8):
        crc = crc32c_instruction(crc, load_u64(address + offset))
    state = np.uint32(crc)
    for offset in range(whole, byte_count):
        state = (state >> np.uint32(8)) ^ _TABLE[
            (state ^ np.uint32(load_u8(address + offset))) & np.uint32(0xFF)
        ]
    return np.uint32(state ^ np.uint32(0xFFFFFFFF))


@njit(nogil=True)
def _crc_bytes_tables(address: Any, byte_count: Any) -> Any:
    state = np.uint32(0xFFFFFFFF)
    for offset in range(byte_count):
        state = (state >> np.uint32(8)) ^ _TABLE[
            (state ^ np.uint32(load_u8(address + offset))) & np.uint32(0xFF)
        ]
    return np.uint32(state ^ np.uint32(0xFFFFFFFF))


crc_bytes = _crc_bytes_instruction if HAS_CRC_INSTRUCTION else _crc_bytes_tables


@njit(**INLINED)
def mix_row(node: Any, crc: Any) -> Any:
    """What one row adds to the sum: a hash of its node id and the CRC-32C of its bytes, both uint64."""
    return mix64(((node << np.uint64(32) ^ node >> np.uint64(32)) ^ crc) + GOLDEN)


@njit(cache=True, nogil=True)
def digest_rows(address: int, row_bytes: int, nodes: NDArray[Any], first_node: int, count: int) -> np.uint64:
    """The sum over ``count`` rows that lie at an address one after the other.

    Their node ids are ``nodes`` [count], or ``first_node`` and up where ``nodes`` is empty.
    """
    total = np.uint64(0)
    for i in range(count):
        node = np.uint64(nodes[i]) if nodes.shape[0] > 0 else np.uint64(first_node + i)
        crc = np.uint64(crc_bytes(address + i * row_bytes, row_bytes))
        total += mix_row(node, crc)
    return total


@njit(cache=True, nogil=True)
def checksum_rows(address: int, row_bytes: int, out: NDArray[np.uint32]) -> None:
    """The CRC-32C of each of the rows that lie at an address one after the other, into ``out`` [rows]."""
    for i in range(out.shape[0]):
        out[i] = crc_bytes(address + i * row_bytes, row_bytes)


def add(a: int, b: int) -> int:
    """Sum of two partial digests."""
    return (a + b) & (2**64 - 1)
