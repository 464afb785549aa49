"""Generations: where a pack writes, how it commits, and what is collected afterwards.

A store directory holds ``featstore.json`` (the manifest of the committed generation), the directories
``g000001``, ``g000002``, ... and, while a pack is under way, a journal and a spill directory beside its
generation. One writer at a time holds ``lock``. The commit: every file of the generation has been fsynced,
then every directory, then the manifest is written under another name, fsynced, renamed, and the store's
directory fsynced. Before the rename the old store stands, after it the new one.

Readers hold a shared lock on the directory of the generation they opened; :func:`collect` removes only what
it can lock alone.

What has the name of a generation and is none (a link, a file where a directory should be, a directory with
other files) is not ours: it is neither read, written nor removed, and a new generation gets a greater number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from featstore.base.folders import is_file, is_folder, is_taken
from featstore.base.system import asking, is_there
from featstore.errors import (
    DiskFullError,
    FeatstoreError,
    FormatError,
    IncompleteStoreError,
    StoreExistsError,
)
from featstore.storage.belongings import GENERATION, NOTHING, SPILL, STORE, TEMPORARY, begins_with
from featstore.storage.disk import Disk
from featstore.storage.locks import Lock, held_alone
from featstore.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest
from featstore.storage.manifest_reading import read_manifest

LOCK_NAME = "lock"
_GENERATION = re.compile(rf"(g[0-9]{{6,18}})(?:(\.journal)({TEMPORARY})?|(\.spill)|)", re.ASCII)
_MANIFEST_TEMPORARY = re.compile(re.escape(MANIFEST_NAME) + TEMPORARY, re.ASCII)


@contextmanager
def writer_lock(store: Path, *, look: bool = False) -> Iterator[None]:
    """Be the only writer of a store. With ``look``, nothing is written, and a store that has no lock file is
    not locked. Raises StoreLockedError that names the process which is, FormatError where the file of that
    name is something else, DeviceError."""
    try:
        lock = Lock(
            store / LOCK_NAME, f"{store} is being written", "wait for it to end, or stop it", look=look
        )
    except FileNotFoundError:
        if not look:
            raise
        yield
        return
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(directory: Path, disk: Disk) -> Iterator[None]:
    """Be the only writer of a directory, which is made with those above it where there are none. What was
    made for nothing is removed: after an error, the lock, if nothing else has come into the directory, and
    the directories that are empty. Raises as :func:`writer_lock`."""
    made: list[Path] = []
    try:
        for path in [p for p in reversed([directory, *directory.parents]) if not is_there(p)]:
            disk.mkdir(path)
            made.append(path)
            disk.fsync_dir(path.parent)
        with asking(directory, "list"):
            before = {*os.listdir(directory), LOCK_NAME} if not is_taken(directory / LOCK_NAME) else None
        with writer_lock(directory):
            try:
                yield
            except BaseException:
                with suppress(FeatstoreError, OSError):  # the error that brought us here is the one to tell
                    if set(os.listdir(directory)) == before:
                        disk.unlink(directory / LOCK_NAME)
                raise
    except BaseException:
        with suppress(FeatstoreError, OSError):
            for path in reversed(made):
                disk.rmtree(path, NOTHING)
        raise


def names(store: Path) -> dict[str, list[Path]]:
    """All generations that have left anything of their own in a store: name to the paths that belong to
    it."""
    found: dict[str, list[Path]] = {}
    for path, name, ours in _named(store):
        if ours:
            found.setdefault(name, []).append(path)
    return found


def foreign(store: Path) -> list[Path]:
    """What has the name of a generation, or of its journal or spill, and is none."""
    return [path for path, _, ours in _named(store) if not ours]


def _entries(store: Path) -> list[Path]:
    """What a store's directory has, in order. Raises DeviceError."""
    with asking(store, "list"):
        return sorted(store.iterdir())


def _named(store: Path) -> Iterator[tuple[Path, str, bool]]:
    for path in _entries(store):
        match = _GENERATION.fullmatch(path.name)
        if match is None:
            continue
        name, journal, temporary, _ = match.groups()
        if journal is None:
            yield path, name, is_folder(path)
        else:
            yield path, name, is_file(path) if temporary else begins_with(path, b"{")


def current(store: Path) -> Manifest | None:
    """The committed manifest, or None where there is none. Raises FormatError where something else has its
    name."""
    path = store / MANIFEST_NAME
    if not is_file(path):
        if is_taken(path):
            raise FormatError(
                f"{path} is no regular file, and so no manifest: it is left alone; move it away"
            )
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
        raise FeatstoreError(
            f"{store} cannot be written: {committed.read_only_because}; write it with the newer featstore "
            "that made it, or pack to another path"
        )
    known = names(store)
    done = committed.generation if committed else ""
    unfinished = [n for n in known if n != done and Generation(store, n).journal in known[n]]
    if resume and unfinished:
        return Generation(store, unfinished[-1]), True
    if resume and committed is None:
        raise IncompleteStoreError(f"there is nothing to resume in {store}; run the pack without --resume")
    if resume:
        raise StoreExistsError(f"there is nothing to resume in {store}: its pack was completed")
    if unfinished and not overwrite:
        raise StoreExistsError(
            f"{store} holds an unfinished pack; go on with --resume (the same input and options), or "
            "start anew with --overwrite"
        )
    if committed is not None and not overwrite:
        raise StoreExistsError(
            f"{store} already holds a store; give another path, or replace it with overwrite=True "
            "(--overwrite)"
        )
    full: list[DiskFullError] = []
    for name in known:
        if name != done:
            _remove_generation(disk, Generation(store, name), known[name], full)
    if full:
        raise full[0]
    # What stays (a reader holds it, or it is foreign) keeps its number.
    number = (
        max((int(name[1:]) for name in [*(name for _, name, _ in _named(store)), done] if name), default=0)
        + 1
    )
    return Generation(store, f"g{number:06d}"), False


def commit(store: Path, disk: Disk, manifest: Manifest) -> None:
    """Make a generation, all of whose files and directories are durable, the store's content."""
    disk.replace_file(store / MANIFEST_NAME, encode_manifest(manifest))


def collect(
    store: Path, disk: Disk, *, unfinished: bool = False, dry_run: bool = False,
    kept: dict[Path, str] | None = None,
) -> list[Path]:  # fmt: skip
    """Remove what no manifest and no reader refers to; returns it. The caller holds the writer lock.

    An unfinished pack is kept, because it can be resumed, unless ``unfinished`` is true. What is foreign in a
    generation stays, and the directories above it. ``kept``: gets the generations that stay, and why.
    """
    kept = {} if kept is None else kept
    committed = current(store)
    removed: list[Path] = []
    full: list[DiskFullError] = []
    for name, paths in names(store).items():
        generation = Generation(store, name)
        if committed is not None and name == committed.generation:
            paths = [p for p in paths if p != generation.directory]
        elif generation.journal in paths and not unfinished:
            kept[generation.directory] = "an unfinished pack, to resume, or to remove as unfinished"
            continue
        if paths and _remove_generation(disk, generation, paths, full, dry_run=dry_run):
            removed += paths
        elif paths:
            kept[generation.directory] = IN_USE
    for path in [p for p in _entries(store) if _MANIFEST_TEMPORARY.fullmatch(p.name) and is_file(p)]:
        if not dry_run:
            disk.unlink(path)
        removed.append(path)
    if removed and not dry_run:
        disk.fsync_dir(store)
    if full:
        raise full[0]
    return removed


#: Why a generation stays that a reader holds.
IN_USE = "a reader or a loader has it open"


def remove_store(store: Path, disk: Disk, *, dry_run: bool = False, force: bool = False) -> bool:
    """Remove a store and all that is its own in it, unless a reader holds one of its generations (with
    ``force``, even so); False if one does. The caller holds the writer lock."""
    committed, full = current(store), list[DiskFullError]()
    for name, paths in names(store).items():
        generation = Generation(store, name)
        if committed is not None and name == committed.generation:
            paths = [store / MANIFEST_NAME, *paths]  # the manifest first: nobody opens what is being removed
        if not _remove_generation(disk, generation, paths, full, dry_run=dry_run, force=force):
            return False
    if not dry_run:
        disk.rmtree(store, STORE)
        disk.fsync_dir(store.parent)
    if full:
        raise full[0]
    return True


def _remove_generation(
    disk: Disk, generation: Generation, paths: list[Path], full: list[DiskFullError], *,
    dry_run: bool = False, force: bool = False,
) -> bool:  # fmt: skip
    """Remove what belongs to a generation, unless a reader holds it; False if one does. The lock is kept
    while removing, so that no reader slips in: one that waits for it finds the directory gone and looks at
    the manifest again. Files go first, the journal among them. On a disk that is ``full``, which is where
    that is said to the caller, the rest goes, too, as it gives room."""
    held = held_alone(generation.directory, directory=True) if generation.directory in paths else None
    if held is None and generation.directory in paths and not force:
        return False
    try:
        folders = (generation.directory, generation.spill)
        for path in [] if dry_run else sorted(paths, key=lambda path: path in folders):
            if path in folders:
                disk.rmtree(path, GENERATION if path == generation.directory else SPILL)
            else:
                disk.unlink(path)
            # Durably: nobody opens, or resumes, what is half gone.
            if path.name == MANIFEST_NAME or path == generation.journal:
                try:
                    disk.fsync_dir(path.parent)
                except DiskFullError as error:
                    full.append(error)
        return True
    finally:
        if held is not None:
            os.close(held)
