"""Folders that are reached through no symbolic link.

What writes, renames or deletes goes step by step from the root to the folder in which it acts, through
descriptors, and takes no step that is a symbolic link. So a directory that is swapped for a link between a
look and a deed leads nowhere: the deed fails, or is done where the look was. A path that a person gives may
well lead through links; it is resolved once, by :func:`real_path`, and after that no more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from featstore.base.system import asking
from featstore.errors import FormatError

_STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def real_path(path: str | os.PathLike[str]) -> Path:
    """Where a path leads that a person has given: absolute, all links on the way resolved. It need not
    exist."""
    return Path(os.path.realpath(path))


@contextmanager
def folder(path: Path, *, listed: bool = False) -> Iterator[int]:
    """A descriptor of the directory at ``path``, absolute, for the ``dir_fd`` of :mod:`os`; with ``listed``,
    to list and fsync it, too.

    Raises FormatError, which names the step, where one is a symbolic link; OSError.
    """
    parts = path.parts[1:]
    descriptor = os.open(path.anchor, os.O_RDONLY | _STEP if listed and not parts else os.O_PATH | _STEP)
    try:
        for k, part in enumerate(parts):
            last = k == len(parts) - 1
            try:
                below = os.open(
                    part, (os.O_RDONLY if listed and last else os.O_PATH) | _STEP, dir_fd=descriptor
                )
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP) and is_link(part, descriptor):
                    raise a_link(Path(path.anchor, *parts[: k + 1])) from None
                raise
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def open_folder(name: str, above: int) -> int:
    """A descriptor of a directory in an open one, to list and fsync it; the caller closes it. Raises OSError,
    NotADirectoryError for a link."""
    return os.open(name, os.O_RDONLY | _STEP, dir_fd=above)


def a_link(path: Path) -> FormatError:
    """What is said where a link stands in the way."""
    return FormatError(
        f"{path} is a symbolic link, and featstore writes, renames and deletes through none: put the "
        "directory itself there, or mount the other disk at that place (mount --bind)"
    )


def is_link(name: str, descriptor: int) -> bool:
    """Whether a name in an open folder is a symbolic link."""
    mode = mode_of(name, descriptor)
    return mode is not None and stat.S_ISLNK(mode)


def mode_of(name: str, descriptor: int) -> int | None:
    """The mode of a name in an open folder, itself and not what it leads to; None where there is nothing of
    that name."""
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def is_folder(path: Path) -> bool:
    """Whether there is a directory, and no link to one."""
    return _is(path, stat.S_ISDIR)


def is_file(path: Path) -> bool:
    """Whether there is a regular file, and no link to one."""
    return _is(path, stat.S_ISREG)


def is_taken(path: Path) -> bool:
    """Whether anything has this name, be it a link that leads nowhere. Raises DeviceError where the device
    cannot tell."""
    return _is(path, lambda mode: True)


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    with asking(path, "look at"):
        try:
            return kind(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
