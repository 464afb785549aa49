"""A scratch directory beside what is measured: of one process, held as long as it lives, and gone afterwards.

A process that is killed leaves its directory, and the next one that makes one there removes it: proven by its
name, by nobody holding it, and inside by the store's own lock. What is not proven stays, and is named in a
warning.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featstore.base.folders import folder, is_folder
from featstore.base.system import asking
from featstore.base.warning import warn
from featstore.errors import FeatstoreError
from featstore.storage.belongings import NOTHING
from featstore.storage.disk import Disk
from featstore.storage.generations import LOCK_NAME, remove_store, writer_lock
from featstore.storage.locks import held_alone, is_lock

_PREFIX = ".featstore-calibrate-"
_NAME = re.compile(re.escape(_PREFIX) + r"[A-Za-z0-9_]{8,16}", re.ASCII)
STORE_NAME = "store"


@contextmanager
def scratch_store(directory: Path) -> Iterator[Path]:
    """Where a temporary store may be packed under ``directory`` (absolute, resolved); removed afterwards.
    What killed processes left there is removed before.

    Raises DeviceError, DiskFullError; what is not proven to be left by one is named in a FeatstoreWarning.
    """
    _remove_left(directory)
    path, held = _made(directory)
    try:
        yield path / STORE_NAME
    finally:
        try:
            _remove(path)
        finally:
            os.close(held)


def _made(directory: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds it."""
    while True:
        path = directory / f"{_PREFIX}{secrets.token_hex(8)}"
        Disk().mkdir(path)
        held = held_alone(path, directory=True)
        if held is not None and is_folder(path):
            return path, held
        if held is not None:  # somebody took it for a killed process's before it was held
            os.close(held)


def _remove_left(directory: Path) -> None:
    with asking(directory, "list"), folder(directory, listed=True) as descriptor:
        names = [name for name in os.listdir(descriptor) if _NAME.fullmatch(name)]
    for path in [directory / name for name in sorted(names)]:
        if not is_folder(path):
            _leave(path, "it is no directory")
            continue
        held = held_alone(path, directory=True)
        if held is None:
            continue  # another process calibrates
        try:
            _remove(path)
        except FeatstoreError as error:
            _leave(path, str(error))
        finally:
            os.close(held)


def _remove(path: Path) -> None:
    """Remove a scratch directory that the caller holds, and of what is in it what is featstore's."""
    store, disk = path / STORE_NAME, Disk()
    try:
        if is_folder(store):
            with asking(store, "list"), folder(store, listed=True) as descriptor:
                empty = not os.listdir(descriptor)
            if empty:
                disk.rmtree(store, NOTHING)
            elif is_lock(store / LOCK_NAME):
                with writer_lock(store):
                    remove_store(store, disk, force=True)
    finally:  # on a full disk a store may be gone that could not be said to be gone for good
        found = disk.rmtree(path, NOTHING)
    if found.foreign:
        _leave(path, f"{found.foreign[0].name} in it is not proven to be featstore's")


def _leave(path: Path, why: str) -> None:
    warn(
        f"{path} looks like what a killed calibration leaves, and stays, because {why}: look at it, "
        "and delete it yourself",
    )
