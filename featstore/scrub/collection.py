"""Collection: what of a store's directory nobody needs any more, and who says that it is ours to delete.

Deleted is what featstore has written there and nothing refers to: old generations that no reader holds, what
killed packs, compilations, loaders and savings have left. Each is proven before, by name, by a lock file that
nobody else holds, and by its manifest or journal; within a directory, each file by its path
(:mod:`featstore.storage.belongings`). What is not proven stays, and is named with the reason. No link is
followed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from featstore.base.folders import folder, is_file, is_folder, is_taken, real_path
from featstore.base.system import asking, is_directory, is_there
from featstore.errors import DeviceError, FeatstoreError, IncompleteStoreError, StoreLockedError
from featstore.storage.belongings import (
    GENERATION,
    SPILL,
    STORE,
    TEMPORARY,
    TRACE,
    Belongings,
    begins_with,
    survey,
)
from featstore.storage.disk import Disk
from featstore.storage.generations import (
    IN_USE,
    LOCK_NAME,
    collect,
    current,
    foreign,
    names,
    remove_store,
    writer_lock,
)
from featstore.storage.locks import held_alone, is_lock
from featstore.storage.manifest import MANIFEST_NAME, Manifest, check_name
from featstore.storage.packs import (
    EPISODES,
    FORECAST,
    PACKS,
    PREPARING,
    ROLLING,
    TRACES,
    left_by_preparing,
    left_by_rolling,
    remove_pack,
    remove_trace,
)

CACHES = "caches"
_CACHE_TEMPORARY = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.cache{TEMPORARY}", re.ASCII)


class Collection:
    """One collection. By path relative to the store: ``removed`` and ``stale`` (compiled traces kept because
    they may be of use again), bytes; ``held`` (in use, or to be resumed) and ``unproven`` (not featstore's,
    as far as can be told), the reason.

    ``unfinished``: remove what could be resumed, too. ``stale``: and what was compiled for another state of
    the store. ``dry_run``: remove and write nothing.

    Raises IncompleteStoreError where there is no store; StoreLockedError, CorruptionError, FormatError,
    DeviceError.
    """

    def __init__(
        self, store: Path, *, unfinished: bool = False, stale: bool = False, dry_run: bool = False,
        disk: Disk | None = None
    ) -> None:  # fmt: skip
        self.store = real_path(store)
        if not is_directory(self.store) or (current(self.store) is None and not names(self.store)):
            what = "is not there"
            if is_there(self.store):
                what = "is not a featstore store" if is_directory(self.store) else "is a file, not a store"
            raise IncompleteStoreError(f"{store} {what}: nothing to collect")
        self._unfinished, self._stale, self._dry_run = unfinished, stale, dry_run
        self._disk = disk or Disk()
        self.removed: dict[str, int] = {}
        self.stale: dict[str, int] = {}
        self.held: dict[str, str] = {}
        self.unproven: dict[str, str] = {}
        with writer_lock(self.store, look=dry_run):
            base = current(self.store)
            self._generations(self.store)
            packs = self._listed(PACKS)
            episodes = self._loaders(packs)
            for path in packs:
                if path not in episodes and path.suffix not in (ROLLING, PREPARING):
                    self._pack(path, base)
            self._caches()

    def _listed(self, name: str) -> list[Path]:
        """What is in a directory of the store."""
        path = self.store / name
        if is_folder(path):
            with asking(path, "list"), folder(path, listed=True) as descriptor:
                return [path / found for found in sorted(os.listdir(descriptor))]
        if is_taken(path):
            self._foreign(path)
        return []

    def _name(self, path: Path) -> str:
        text = str(path.relative_to(self.store)).encode(errors="backslashreplace").decode()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)

    def _foreign(self, path: Path, why: str = "") -> None:
        if not why:
            why = (
                "a symbolic link, which is not followed"
                if path.is_symlink()
                else "not what featstore puts there"
            )
        self.unproven[self._name(path)] = why

    # Generations.

    def _generations(self, store: Path) -> None:
        """Old generations of a store. The caller holds its writer lock."""
        for path in foreign(store):
            self._foreign(path)
        kept: dict[Path, str] = {}
        planned = {
            path: self._bytes(path)
            for path in collect(store, self._disk, unfinished=self._unfinished, dry_run=True, kept=kept)
        }
        gone = set(planned)
        if not self._dry_run:
            gone = set(collect(store, self._disk, unfinished=self._unfinished, kept=kept))
        for path, size in planned.items():
            if size is not None and path in gone:
                self.removed[self._name(path)] = size
        self.held |= {self._name(path): why for path, why in kept.items()}

    def _bytes(self, path: Path) -> int | None:
        """Bytes of a file, or of what is ours below a directory; None where that is nothing but foreign.
        Names what is foreign."""
        if is_file(path):
            return path.lstat().st_size
        return self._surveyed(path, SPILL if path.suffix == ".spill" else GENERATION)

    def _surveyed(self, path: Path, own: Belongings) -> int | None:
        found = survey(path, own)
        for one in found.foreign:
            self._foreign(one)
        return None if found.foreign and not found.files else found.bytes

    # Compiled traces, and what loaders make.

    def _loaders(self, packs: list[Path]) -> set[Path]:
        """Remove what killed loaders have left; returns what belongs to loaders, living or dead."""
        theirs: set[Path] = set()
        for path in packs:
            if path.suffix not in (ROLLING, PREPARING):
                continue
            made = [path.with_name(path.stem + e + t) for e in EPISODES for t in ("", TRACES)]
            if path.suffix == PREPARING:
                made = [path.with_suffix(TRACES)]
            made = [p for p in made if p in packs]
            try:
                lock = (left_by_rolling if path.suffix == ROLLING else left_by_preparing)(
                    path.parent, path.stem, look=self._dry_run
                )
            except StoreLockedError as error:
                self.held |= {self._name(p): str(error) for p in (path, *made)}
                theirs.update(made)
            except FileNotFoundError:
                continue  # its loader has just ended
            except FeatstoreError as error:
                self._foreign(path, str(error))
            else:
                left = True
                try:
                    if path.suffix == ROLLING and lock.fresh and made:  # it proves nothing of these
                        self._foreign(path, "it is empty, so what lies beside it may be a user's own")
                    elif path.suffix == ROLLING:
                        theirs.update(made)
                        left = [self._left(p) for p in made].count(False) > 0
                    else:
                        left = False  # the recording is that of any killed process
                finally:
                    lock.release(remove=not (left or self._dry_run))
                self.removed |= {} if left else {self._name(path): 0}
        return theirs

    def _left(self, path: Path) -> bool:
        """Remove an episode of a killed loader; False if it stays."""
        if not is_folder(path):
            self._foreign(path)
            return False
        trace = path.suffix == TRACES
        try:
            size = self._surveyed(path, TRACE) if trace else self._whole_bytes(path)
            if trace:
                remove_trace(path, self._disk, dry_run=self._dry_run)
            elif not remove_pack(path, self._disk, force=False, dry_run=self._dry_run):
                self.held[self._name(path)] = IN_USE
                return False
        except StoreLockedError as error:
            self.held[self._name(path)] = str(error)
            return False
        except FeatstoreError as error:
            if isinstance(error, DeviceError):
                raise
            self._foreign(path, str(error))
            return False
        if size is not None:
            self.removed[self._name(path)] = size
        return True

    def _pack(self, path: Path, base: Manifest | None) -> None:
        """Anything else in packs/."""
        if not is_folder(path):
            self._foreign(path)
            return
        try:
            check_name(path.name, "compiled trace")
            compiled = current(path)
            if compiled is not None and compiled.compiled is None:
                self._foreign(path, "a store, but no compiled trace")
            elif compiled is None and not is_lock(path / LOCK_NAME):
                self._foreign(path, "no manifest and no lock of featstore's is in it")
            else:
                with writer_lock(path, look=self._dry_run):
                    self._proven(path, current(path), base)
        except StoreLockedError as error:
            self.held[self._name(path)] = str(error)
        except DeviceError:
            raise
        except FeatstoreError as error:
            self._foreign(path, str(error))

    def _proven(self, path: Path, compiled: Manifest | None, base: Manifest | None) -> None:
        """A directory with a manifest or a lock of ours. The lock is held."""
        if compiled is None and path.suffix == TRACES:
            self._trace(path)
            return
        if (
            compiled is not None
            and compiled.compiled
            and base is not None
            and compiled.compiled.base_uuid != base.uuid
        ):
            if self._stale:
                self._whole(path)
                return
            self.stale[self._name(path)] = self._whole_bytes(path)
        elif compiled is None and (path.suffix == FORECAST or not names(path)):
            # A forecast that was killed, or a compilation that never began.
            if names(path) or self._surveyed(path, STORE) is not None:
                self._whole(path)
            return
        self._generations(path)
        if compiled is None and not names(path) and not self._dry_run:
            self._disk.rmtree(path, STORE)

    def _whole(self, path: Path) -> None:
        """Remove a compiled trace, unless somebody reads it."""
        size = self._whole_bytes(path)
        if remove_store(path, self._disk, dry_run=self._dry_run):
            self.removed[self._name(path)] = size
        else:
            self.held[self._name(path)] = IN_USE

    def _trace(self, path: Path) -> None:
        """A recording of a loader of mode compiled, which removes it when it has compiled it."""
        from featstore.trace.recorder import BEGINS

        for name, begin in BEGINS.items():
            if is_taken(path / name) and not begins_with(path / name, begin):
                self._foreign(path, f"{name} in it is not from a recording")
                return
        if self._unfinished:
            size = self._surveyed(path, TRACE)
            if not self._dry_run:
                self._disk.rmtree(path, TRACE)
            if size is not None:
                self.removed[self._name(path)] = size
        else:
            self.held[self._name(path)] = "what a killed loader has recorded, to remove as unfinished"

    def _whole_bytes(self, path: Path) -> int:
        """Bytes of all that is ours in a compiled trace's directory. Names what is foreign."""
        parts = [p for paths in names(path).values() for p in paths]
        total = sum(self._bytes(p) or 0 for p in parts)
        with asking(path, "list"):
            for rest in sorted(path.iterdir()):
                if is_file(rest) and (rest.name == MANIFEST_NAME or STORE.files.fullmatch(rest.name)):
                    total += rest.lstat().st_size
                elif rest not in parts:
                    self._foreign(rest)
        return total

    # Saved caches.

    def _caches(self) -> None:
        """What killed savings have left beside the saved caches."""
        for path in self._listed(CACHES):
            if not _CACHE_TEMPORARY.fullmatch(path.name):
                if path.suffix != ".cache" or not is_file(path):
                    self._foreign(path)
            elif not is_file(path):
                self._foreign(path)
            else:
                held = held_alone(path)
                if held is not None:
                    try:
                        self.removed[self._name(path)] = path.lstat().st_size
                        if not self._dry_run:
                            self._disk.unlink(path)
                    finally:
                        os.close(held)
                else:
                    self.held[self._name(path)] = "being saved"
