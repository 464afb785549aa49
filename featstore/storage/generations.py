"""Generations: where a pack writes, how it commits, and what is collected afterwards.

A store directory holds ``featstore.json`` (the manifest of the committed generation), the directories ``g000001``, ``g000002``, ... and,
while a pack is under way, a journal and a spill directory beside its generation. One writer at a time holds ``lock``. The
commit: every file of the generation has been fsynced, then every directory, then the manifest is written under another name,
fsynced, renamed, and the store's directory fsynced. Before the rename the old store stands, after it the new one.

Readers hold a shared lock on the directory of the generation they opened; :func:`collect` removes only what it can lock alone.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featstore.disk import Disk
from featstore.errors import DeviceError, FeatstoreError, IncompleteStoreError, StoreExistsError, StoreLockedError
from featstore.manifest import MANIFEST_NAME, Manifest, encode, read_manifest

_GENERATION = re.compile(r"(g[0-9]{6,})(\.journal|\.spill|)(\.tmp)?")


@contextmanager
def writer_lock(store: Path) -> Iterator[None]:
    """Be the only writer of a store. Raises StoreLockedError that names the process which is."""
    path = store / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise DeviceError(error.errno or 5, path, None, "open") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StoreLockedError(
                f"{store} is being written by process {holder}; wait for it to end, or stop it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def names(store: Path) -> dict[str, list[Path]]:
    """All generations that have left anything in a store: name to the paths that belong to it."""
    found: dict[str, list[Path]] = {}
    for entry in sorted(store.iterdir()):
        match = _GENERATION.fullmatch(entry.name)
        if match:
            found.setdefault(match.group(1), []).append(entry)
    return found


def current(store: Path) -> Manifest | None:
    """The committed manifest, or None where there is none."""
    if not (store / MANIFEST_NAME).exists():
        return None
    return read_manifest(store)[0]


class Generation:
    """The generation that a pack writes: its name and paths."""

    def __init__(self, store: Path, name: str) -> None:
        self.store = store
        self.name = name
        self.directory = store / name
        self.journal = store / f"{name}.journal"
        self.spill = store / f"{name}.spill"


def begin(store: Path, disk: Disk, *, resume: bool, overwrite: bool) -> tuple[Generation, bool]:
    """The generation to write, and whether it goes on from an interruption. The caller holds the writer lock.

    Raises StoreExistsError where there is something that neither option allows to touch.
    """
    committed = current(store)
    if committed is not None and committed.read_only_because:
        raise FeatstoreError(f"{store} cannot be written: {committed.read_only_because}")
    known = names(store)
    done = committed.generation if committed else ""
    unfinished = [n for n in known if n != done and Generation(store, n).journal.exists()]
    if resume and unfinished:
        return Generation(store, unfinished[-1]), True
    if resume and committed is None:
        raise IncompleteStoreError(f"there is nothing to resume in {store}; run the pack without --resume")
    if resume:
        raise StoreExistsError(f"there is nothing to resume in {store}: its pack was completed")
    if unfinished and not overwrite:
        raise StoreExistsError(
            f"{store} holds an unfinished pack; go on with --resume (the same input and options), or start anew with --overwrite"
        )
    if committed is not None and not overwrite:
        raise StoreExistsError(f"{store} already holds a store; give another path, or replace it with --overwrite")
    held = [
        name for name in known if name != done and not _remove_generation(disk, Generation(store, name), known[name])
    ]
    number = max((int(name[1:]) for name in [*held, done] if name), default=0) + 1
    return Generation(store, f"g{number:06d}"), False


def commit(store: Path, disk: Disk, manifest: Manifest) -> None:
    """Make a generation, all of whose files and directories are durable, the store's content."""
    disk.replace_file(store / MANIFEST_NAME, encode(manifest))


def collect(store: Path, disk: Disk, *, unfinished: bool = False, dry_run: bool = False) -> list[Path]:
    """Remove what no manifest and no reader refers to; returns it. The caller holds the writer lock.

    An unfinished pack is kept, because it can be resumed, unless ``unfinished`` is true.
    """
    committed = current(store)
    removed: list[Path] = []
    for name, paths in names(store).items():
        generation = Generation(store, name)
        if committed is not None and name == committed.generation:
            paths = [p for p in paths if p != generation.directory]
        elif generation.journal.exists() and not unfinished:
            continue
        if paths and _remove_generation(disk, generation, paths, dry_run=dry_run):
            removed += paths
    if removed and not dry_run:
        disk.fsync_dir(store)
    return removed


def remove_store(store: Path, disk: Disk, *, dry_run: bool = False) -> bool:
    """Remove a store and all that is in it, unless a reader holds one of its generations; False if one does. The caller holds
    the writer lock."""
    committed = current(store)
    for name, paths in names(store).items():
        generation = Generation(store, name)
        if committed is not None and name == committed.generation:
            paths = [store / MANIFEST_NAME, *paths]  # the manifest first: nobody opens what is being removed
        if not _remove_generation(disk, generation, paths, dry_run=dry_run):
            return False
    if not dry_run:
        disk.rmtree(store)
        disk.fsync_dir(store.parent)
    return True


def _remove_generation(disk: Disk, generation: Generation, paths: list[Path], *, dry_run: bool = False) -> bool:
    """Remove what belongs to a generation, unless a reader holds it; False if one does. The lock is kept while removing,
    so that no reader slips in: one that waits for it finds the directory gone and looks at the manifest again."""
    descriptor = None
    if generation.directory in paths:
        descriptor = os.open(generation.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        for path in [] if dry_run else paths:
            if path.is_dir() and not path.is_symlink():
                disk.rmtree(path)
            else:
                disk.unlink(path)
        return True
    finally:
        if descriptor is not None:
            os.close(descriptor)
