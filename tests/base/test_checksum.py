"""CRC-32C of pages, folded, with the instruction and with tables, against google-crc32c."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from featstore.base import checksum
from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.base.native import HAS_CRC_INSTRUCTION, HAS_FOLDING, address_of
from featstore.storage import rows_digest

PAGE = 4096


def ways() -> dict[str, Any]:
    """What this processor can compute a page's checksum by, the fastest first."""
    able = [HAS_FOLDING, HAS_CRC_INSTRUCTION, True]
    made = ["_crc_page_folded", "_crc_page_instruction", "_crc_page_tables"]
    return {name: getattr(checksum, name) for name, can in zip(made, able, strict=True) if can}


def kernel_of(way: Any) -> Callable[[int, int, Any], None]:
    @njit
    def by_way(address, pages, out):
        for page in range(pages):
            out[page] = way(address + page * 4096, address + (page + 1) * 4096)

    return by_way


KERNELS = {name: kernel_of(way) for name, way in ways().items()}


@njit
def _by_default(address, following):
    return checksum.crc_page(address, following)


@njit
def _bytes_by_tables(address, count):
    return rows_digest._crc_bytes_tables(address, count)


@njit
def _bytes_by_default(address, count):
    return rows_digest.crc_bytes(address, count)


def twin(data: bytes) -> list[int]:
    """google-crc32c of each page, the last one filled up with zeros."""
    return [google_crc32c.value(data[at : at + PAGE].ljust(PAGE, b"\0")) for at in range(0, len(data), PAGE)]


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@given(count=st.integers(0, 5 * PAGE), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=35)
def test_pages_match_google_crc32c(count: int, seed: int) -> None:
    data = random_bytes(count, seed)
    assert crc_pages(data).tolist() == twin(data.tobytes())


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1023, 1024, 4095, 4096, 4097, 8191, 8192, 12_289])
def test_partial_pages_at_the_edges(count: int) -> None:
    data = random_bytes(count, count)
    out = crc_pages(data)
    assert out.dtype == np.uint32
    assert len(out) == -(-count // PAGE)
    assert out.tolist() == twin(data.tobytes())


@pytest.mark.parametrize("fill", [0, 0xFF, 0x80])
def test_constant_pages(fill: int) -> None:
    data = np.full(2 * PAGE + 5, fill, np.uint8)
    assert crc_pages(data).tolist() == twin(data.tobytes())


@pytest.mark.parametrize("way", KERNELS)
@given(pages=st.integers(1, 4), start=st.integers(0, 63), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_all_ways_are_bit_identical(way: str, pages: int, start: int, seed: int) -> None:
    data = random_bytes(pages * PAGE + start, seed)[start:]
    out = np.zeros(pages, np.uint32)
    KERNELS[way](address_of(data), pages, out)
    assert out.tolist() == twin(data.tobytes())


@pytest.mark.parametrize("way", KERNELS)
def test_each_byte_of_a_page_counts_where_it_stands(way: str) -> None:
    """One byte that is not zero, at each place: what is folded with a wrong factor is wrong at some."""
    data, out = np.zeros(PAGE, np.uint8), np.zeros(1, np.uint32)
    for at in range(PAGE):
        data[at] = at % 255 + 1
        KERNELS[way](address_of(data), 1, out)
        assert out[0] == google_crc32c.value(data.tobytes()), at
        data[at] = 0


@given(following=st.integers(-(2**63), 2**63 - 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=35)
def test_the_page_that_follows_need_not_be_there(following: int, seed: int) -> None:
    data = random_bytes(PAGE, seed)
    assert [_by_default(address_of(data), following)] == twin(data.tobytes())


def test_the_fastest_way_is_used() -> None:
    assert checksum.crc_page is next(iter(ways().values()))


PLAIN = """
import numpy as np
from featstore.base import checksum, native
print(native.HAS_FOLDING, native.HAS_CRC_INSTRUCTION, checksum.crc_pages(np.arange(9000).astype(np.uint8)))
"""


@pytest.mark.parametrize("asked", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_ENABLE_AVX": "0"}])
def test_what_numba_is_told_not_to_compile_is_not_used(asked: dict[str, str]) -> None:
    """It would end the process. And what is computed is the same."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], env=os.environ | asked, capture_output=True, text=True, timeout=60
    )
    instruction = HAS_CRC_INSTRUCTION and "NUMBA_CPU_NAME" not in asked
    sums = crc_pages(np.arange(9000).astype(np.uint8))
    assert done.stdout == f"False {instruction} {sums}\n", done.stderr


@given(count=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_checksums_of_rows_match_google_crc32c(count: int, seed: int) -> None:
    data = random_bytes(max(count, 1), seed)
    expected = google_crc32c.value(data[:count].tobytes())
    assert _bytes_by_tables(address_of(data), count) == expected
    assert _bytes_by_default(address_of(data), count) == expected


def test_every_flipped_bit_is_found() -> None:
    data = random_bytes(PAGE, 5)
    right = crc_pages(data)[0]
    for bit in range(0, PAGE * 8, 97):
        data[bit >> 3] ^= 1 << (bit & 7)
        assert crc_pages(data)[0] != right
        data[bit >> 3] ^= 1 << (bit & 7)
    assert crc_pages(data)[0] == right


def test_unaligned_data_and_given_out() -> None:
    data = random_bytes(3 * PAGE + 1, 7)[1:]
    out = np.zeros(3, np.uint32)
    assert crc_pages(data, out) is out
    assert out.tolist() == twin(data.tobytes())


def test_digest_is_sha256_of_little_endian_checksums() -> None:
    sums = np.array([1, 2**31, 0xDEADBEEF], np.uint32)
    assert digest_of_checksums(sums) == hashlib.sha256(sums.astype("<u4").tobytes()).hexdigest()
    assert digest_of_checksums(sums.astype(">u4")) == digest_of_checksums(sums)
    assert digest_of_checksums(np.empty(0, np.uint32)) == hashlib.sha256(b"").hexdigest()
