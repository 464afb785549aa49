"""The door for reads: what comes through it, and what it says where nothing does."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.base.buffers import aligned_buffer
from featstore.base.files import RegularFile, open_given, open_stream, read_small
from featstore.errors import CorruptionError, DeviceError, FormatError

PAGE = 4096
SIZE = 3 * PAGE + 100
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "f"
    path.write_bytes(CONTENT.tobytes())
    return path


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Calls of ``os`` fail: openings that ask for direct reads, or reads through such a descriptor."""
    import fcntl

    real = getattr(os, name)

    def call(what: Any, *arguments: Any, **options: Any) -> Any:
        flags = arguments[0] if name == "open" else fcntl.fcntl(what, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(what, *arguments, **options)

    monkeypatch.setattr(os, name, call)


def test_bytes_come_from_where_they_are_asked_for(path: Path) -> None:
    with RegularFile(path, SIZE) as file:
        assert file.size_bytes == SIZE
        np.testing.assert_array_equal(file.read_at(77, 5000), CONTENT[77:5077])
        words = np.empty((2, 3), "<u4")
        assert file.read_into(words, 8) == 24
        assert words.tobytes() == CONTENT[8:32].tobytes()
        assert file.read_into(words, SIZE - 10, 4) == 10
        assert file.read_into(words, SIZE, 0) == 0


@pytest.mark.parametrize("direct", [False, True])
def test_what_ends_too_early_is_named_with_its_byte(path: Path, direct: bool) -> None:
    with RegularFile(path, direct=direct, advice="begin anew") as file:
        pages = aligned_buffer(2 * PAGE)
        assert file.read_into(pages, 2 * PAGE, PAGE + 100) == PAGE + 100
        np.testing.assert_array_equal(pages[: PAGE + 100], CONTENT[2 * PAGE :])
        with pytest.raises(
            CorruptionError, match="28 bytes more, found the end of the file; begin anew"
        ) as caught:
            file.read_into(pages, 2 * PAGE, PAGE + 128)
        assert (caught.value.path, caught.value.offset) == (str(path), SIZE)


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_without_direct_reads_the_page_cache_serves(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, name, errno.EINVAL)
    pages = aligned_buffer(PAGE)
    with RegularFile(path, direct=True) as file:
        assert file.direct == (name == "preadv")
        file.read_into(pages, PAGE)
        assert not file.direct
    np.testing.assert_array_equal(pages, CONTENT[PAGE : 2 * PAGE])


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_any_other_refusal_is_said(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, name, errno.EIO)
    with pytest.raises(DeviceError, match="EIO") as caught, RegularFile(path, direct=True) as file:
        file.read_into(aligned_buffer(PAGE), PAGE)
    assert caught.value.path == str(path)
    assert caught.value.offset == (None if name == "open" else PAGE)


def test_no_descriptor_is_left(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with RegularFile(path) as file:
        file.advise(os.POSIX_FADV_SEQUENTIAL)
    file.close()
    RegularFile(path)  # closed with its last reference
    with pytest.raises(CorruptionError):
        RegularFile(path, SIZE + 1)
    assert os.listdir("/proc/self/fd") == before


def test_links_and_what_is_no_file_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    for name, found in (("link", "a symbolic link"), (".", "not a regular file"), ("none", "no file")):
        with pytest.raises(CorruptionError, match=f"{found}.*; begin anew"):
            RegularFile(tmp_path / name, advice="begin anew")


def test_small_files_show_that_they_are_too_large(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    assert read_small(tmp_path / "link", SIZE) == CONTENT.tobytes()
    assert read_small(path, 10) == CONTENT[:11].tobytes()
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none", 10)
    with pytest.raises(FormatError, match="not a regular file"):
        read_small(tmp_path, 10)
    with pytest.raises(DeviceError, match="ENOTDIR"):
        read_small(path / "below", 10)


def test_what_a_person_gives_may_be_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    os.close(open_given(tmp_path / "link"))
    with open_stream(tmp_path / "link") as stream:
        assert stream.read() == CONTENT.tobytes()
    for opened in (open_given, open_stream):
        with pytest.raises(DeviceError, match="ENOENT"):
            opened(tmp_path / "none")
