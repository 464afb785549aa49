"""Files for people and other programs, written beside no store: there whole or not at all, and over nothing
that is there unless that was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_flag, as_path
from featstore.base.folders import is_file, is_taken, real_path
from featstore.errors import ArgumentError, StoreExistsError
from featstore.storage.disk import Disk


def given_place(path: str | os.PathLike[str], name: str) -> Path:
    """The place that a person has given for a file, in the argument of this name: links on the way to it
    are resolved, one in its place is not."""
    given = Path(os.path.abspath(as_path(path, name)))
    return real_path(given.parent) / given.name


def check_writable(path: Path, overwrite: bool) -> None:
    """Before what is to be written there is made: raise ArgumentError where there is no folder for it, or
    none that may be written to, and see :func:`check_free`."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is no directory"
        raise ArgumentError(f"{path}: {folder} {why}: make it so first, or give another path")
    check_free(path, overwrite)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise StoreExistsError where something has this name that may not be replaced."""
    if is_taken(path) and not (overwrite and is_file(path)):
        raise StoreExistsError(
            f"{path} is there already: "
            + ("give overwrite to replace it" if is_file(path) else "move it away, for it is no file")
        )


def write_whole(path: str | os.PathLike[str], data: bytes, overwrite: bool) -> Path:
    """Write a file; returns its path. Raises ArgumentError, StoreExistsError, DiskFullError, DeviceError."""
    target = given_place(path, "path")
    check_free(target, as_flag(overwrite, "overwrite"))
    replace_free(target, iter([data]), overwrite)
    return target


def replace_free(path: Path, data: Iterator[bytes | NDArray[np.uint8]], overwrite: bool) -> None:
    """Write a file, and look again before it gets its name: another may have come meanwhile."""

    def pieces() -> Iterator[bytes | NDArray[np.uint8]]:
        yield from data
        check_free(path, overwrite)

    Disk().replace_file(path, pieces())


def save_json(path: str | os.PathLike[str], schema: str, data: Mapping[str, Any], overwrite: bool) -> Path:
    """Write one JSON object, ``schema`` first; returns its path. Raises what :func:`write_whole` raises."""
    encoded = msgspec.json.encode({"schema": schema, **data}, enc_hook=float)
    return write_whole(path, msgspec.json.format(encoded, indent=2) + b"\n", overwrite)
