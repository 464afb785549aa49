"""Belongings: what in a directory is featstore's own, by name and kind, and may be deleted.

Nothing is deleted because of where it lies. A directory is gone through by descriptors that follow no link; a
regular file goes whose path below the directory is one that featstore gives, and a directory that is empty
then. All else stays, with the directories above it. Whether the directory as a whole is featstore's, the
caller has to prove before: by its lock, its manifest or its journal (:mod:`featstore.storage.generations`,
:mod:`featstore.storage.packs`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featstore.base.files import RegularFile
from featstore.base.folders import folder, is_file, is_taken, open_folder
from featstore.base.system import refusal
from featstore.errors import StoreExistsError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}"
_KINDS = r"(?:tables|arrays|graphs|keys)"
_PART = rf"{_KINDS}(?:/{_NAME})"
_SCRATCH = (
    "spool|next|rows|host|ahead|moves|misses|packed|shared|found|buckets|resident|device"
    "|key-(?:values|ends|hashes|pairs|sorted|ids|edges|order|runs)"
)

#: The end of a name under which :meth:`featstore.storage.disk.Disk.replace_file` writes; older versions had
#: no number in it.
TEMPORARY = r"(?:\.[0-9a-f]{16})?\.tmp"


@dataclass(frozen=True)
class Belongings:
    """Which paths below a directory, with "/" between names, are featstore's files and folders."""

    files: re.Pattern[str]
    folders: re.Pattern[str]

    @classmethod
    def of(cls, files: str, folders: str = r"(?!)") -> Belongings:
        return cls(re.compile(files, re.ASCII), re.compile(folders, re.ASCII))


#: Of a generation's directory.
GENERATION = Belongings.of(
    rf"(?:{_KINDS}(?:/{_NAME}){{0,6}}/)?zarr\.json|{_PART}{{1,6}}/c(?:\.[0-9]+)*",
    rf"{_KINDS}(?:/{_NAME}){{0,6}}",
)
#: Of a spill directory.
SPILL = Belongings.of(
    rf"{_NAME}\.(?:[0-9]+|ids|{_SCRATCH})|graph-(?:indices|edges|ids|indptr|values)-[a-z0-9_]+\.bin"
    rf"|{_NAME}\.spill/(?:c[0-9]+|checksums)",
    rf"{_NAME}\.spill",
)
#: Of a trace's directory.
TRACE = Belongings.of(rf"trace\.log|recording\.log|recording\.json(?:{TEMPORARY})?|lock")
#: Of a store's directory, when its manifest and its generations are gone.
STORE = Belongings.of(rf"featstore\.json{TEMPORARY}|lock")
#: Of a directory that goes when it is empty.
NOTHING = Belongings.of(r"(?!)")


def begins_with(path: Path, begin: bytes) -> bool:
    """Whether there is a regular file with these first bytes, or one whose bytes did not reach the disk (no
    bytes, or zeros). Raises DeviceError."""
    if not is_file(path):
        return False
    block = np.empty(len(begin), np.uint8)
    with RegularFile(path) as file:
        data = block[: file.read_into(block, 0, 0)].tobytes()
    return data in (begin[: len(data)], bytes(len(data)))


def is_ours(path: Path, begin: bytes) -> bool:
    """Whether there is anything of that name; it has to begin as featstore's does. Raises StoreExistsError
    where it does not, DeviceError."""
    if not is_taken(path):
        return False
    if begins_with(path, begin):
        return True
    raise StoreExistsError(
        f"{path} is not featstore's, and is left alone: move it away, or give another path"
    )


@dataclass
class Surveyed:
    """What there is in a directory: bytes and number of its own files, and what is foreign."""

    bytes: int = 0
    files: int = 0
    foreign: list[Path] = field(default_factory=list)


def survey(path: Path, own: Belongings) -> Surveyed:
    """What of a directory is featstore's, and what is not. Raises FormatError for a link on the way,
    DeviceError."""
    found = Surveyed()
    try:
        with folder(path, listed=True) as descriptor:
            _walk(path, descriptor, "", own, found, remove=False)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise refusal(error, path, "look through") from error
    return found


def remove(path: Path, own: Belongings) -> Surveyed:
    """Remove from a directory what is featstore's, and it, too, if nothing is left. One that is not there is
    fine. Returns what was removed and what stays. Raises FormatError for a link on the way, OSError."""
    found = Surveyed()
    try:
        with folder(path, listed=True) as descriptor:
            _walk(path, descriptor, "", own, found, remove=True)
    except FileNotFoundError:
        return found
    if not found.foreign:
        with folder(path.parent) as above:
            _rmdir(path, path.name, above, found)
    return found


def _walk(
    root: Path, descriptor: int, prefix: str, own: Belongings, found: Surveyed, *, remove: bool
) -> None:
    for name in sorted(os.listdir(descriptor)):
        path = prefix + name
        try:
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and own.files.fullmatch(path):
            if remove:
                os.unlink(name, dir_fd=descriptor)
            found.bytes += status.st_size
            found.files += 1
        elif stat.S_ISDIR(status.st_mode) and own.folders.fullmatch(path):
            _folder(root, descriptor, path, own, found, remove=remove)
        else:
            found.foreign.append(root / path)


def _folder(root: Path, above: int, path: str, own: Belongings, found: Surveyed, *, remove: bool) -> None:
    name, before = path.rpartition("/")[2], len(found.foreign)
    try:
        descriptor = open_folder(name, above)
    except NotADirectoryError:  # it was swapped for a link
        found.foreign.append(root / path)
        return
    except FileNotFoundError:
        return
    try:
        _walk(root, descriptor, f"{path}/", own, found, remove=remove)
    finally:
        os.close(descriptor)
    if remove and len(found.foreign) == before:
        _rmdir(root / path, name, above, found)


def _rmdir(path: Path, name: str, above: int, found: Surveyed) -> None:
    try:
        os.rmdir(name, dir_fd=above)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        found.foreign.append(path)  # somebody has put something there, or in its place
