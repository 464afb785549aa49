"""The door for writes: pages and their checksums in one step, and files that have their place beforehand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plain_writes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base.buffers import aligned_buffer
from featstore.base.checksum import crc_pages
from featstore.errors import DeviceError, DiskFullError
from featstore.storage import disk as disk_module
from featstore.storage.disk import Disk, File
from featstore.units import PAGE_BYTES


class Watching(Disk):
    """Sees every write."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def write(self, file: File, offset: int, data: object) -> None:
        self.seen.append((file.path.name, offset, memoryview(data).nbytes))  # type: ignore[arg-type]
        super().write(file, offset, data)  # type: ignore[arg-type]


def pages_of(count: int, seed: int) -> np.ndarray:
    out = aligned_buffer(count * PAGE_BYTES)
    out[:] = np.random.default_rng(seed).integers(0, 256, len(out), np.uint8)
    return out


def opened(disk: Disk, folder: Path) -> tuple[File, File]:
    return disk.create(folder / "pages", direct=True), disk.create(folder / "sums")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 50), st.booleans())
def test_pages_and_checksums_are_written_as_by_the_twin(
    tmp_path_factory: pytest.TempPathFactory, count: int, first: int, at: int, aligned: bool
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    pages = pages_of(count, count) if aligned else pages_of(count + 1, count)[8 : 8 + count * PAGE_BYTES]
    contents = []
    for disk in (Disk(), Watching()):
        file, sums = opened(disk, folder)
        disk.write_pages(file, first * PAGE_BYTES, pages, sums, 4 * at)
        contents.append([(folder / name).read_bytes() for name in ("pages", "sums")])
        for one in (file, sums):
            disk.close(one)
    assert contents[0] == contents[1]
    assert contents[0][0] == bytes(first * PAGE_BYTES) + pages.tobytes()
    assert contents[0][1] == bytes(4 * at) + crc_pages(pages).tobytes()


def test_who_watches_writes_sees_both(tmp_path: Path) -> None:
    disk = Watching()
    file, sums = opened(disk, tmp_path)
    disk.write_pages(file, 0, pages_of(3, 0), sums, 8)
    assert disk.seen == [("pages", 0, 3 * PAGE_BYTES), ("sums", 8, 12)]


@pytest.mark.parametrize("which", ["pages", "sums"])
@pytest.mark.parametrize("plain", [False, True])
def test_what_the_system_refuses_names_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, plain: bool
) -> None:
    if plain:
        plain_writes.write_plainly(monkeypatch)
    disk = Disk()
    files = dict(zip(("pages", "sums"), opened(disk, tmp_path), strict=True))
    os.close(files[which].descriptor)
    files[which].descriptor = os.open(tmp_path / which, os.O_RDONLY)
    with pytest.raises(DeviceError, match=which) as caught:
        disk.write_pages(files["pages"], 2 * PAGE_BYTES, pages_of(2, 1), files["sums"], 16)
    assert caught.value.errno == errno.EBADF
    assert caught.value.offset == (2 * PAGE_BYTES if which == "pages" else 16)
    assert ((tmp_path / "pages").stat().st_size > 0) == (which == "sums")


def part(of: Callable[..., int], most: int) -> Callable[..., int]:
    def write(descriptor: int, data: memoryview, offset: int) -> int:
        return of(descriptor, memoryview(data)[:most], offset)

    return write


@pytest.mark.parametrize("most", [PAGE_BYTES, 3 * PAGE_BYTES])
def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    plain_writes.write_plainly(monkeypatch)
    monkeypatch.setattr(os, "pwrite", part(os.pwrite, most))
    disk, pages = Disk(), pages_of(7, 2)
    file, sums = opened(disk, tmp_path)
    disk.write_pages(file, 0, pages, sums, 0)
    assert (tmp_path / "pages").read_bytes() == pages.tobytes()
    assert (tmp_path / "sums").read_bytes() == crc_pages(pages).tobytes()


def test_a_file_has_its_place_before_it_is_written(tmp_path: Path) -> None:
    disk = Disk()
    file, sums = opened(disk, tmp_path)
    disk.write_pages(file, 0, pages_of(1, 3), sums, 0)
    before = (tmp_path / "pages").read_bytes()
    disk.allocate(file, 64 * PAGE_BYTES)
    status = (tmp_path / "pages").stat()
    assert status.st_size in (PAGE_BYTES, 64 * PAGE_BYTES)  # the first where the file system cannot
    if status.st_size > PAGE_BYTES:
        assert status.st_blocks * 512 >= 64 * PAGE_BYTES
    assert (tmp_path / "pages").read_bytes()[:PAGE_BYTES] == before[:PAGE_BYTES]
    disk.allocate(file, PAGE_BYTES)
    assert (tmp_path / "pages").stat().st_size == status.st_size, "it never shrinks"


def test_no_place_is_a_full_disk(tmp_path: Path) -> None:
    disk = Disk()
    file, _ = opened(disk, tmp_path)
    with pytest.raises((DiskFullError, DeviceError), match="pages"):
        disk.allocate(file, 1 << 62)
    os.close(file.descriptor)
    file.descriptor = os.open(tmp_path / "pages", os.O_RDONLY)
    with pytest.raises(DeviceError, match="allocate") as caught:
        disk.allocate(file, PAGE_BYTES)
    assert caught.value.errno == errno.EBADF


def test_where_the_file_system_cannot_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    class Without:
        @staticmethod
        def fallocate(*_: int) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(disk_module, "_LIBC", Without)
    disk = Disk()
    file, _ = opened(disk, tmp_path)
    disk.allocate(file, 1 << 30)
    assert (tmp_path / "pages").stat().st_size == 0
