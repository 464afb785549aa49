"""The door for writes: pages and their checksums in one step, and files that have their place beforehand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

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


def write(disk: Disk, file: File, sums: File, pages: np.ndarray, offset: int = 0, at: int = 0) -> None:
    """Write pages as one run."""
    disk.write_pages(pages, [file], np.array([[offset, 0, len(pages) // PAGE_BYTES, at]]), sums)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 9), st.booleans(), st.randoms())
def test_pages_and_checksums_are_written_as_by_the_twin(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], gap: int, aligned: bool, random: Random
) -> None:
    """Runs of one memory, in any order, into two files."""
    folder, total = tmp_path_factory.mktemp("disk"), sum(counts)
    pages = pages_of(total, 1) if aligned else pages_of(total + 1, 1)[8 : 8 + total * PAGE_BYTES]
    runs, into, at = [], [], 0
    for count in counts:
        runs.append([(at + gap) * PAGE_BYTES, at * PAGE_BYTES, count, 4 * (at + gap)])
        into.append(random.randrange(2))
        at += count
    order = random.sample(range(len(counts)), len(counts))
    contents = []
    for disk in (Disk(), Watching()):
        files, sums = [disk.create(folder / name, direct=True) for name in "ab"], disk.create(folder / "sums")
        disk.write_pages(pages, [files[into[i]] for i in order], np.array(runs)[order], sums)
        contents.append([(folder / name).read_bytes() for name in ("a", "b", "sums")])
        for one in (*files, sums):
            disk.close(one)
    assert contents[0] == contents[1]
    for which, content in enumerate(contents[0][:2]):
        expected = np.zeros((gap + total, PAGE_BYTES), np.uint8)
        end = 0
        for (offset, begin, count, _), file in zip(runs, into, strict=True):
            if file == which:
                end = offset // PAGE_BYTES + count
                expected[end - count : end] = pages[begin : begin + count * PAGE_BYTES].reshape(count, -1)
        assert content == expected[:end].tobytes()
    assert contents[0][2] == bytes(4 * gap) + crc_pages(pages).tobytes()


def test_who_watches_writes_sees_both(tmp_path: Path) -> None:
    disk = Watching()
    file, sums = opened(disk, tmp_path)
    write(disk, file, sums, pages_of(3, 0), at=8)
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
        write(disk, files["pages"], files["sums"], pages_of(2, 1), 2 * PAGE_BYTES, 16)
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
    write(disk, file, sums, pages)
    assert (tmp_path / "pages").read_bytes() == pages.tobytes()
    assert (tmp_path / "sums").read_bytes() == crc_pages(pages).tobytes()


def test_a_file_has_its_place_before_it_is_written(tmp_path: Path) -> None:
    disk = Disk()
    file, sums = opened(disk, tmp_path)
    write(disk, file, sums, pages_of(1, 3))
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
