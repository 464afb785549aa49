"""CRC-32C of pages, with the instruction and with tables, against google-crc32c."""

from __future__ import annotations

import hashlib

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from featstore.base import checksum
from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.base.native import HAS_CRC_INSTRUCTION, address_of
from featstore.storage import rows_digest

PAGE = 4096


@njit
def _by_tables(address, pages, out):
    for page in range(pages):
        out[page] = checksum._crc_page_tables(address + page * 4096, address)


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
@settings(max_examples=60)
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


@given(pages=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_tables_are_bit_identical(pages: int, seed: int) -> None:
    data = random_bytes(pages * PAGE, seed)
    out = np.zeros(pages, np.uint32)
    _by_tables(address_of(data), pages, out)
    assert out.tolist() == twin(data.tobytes())


@given(following=st.integers(-(2**63), 2**63 - 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_page_that_follows_need_not_be_there(following: int, seed: int) -> None:
    data = random_bytes(PAGE, seed)
    assert [_by_default(address_of(data), following)] == twin(data.tobytes())


def test_instruction_is_used_where_the_processor_has_it() -> None:
    wanted = checksum._crc_page_instruction if HAS_CRC_INSTRUCTION else checksum._crc_page_tables
    assert checksum.crc_page is wanted


@given(count=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
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
