"""The journal of a pack under way: what is durable already, so that ``--resume`` goes on from there.

It stands beside the generation it describes (``g000001.journal``), is replaced whole at each checkpoint, and
starts with the pack's fingerprint: options and sources. A resumed pack must ask for the same thing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from featstore.base.files import read_small
from featstore.base.system import is_there
from featstore.errors import FormatError, SourceError
from featstore.storage.disk import Disk
from featstore.storage.manifest import MANIFEST_BYTES_MAX, NOT_JSON, FileEntry, GraphEntry, OrderEntry
from featstore.units import PAGE_BYTES

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class UnfinishedPage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A page that was not whole at a checkpoint of batched packing: the bytes that it had, as runs (their
    beginnings and ends in turn), and the page's CRC-32C with all others zero."""

    number: _Count
    runs: list[Annotated[int, msgspec.Meta(ge=0, le=PAGE_BYTES)]]
    checksum: _Count


class TableProgress(msgspec.Struct, forbid_unknown_fields=True):
    """How far one table is. All counts speak of what is durable."""

    order: OrderEntry | None = None  # its arrays are written, and these are their files:
    order_files: list[FileEntry] = msgspec.field(default_factory=list)
    graph: GraphEntry | None = None  # its tables are written, and these are their files:
    graph_files: list[FileEntry] = msgspec.field(default_factory=list)
    rows_counted: _Count = 0  # rows of the source in the value report and the digest
    report: dict[str, Any] = msgspec.field(default_factory=dict)
    source_digest: Annotated[int, msgspec.Meta(ge=0)] = 0
    spill_bytes: list[_Count] = msgspec.field(
        default_factory=list
    )  # durable bytes of each bucket's spill file
    spilled: bool = False
    written_bytes: _Count = 0  # durable bytes of the table, from its start, whole pages
    buckets_written: _Count = 0
    written_digest: Annotated[int, msgspec.Meta(ge=0)] = 0  # over the rows of the buckets written
    carry_checksum: _Count | None = None  # of the page that the next bucket begins in, with what they have
    done: bool = False
    memory_bytes: _Count = 0  # that the rows are put in order within, where how far that is depends on it
    episode: _Count = 0  # of batched packing: this one is under way,
    slab: _Count = 0  # and from this slab of the base table on its segments have nothing;
    unfinished: list[list[UnfinishedPage]] = msgspec.field(default_factory=list)  # of each table it writes


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The journal's content."""

    fingerprint: dict[str, Any]
    tables: dict[str, TableProgress] = msgspec.field(default_factory=dict)


class Journal:
    """Reads and replaces the journal's file."""

    def __init__(self, disk: Disk, path: Path, state: State) -> None:
        self.disk = disk
        self.path = path
        self.state = state

    @classmethod
    def load(cls, disk: Disk, path: Path) -> Journal:
        """The journal of an unfinished pack. Raises FormatError where it cannot be read."""
        try:
            return cls(disk, path, msgspec.json.decode(read_small(path, MANIFEST_BYTES_MAX), type=State))
        except (OSError, *NOT_JSON) as error:
            raise FormatError(f"cannot resume from {path}: {error}; start anew with --overwrite") from error

    def check(self, fingerprint: dict[str, Any]) -> None:
        """Raise SourceError where the unfinished pack was of something else, naming what differs."""
        then = msgspec.json.decode(msgspec.json.encode(self.state.fingerprint))
        now = msgspec.json.decode(msgspec.json.encode(fingerprint))
        for key in sorted(set(then) | set(now)):
            if then.get(key) != now.get(key):
                raise SourceError(
                    f"cannot resume: the unfinished pack had {key} = {then.get(key)!r}, this one has "
                    f"{now.get(key)!r}; give the same input and options, or start anew with --overwrite"
                )

    def table(self, name: str) -> TableProgress:
        return self.state.tables.setdefault(name, TableProgress())

    def save(self) -> None:
        """Make the state durable."""
        self.disk.replace_file(self.path, msgspec.json.encode(self.state))

    def remove(self) -> None:
        """Remove the file, where there is one."""
        if is_there(self.path):
            self.disk.unlink(self.path)
            self.disk.fsync_dir(self.path.parent)
