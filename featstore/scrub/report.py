"""What a scrub reports, of a store as of a trace: problems, how far it is, and what it saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from featstore.engine.files import Access
from featstore.storage.manifest import ArrayEntry, array_chunk
from featstore.units import PAGE_BYTES, format_bytes

Item = TypeVar("Item")

#: So many problems (and unlisted files) are listed, and the first of each further file; all are counted.
PROBLEMS_MAX = 1000


def listed(found: Sequence[Item]) -> tuple[Item, ...]:
    """As many as a report lists."""
    return tuple(found[:PROBLEMS_MAX])


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    ``path`` is relative to the store. ``page`` and ``offset`` (bytes) count from the file's start and are
    None for a whole file. ``what`` is one of: missing file, file kind, file size, unreadable file, unreadable
    directory, unreadable page, page checksum, stored checksum, file digest, padding, metadata, map, graph,
    keys, rows, rows digest, manifest uuid, trace.
    """

    path: str
    page: int | None
    offset: int | None
    expected: str
    actual: str
    what: str

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path}, page {self.page} (byte {self.offset:,})"
        return f"{self.what}: {where}: expected {self.expected}, found {self.actual}"


@dataclass(frozen=True)
class TraceProblem(Problem):
    """A problem of a trace. ``batch``: the mini-batch, or None for head, index and tail."""

    batch: int | None

    def __str__(self) -> str:
        where = "the file" if self.batch is None else f"mini-batch {self.batch}"
        at = "" if self.offset is None else f" (byte {self.offset:,})"
        return f"{where}{at}: expected {self.expected}, found {self.actual}"


@dataclass(frozen=True)
class Progress:
    """How far a scrub is: the file it is in, and bytes of all files."""

    path: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """What a scrub saw. ``bytes`` counts what was read; ``problems`` lists the first 1000 of
    ``problem_count``, and the first of each further file. ``access``: "direct" where the device was asked,
    "buffered" where the page cache could answer."""

    path: str
    uuid: str
    bytes: int
    access: Access
    problem_count: int
    problems: tuple[Problem, ...]
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"problems": [asdict(problem) for problem in self.problems]}

    @abstractmethod
    def _seen(self) -> str: ...

    def __str__(self) -> str:
        verdict = "sound" if self.ok else f"{self.problem_count:,} problems"
        return "\n".join([f"{self.path}: {verdict} ({self._seen()})", *map(str, self.problems)])


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Report):
    """What a scrub of a store saw. ``files``, ``bytes`` and ``pages`` (those compared with a stored checksum)
    count what was read.

    ``unlisted`` names files that the manifest does not: nothing reads them, so they are no problem; the first
    1000 of ``unlisted_count``.
    """

    generation: str
    files: int
    pages: int
    unlisted_count: int
    unlisted: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"unlisted": list(self.unlisted)}

    def _seen(self) -> str:
        return f"{self.files:,} files, {format_bytes(self.bytes)}, {self.pages:,} pages with checksums"

    def __str__(self) -> str:
        if not self.unlisted:
            return super().__str__()
        return f"{super().__str__()}\n{self.unlisted_count:,} files are not listed: {self.unlisted[0]} ..."


@dataclass(frozen=True, kw_only=True)
class TraceReport(Report):
    """What a scrub of a trace saw. ``uuid`` is empty, and no mini-batch was read, where head, index or tail
    are bad."""

    problems: tuple[TraceProblem, ...]
    batches: int
    ids: int

    def _seen(self) -> str:
        return f"{self.batches:,} mini-batches, {self.ids:,} node ids, {format_bytes(self.bytes)}"


class Findings:
    """What a scrub of a store has found so far, and so what it still believes."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.problems: list[Problem] = []
        self.problem_count = 0
        self.pages = 0  # compared with a stored checksum
        self.readable: set[str] = set()  # there, a file, of the right size
        self.faulty: set[str] = set()  # paths that problems name

    def problem(
        self, what: str, path: str, expected: object, actual: object, offset: int | None = None
    ) -> None:
        """Count a problem, and list it if there is room, or if it is the first of its file."""
        new = path not in self.faulty
        self.faulty.add(path)
        self.problem_count += 1
        if new or len(self.problems) < PROBLEMS_MAX:
            page = None if offset is None else offset // PAGE_BYTES
            self.problems.append(Problem(path, page, offset, str(expected), str(actual), what))

    def intact(self, path: str) -> bool:
        """Whether a file can be read and no problem names it."""
        return path in self.readable and path not in self.faulty

    def sound(self, entry: ArrayEntry) -> bool:
        """Whether an array's file is intact, or it has none."""
        chunk = array_chunk(entry)
        return chunk is None or self.intact(chunk)
