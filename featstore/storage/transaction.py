"""One generation of a store, written from its beginning to its commit or its end.

Who writes a store (a pack, a compilation) holds its lock, and inside of it a transaction. It says which
generation to write, and whether that goes on with an interrupted one; its journal tells how far it is; after
an error, what is worth going on with stays for ``--resume``, and nothing else does; a commit makes all of it
durable and then, in one rename, the store's content; in the end, what nobody refers to any more is collected.
The parts of it are in :mod:`featstore.storage.generations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from featstore._version import __version__
from featstore.base.system import asking
from featstore.errors import DiskFullError, FeatstoreError, FormatError
from featstore.storage.belongings import GENERATION, SPILL
from featstore.storage.disk import Disk
from featstore.storage.generations import begin, collect, commit, current
from featstore.storage.journal import Journal, State, TableProgress
from featstore.storage.manifest import (
    EDGE_IDS_FEATURE,
    EDGE_VALUES_FEATURE,
    FORMAT_VERSION,
    GRAPHS_FEATURE,
    MANIFEST_NAME,
    RELATIONS_FEATURE,
    ArrayEntry,
    GraphEntry,
    Manifest,
    TableEntry,
    edge_parts,
    encode_manifest,
    sealed,
)
from featstore.storage.manifest_reading import parse
from featstore.storage.table_writer import Catalogue, zarr_group_json

#: Whether to keep a table's progress for ``--resume`` after this error.
Worth = Callable[[TableProgress, BaseException], bool]


class Transaction:
    """A generation being written: ``generation`` has its name and paths, ``catalogue`` writes its small files
    and knows all files, ``resumed`` tells whether it goes on from an interruption."""

    def __init__(self, store: Path, disk: Disk, *, resume: bool, overwrite: bool) -> None:
        self.disk = disk
        self.generation, self.resumed = begin(store, disk, resume=resume, overwrite=overwrite)
        self.catalogue = Catalogue(disk, store)
        self._journal: Journal | None = None
        self._committing = False

    @property
    def name(self) -> str:
        return self.generation.name

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "start() comes first"
        return self._journal

    def start(self, fingerprint: dict[str, Any]) -> None:
        """Make the journal durable, or read that of the interruption. Raises SourceError where that was of
        something else."""
        if self.resumed:
            journal = Journal.load(self.disk, self.generation.journal)
            journal.check(fingerprint)
            self._journal = journal
            return
        self.catalogue.directory(f"{self.name}/tables")
        self._journal = Journal(self.disk, self.generation.journal, State(fingerprint))
        self._journal.save()

    def bytes_there(self, *directories: Path) -> int:
        """What the files below these directories take on disk. Raises DeviceError."""
        with asking(self.generation.directory, "look at the files of"):
            files = (p for root in directories for p in root.rglob("*") if p.is_file())
            return sum(p.stat().st_blocks * 512 for p in files)

    def check_space(self, needed_bytes: int) -> None:
        """Raise DiskFullError if there is not so much room."""
        free = self.disk.free_bytes(self.generation.store)
        if needed_bytes > free:
            raise DiskFullError(self.generation.store, needed_bytes, free)

    def commit(
        self, groups: Iterable[str], *, tables: dict[str, TableEntry], arrays: dict[str, ArrayEntry],
        provenance: dict[str, Any], features: list[str], **more: Any,
    ) -> None:  # fmt: skip
        """Make the generation the store's content. ``groups``: zarr groups in it, below its own and that of
        the tables; ``features``: what a reader has to know; ``more``: other fields of the manifest."""
        for group in [self.name, *(f"{self.name}/{group}" for group in ("tables", *groups))]:
            self.catalogue.write(f"{group}/zarr.json", zarr_group_json())
        self.catalogue.fsync_directories()
        self.disk.fsync_dir(self.generation.store)
        manifest = Manifest(
            format="featstore", version=FORMAT_VERSION, reader_features=features, writer_features=[], uuid="",
            generation=self.name, tables=tables, arrays=arrays,
            files=sorted(self.catalogue.files.values(), key=lambda file: file.path),
            provenance={"writer": f"featstore {__version__}", **provenance}, **more,
        )  # fmt: skip
        manifest = sealed(manifest)
        text = encode_manifest(manifest)
        if self.resumed:
            with self.resuming():
                parse(text, self.generation.journal)
        else:
            self._check_readable(text)
        self._committing = True
        commit(self.generation.store, self.disk, manifest)
        self.disk.unlink(self.generation.journal)
        self.disk.rmtree(self.generation.spill, SPILL)

    def _check_readable(self, text: bytes) -> None:
        """Raise FormatError for a manifest that no reader takes: it never replaces a store."""
        path = self.generation.store / MANIFEST_NAME
        try:
            parse(text, path)
        except FormatError as error:
            raise FormatError(
                f"{path} would be one that no reader takes, so it is not written: {error}; give fewer edge "
                "types, tables, arrays or fields"
            ) from error

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """What is inside looks at what the journal says: raises FormatError that says what to do."""
        try:
            yield
        except FormatError as error:
            raise FormatError(
                f"cannot resume from {self.generation.journal}: {error}; start anew with --overwrite"
            ) from error

    def abandon(self, worth: Worth, error: BaseException) -> None:
        """After an error: what is worth it stays for ``--resume``; where nothing is, nothing stays. What is
        the store's content already stays, too."""
        if self._is_committed():
            return
        tables = self._journal.state.tables.values() if self._journal else ()
        if self.resumed or any(worth(progress, error) for progress in tables):
            return
        with suppress(FeatstoreError, OSError):  # the error that brought us here is the one to tell
            self.discard()

    def _is_committed(self) -> bool:
        if not self._committing:
            return False
        try:
            now = current(self.generation.store)
        except FeatstoreError:
            return True  # it may be
        return now is not None and now.generation == self.name

    def discard(self) -> None:
        """Remove all of the generation."""
        self.disk.unlink(self.generation.journal)
        self.disk.rmtree(self.generation.spill, SPILL)
        self.disk.rmtree(self.generation.directory, GENERATION)


@contextmanager
def write_generation(
    store: Path, disk: Disk, *, resume: bool, overwrite: bool, worth: Worth
) -> Iterator[Transaction]:
    """Write a generation of a store, whose writer's lock the caller holds. ``worth``: what to keep after an
    error.

    Raises StoreExistsError where there is something that neither option allows to touch,
    IncompleteStoreError where there is nothing to resume, FormatError, DeviceError.
    """
    transaction = Transaction(store, disk, resume=resume, overwrite=overwrite)
    try:
        yield transaction
    except BaseException as error:
        transaction.abandon(worth, error)
        raise
    collect(store, disk)


def graph_features(graphs: Iterable[GraphEntry]) -> list[str]:
    """The reader features that a store of these graphs needs."""
    found = list(graphs)
    parts = {part for graph in found for part in edge_parts(graph)}
    typed = any(graph.edge_type is not None for graph in found)
    return (
        [GRAPHS_FEATURE] * bool(found)
        + [EDGE_IDS_FEATURE] * ("edge_ids" in parts)
        + [RELATIONS_FEATURE] * typed
        + [EDGE_VALUES_FEATURE] * bool(parts - {"edge_ids"})
    )
