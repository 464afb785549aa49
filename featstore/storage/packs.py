"""The directory ``STORE/packs``: which names are given there, and who may write and delete under them.

- ``NAME``: a compiled trace, a store of its own, with a writer's lock; ``NAME.forecast``: one that is decided
  and never written.
- ``NAME.trace``: the trace that a loader of mode compiled compiles from.
- ``NAME.preparing``: a lock, held by a loader of mode compiled while it records and compiles under that
  name.
- ``NAME.rolling``: a lock, held by a :class:`featstore.loaders.rolling.RollingLoader` as long as it is open.
  As long as the file is there, ``NAME-0``, ``NAME-1`` and their traces are the loader's, or, when nobody
  holds it, what a killed one has left.

What is not proven to be featstore's by name, lock and manifest is neither written nor deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from featstore.base.folders import is_file, is_folder, is_taken, real_path
from featstore.errors import ArgumentError, StoreExistsError
from featstore.storage.belongings import TRACE
from featstore.storage.disk import Disk
from featstore.storage.generations import remove_store, writer_lock
from featstore.storage.locks import Lock
from featstore.storage.manifest import check_name

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

PACKS = "packs"
FORECAST, TRACES, PREPARING, ROLLING = ".forecast", ".trace", ".preparing", ".rolling"
EPISODES = ("-0", "-1")


def packs_directory(store: OpenStore) -> Path:
    """Where the compiled traces of a store are, to read them: of one that is split by hosts, in its part."""
    return store.on_disk.path / PACKS


def packs_to_write(store: OpenStore) -> Path:
    """The same to write there: that store's path is resolved, and ``packs`` in it may be no link."""
    return real_path(store.on_disk.path) / PACKS


def check_pack_name(name: str) -> None:
    """Raise ArgumentError for what cannot be the name of a compiled trace."""
    check_name(name, "compiled trace", ArgumentError)
    for ending in (FORECAST, TRACES, PREPARING, ROLLING):
        if name.endswith(ending):
            raise ArgumentError(
                f"compiled trace name {name!r} is not allowed: {ending!r} at the end has a meaning of its own"
            )


class Episode(str):
    """The name of an episode, given by the loader of fresh mini-batches that holds it."""

    __slots__ = ()


def check_no_episode(packs: Path, name: str) -> None:
    """Raise StoreExistsError where a name is that of an episode of a loader of fresh mini-batches, and
    another than it gives it."""
    for episode in () if isinstance(name, Episode) else EPISODES:
        if name.endswith(episode) and is_file(packs / (name.removesuffix(episode) + ROLLING)):
            raise StoreExistsError(
                f"{packs / name} belongs to the loader of fresh mini-batches "
                f"{name.removesuffix(episode)!r}, or is left from one (`featstore gc` removes it "
                "then): give another name"
            )


def preparing(packs: Path, name: str) -> Lock:
    """Hold a name for recording and compiling. Raises StoreLockedError."""
    lock = _preparing(packs, name, make=True)
    try:
        if lock.fresh:
            lock.mark()
    except BaseException:
        lock.release(remove=True)
        raise
    return lock


def left_by_preparing(packs: Path, name: str, *, look: bool = False) -> Lock:
    """Hold a name that a killed process has prepared a compiled trace under. Raises as
    :func:`left_by_rolling`."""
    return _preparing(packs, name, make=False, look=look)


def _preparing(packs: Path, name: str, *, make: bool, look: bool = False) -> Lock:
    return Lock(
        packs / f"{name}{PREPARING}", f"the compiled trace {name!r} in {packs} is being prepared",
        "give each process a name= of its own, or wait for it and use reuse=True", make=make, look=look,
        marked=True,
    )  # fmt: skip


def rolling(packs: Path, name: str) -> Lock:
    """Hold a name for a loader of fresh mini-batches, and remove what a killed one has left under it. Raises
    StoreLockedError, and StoreExistsError where something else has the names of its episodes."""
    lock = _rolling(packs, name, make=True)
    try:
        if lock.fresh:
            for path in _episodes(packs, name):
                if is_taken(path):
                    raise StoreExistsError(
                        f"{path} was not made by a loader of fresh mini-batches, which would write "
                        "there: give another name="
                    )
            lock.mark(durably=True)  # before what it tells of
        else:
            remove_episodes(packs, name, Disk())
    except BaseException:
        lock.release(remove=lock.fresh)
        raise
    return lock


def left_by_rolling(packs: Path, name: str, *, look: bool = False) -> Lock:
    """Hold a name to remove what a killed loader of fresh mini-batches has left; ``look`` as for a lock.
    Raises StoreLockedError where one is alive, FormatError where the file is none of its locks,
    FileNotFoundError."""
    return _rolling(packs, name, make=False, look=look)


def _rolling(packs: Path, name: str, *, make: bool, look: bool = False) -> Lock:
    return Lock(
        packs / f"{name}{ROLLING}", f"the loader of fresh mini-batches {name!r} in {packs} is in use",
        "give each process and each loader a name= of its own, or close() that one", make=make, look=look,
        marked=True,
    )  # fmt: skip


def _episodes(packs: Path, name: str) -> list[Path]:
    return [packs / f"{name}{episode}{ending}" for episode in EPISODES for ending in ("", TRACES)]


def remove_episodes(packs: Path, name: str, disk: Disk) -> None:
    """Remove both episodes of a loader. The caller holds its lock."""
    for path in _episodes(packs, name):
        (remove_trace if path.name.endswith(TRACES) else remove_pack)(path, disk)


def remove_pack(path: Path, disk: Disk, *, force: bool = True, dry_run: bool = False) -> bool:
    """Remove a compiled trace that the caller's lock proves to be its own, or what there is of one; without
    ``force``, not while somebody reads it: False."""
    if not is_folder(path):
        return True
    with writer_lock(path, look=dry_run):
        return remove_store(path, disk, dry_run=dry_run, force=force)


def remove_trace(path: Path, disk: Disk, *, dry_run: bool = False) -> bool:
    """Remove a trace that the caller's lock proves to be its own, or what there is of one."""
    if is_folder(path):
        with writer_lock(path, look=dry_run):
            if not dry_run:
                disk.rmtree(path, TRACE)
    return True
