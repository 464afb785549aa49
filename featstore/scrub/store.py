"""Scrubbing: every byte of a store read once and held against every promise the manifest makes about it.

A reader checks the pages it reads and stops at the first bad one. A scrub reads all and goes on, so that its
report is the complete list of what to restore. It needs only a readable manifest. What is held against what:

- the manifest's uuid against its text (a change to any other field shows there);
- every listed file: a regular file, of its size, with its digest, and not reached through a symbolic link;
- every page of every chunk against ``page_checksums``; those against the digests of the chunks, which tells a
  page that went bad from a checksum that did; the padding of the last chunk is zero;
- ``zarr.json`` of every array against the manifest;
- ``row_of_node`` and ``node_of_row`` are inverse permutations, ``rows_by_degree`` is one, partition offsets
  ascend;
- the tables of graphs as any other, and what their numbers mean (:mod:`featstore.scrub.graph`);
- ``rows_digest``, from end to end: the digest of (node id, row) that the pack computed over its *source*.

All passes are sequential and hold two blocks of 4 MiB (and twice the largest row); graphs are looked at in
pieces, too. That two maps are inverse to each other is therefore shown without random access: the pairs
(node, row) of both must have the same sum of 64-bit hashes. Reads are direct where the file system allows, so
that it is the device that is verified and not the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_function, as_path
from featstore.base.buffers import aligned_buffer
from featstore.base.checks import find_fall
from featstore.base.checksum import crc_pages
from featstore.base.dtypes import dtype_from_name, zarr_storage
from featstore.base.hashing import mix64
from featstore.base.native import address_of
from featstore.base.system import asking, open_plain, submitted
from featstore.engine.files import Access
from featstore.scrub.graph import scrub_graph
from featstore.storage.belongings import TEMPORARY
from featstore.storage.manifest import (
    MANIFEST_NAME,
    ArrayEntry,
    Manifest,
    TableEntry,
    array_chunk,
    read_manifest,
    uuid_of,
)
from featstore.storage.rows_digest import add, digest_rows
from featstore.units import PAGE_BYTES, format_bytes

BLOCK_BYTES = 4 * 2**20
#: So many problems (and unlisted files) are listed; all are counted.
PROBLEMS_MAX = 1000
_PIECE = 1 << 17  # elements of a map, or rows, looked at together
_METADATA_BYTES_MAX = 1 << 20
_OWN_NAMES = re.compile(
    rf"featstore\.json({TEMPORARY})?|lock|packs|caches|g[0-9]{{6,}}(\.journal({TEMPORARY})?|\.spill|)",
    re.ASCII,
)


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    ``path`` is relative to the store. ``page`` and ``offset`` (bytes) count from the file's start and are
    None for a whole file. ``what`` is one of: missing file, file kind, file size, unreadable file, unreadable
    page, page checksum, stored checksum, file digest, padding, metadata, map, graph, rows digest, manifest
    uuid.
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
class Progress:
    """How far a scrub is: the file it is in, and bytes of all files."""

    path: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class VerifyReport:
    """What a scrub saw. ``files``, ``bytes`` and ``pages`` (those compared with a stored checksum) count what
    was read.

    ``problems`` lists the first 1000 of ``problem_count``. ``unlisted`` names files that the manifest does
    not: nothing reads them, so they are no problem; the first 1000 of ``unlisted_count``. ``access`` is
    "direct" or "buffered".
    """

    path: str
    uuid: str
    generation: str
    files: int
    bytes: int
    pages: int
    access: Access
    ok: bool
    problem_count: int
    problems: tuple[Problem, ...]
    unlisted_count: int
    unlisted: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {
            "problems": [asdict(p) for p in self.problems],
            "unlisted": list(self.unlisted),
        }

    def __str__(self) -> str:
        seen = f"{self.files:,} files, {format_bytes(self.bytes)}, {self.pages:,} pages with checksums"
        verdict = "sound" if self.ok else f"{self.problem_count:,} problems"
        unlisted = (
            [f"{self.unlisted_count:,} files are not listed: {self.unlisted[0]} ..."] if self.unlisted else []
        )
        return "\n".join([f"{self.path}: {verdict} ({seen})", *map(str, self.problems), *unlisted])


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | None = None,
    access: Access = "direct",
) -> VerifyReport:
    """Read a whole store and report everything that is not as its manifest promises; see the module's text.

    Args:
        path: the store's directory. It is not written to; its generation is held against ``featstore gc``
            meanwhile.
        progress: called after each block with a :class:`Progress`.
        access: ``"direct"`` to read past the page cache where the file system allows it, or ``"buffered"``.

    Needs some 16 MiB (48 MiB for graphs with hubs), and two rows, of memory beside the manifest. Raises
    IncompleteStoreError, FormatVersionError and FormatError where there is no manifest to verify against, as
    ``featstore.open`` does, and ValueError for another access. Whatever is wrong beyond that is in the
    report.
    """
    as_choice(access, "access", ("direct", "buffered"))
    if progress is not None:
        as_function(progress, "progress")
    store = Path(os.path.abspath(as_path(path, "path")))
    manifest, text = read_manifest(store)
    hold = _hold(store, manifest)
    try:
        # a newer generation was committed before this one was held
        while (now := read_manifest(store))[0] != manifest:
            manifest, text = now
            os.close(hold)
            hold = _hold(store, manifest)
        scrub = _Scrub(store, manifest, access, progress)
        with scrub.pool:
            return scrub.run(text)
    finally:
        os.close(hold)


def _hold(store: Path, manifest: Manifest) -> int:
    """A shared lock on a generation's directory, or on the store's where that is not there, as its files will
    tell."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        descriptor = os.open(store / manifest.generation, flags | os.O_NOFOLLOW)
    except OSError:
        with asking(store, "open"):
            descriptor = os.open(store, flags)
    try:
        with asking(store, "hold"):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sum(values: NDArray[np.uint64]) -> int:
    """Sum of the values' hashes, modulo 2**64: equal for equal sets, whatever their order."""
    return int(mix64(values).sum(dtype=np.uint64))


class _Scrub:
    """One run: buffers, what was found so far, and the passes."""

    def __init__(
        self, store: Path, manifest: Manifest, access: Access, progress: Callable[[Progress], None] | None
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.access: Access = access
        self.entries = {entry.path: entry for entry in manifest.files}
        self.problems: list[Problem] = []
        self.problem_count = self.pages = 0
        self.readable: set[str] = set()  # there, a file, of the right size
        self.faulty: set[str] = set()  # paths that problems name
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="featstore-verify")
        self._progress = progress
        self._done_bytes = self._total_bytes = 0
        # A row that ends in the next block is put before that block, so that rows lie in one piece.
        row_bytes = max((table.row_bytes for table in manifest.all_tables.values()), default=0)
        self.margin = -(-row_bytes // PAGE_BYTES) * PAGE_BYTES
        self._buffers = [aligned_buffer(self.margin + BLOCK_BYTES) for _ in range(2)]

    def problem(
        self, what: str, path: str, expected: object, actual: object, offset: int | None = None
    ) -> None:
        """Count a problem, and list it if there is room."""
        self.faulty.add(path)
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            page = None if offset is None else offset // PAGE_BYTES
            self.problems.append(Problem(path, page, offset, str(expected), str(actual), what))

    def run(self, text: bytes) -> VerifyReport:
        manifest = self.manifest
        if uuid_of(text, manifest.uuid) != manifest.uuid:
            self.problem("manifest uuid", MANIFEST_NAME, uuid_of(text, manifest.uuid), manifest.uuid)
        self._files()
        self._total_bytes = sum(self.entries[path].bytes for path in self.readable)
        chunks = {t.chunk_path(k) for t in manifest.all_tables.values() for k in range(t.layout.chunks)}
        for path in sorted(self.readable - chunks):
            self._digest(path)
        for array in manifest.arrays.values():
            self._metadata(array.path, array.shape, array.shape, array.dtype)
        for table in manifest.all_tables.values():
            self._table(table)
        for graph in manifest.graphs.values():
            for array in () if graph.hubs is None else (graph.hubs.rows, graph.hubs.offsets):
                self._metadata(array.path, array.shape, array.shape, array.dtype)
            scrub_graph(self, graph, manifest.tables[graph.table].rows)
        unlisted = self._unlisted()
        return VerifyReport(
            str(self.store), manifest.uuid, manifest.generation, len(self.readable), self._done_bytes,
            self.pages, self.access, self.problem_count == 0, self.problem_count, tuple(self.problems),
            len(unlisted), tuple(unlisted[:PROBLEMS_MAX]),
        )  # fmt: skip

    def _files(self) -> None:
        """Kind and size of every listed file."""
        real = os.path.realpath(self.store)
        straight: dict[str, bool] = {}
        for path, entry in self.entries.items():
            folder = path.rpartition("/")[0]
            if folder not in straight:
                straight[folder] = os.path.realpath(self.store / folder) == os.path.join(real, folder)
            try:
                status = os.lstat(self.store / path)
            except OSError as error:
                self.problem(
                    "missing file", path, f"a file of {entry.bytes:,} bytes", os.strerror(error.errno or 0)
                )
                continue
            if not straight[folder]:
                self.problem("file kind", path, "a file inside the store", "a path through a symbolic link")
            elif not stat.S_ISREG(status.st_mode):
                self.problem("file kind", path, "a regular file", "a link, directory, or device")
            elif status.st_size != entry.bytes:
                self.problem("file size", path, f"{entry.bytes:,} bytes", f"{status.st_size:,} bytes")
            else:
                self.readable.add(path)

    def _unlisted(self) -> list[str]:
        with asking(self.store, "list"):
            found = [name for name in os.listdir(self.store) if not _OWN_NAMES.fullmatch(name)]
        for folder, folders, files in os.walk(
            self.store / self.manifest.generation, onerror=self._unlistable
        ):
            files += [name for name in folders if os.path.islink(os.path.join(folder, name))]
            found += [os.path.relpath(os.path.join(folder, name), self.store) for name in files]
        return sorted(set(found) - self.entries.keys())

    def _unlistable(self, error: OSError) -> None:
        folder = os.path.relpath(error.filename or self.store, self.store)
        if error.errno != errno.ENOENT:  # what is not there is told of by its files
            self.problem(
                "unreadable directory",
                folder,
                "a directory that can be listed",
                os.strerror(error.errno or 0),
            )

    def _open(self, path: str) -> int | None:
        """A descriptor; None, and a problem, where there is none to have."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self.store / path, flags | (os.O_DIRECT if self.access == "direct" else 0))
        except OSError as error:
            if error.errno == errno.EINVAL and self.access == "direct":
                self.access = "buffered"  # the file system knows no direct I/O
                return self._open(path)
            self.readable.discard(path)
            self.problem("unreadable file", path, "a file that can be opened", os.strerror(error.errno or 0))
        return None

    def _fill(
        self, descriptor: int, block: NDArray[np.uint8], offset: int, want: int
    ) -> list[tuple[int, str]]:
        """Read ``want`` bytes; returns offset and reason of each page that cannot be read; it is zero in
        ``block``."""
        bad: list[tuple[int, str]] = []
        done, step = 0, BLOCK_BYTES
        while done < want:
            try:
                end = min(done + step, -(-want // PAGE_BYTES) * PAGE_BYTES)
                got = os.preadv(descriptor, [block[done:end]], offset + done)  # type: ignore[list-item]
                why = "end of file"
            except OSError as error:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                # or it takes the flag and refuses the read
                if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    self.access = "buffered"
                    continue
                if step > PAGE_BYTES:
                    step = PAGE_BYTES  # page by page from here on: which one is it?
                    continue
                got, why = 0, os.strerror(error.errno or 0)
            if got == 0:
                at = done // PAGE_BYTES * PAGE_BYTES
                bad.append((offset + at, why))
                block[at : at + PAGE_BYTES] = 0
                got = at + PAGE_BYTES - done
            done += got
        return bad

    def _blocks(self, path: str) -> Iterator[tuple[int, NDArray[np.uint8], list[int]]]:
        """(offset, a buffer that holds the file from ``margin`` on, offsets of unreadable pages), in file
        order.

        The next block is read while this one is looked at. Unreadable pages are reported here.
        """
        size = self.entries[path].bytes
        descriptor = self._open(path)
        if descriptor is None:
            return
        future = None
        try:
            for turn, offset in enumerate(range(0, size, BLOCK_BYTES)):
                want = min(BLOCK_BYTES, size - offset)
                buffer, other = self._buffers[turn % 2], self._buffers[(turn + 1) % 2]
                bad = (
                    future.result() if future else self._fill(descriptor, buffer[self.margin :], offset, want)
                )
                after = offset + BLOCK_BYTES
                if after < size:
                    rest = min(BLOCK_BYTES, size - after)
                    future = submitted(self.pool, self._fill, descriptor, other[self.margin :], after, rest)
                for at, why in bad:
                    self.readable.discard(path)
                    self.problem("unreadable page", path, "a page that can be read", why, at)
                yield offset, buffer[: self.margin + want], [at for at, _ in bad]
                self._done_bytes += want
                if self._progress is not None:
                    self._progress(Progress(path, self._done_bytes, self._total_bytes))
        finally:
            if future is not None:
                future.exception()
            os.close(descriptor)

    def _digest(self, path: str) -> None:
        """A whole file against its digest."""
        digest = hashlib.sha256()
        for _, buffer, _ in self._blocks(path):
            digest.update(crc_pages(buffer[self.margin :]).tobytes())
        if path in self.readable and digest.hexdigest() != self.entries[path].digest:
            self.problem("file digest", path, self.entries[path].digest, digest.hexdigest())

    def _numbers(self, entry: ArrayEntry, first: int, count: int) -> NDArray[Any]:
        """Elements [first, first + count) of a vector whose file is readable; fewer where it ends early."""
        chunk = array_chunk(entry)
        out = np.empty(count, dtype_from_name(entry.dtype))
        if chunk is None or count == 0:
            return out[:0]
        with asking(self.store / chunk, "read"), open_plain(self.store / chunk) as file:
            got = os.preadv(file.fileno(), [out.view(np.uint8)], first * out.itemsize)  # type: ignore[list-item]
        return out[: got // out.itemsize]

    def _vector(
        self, entry: ArrayEntry, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        end = entry.shape[0] if end is None else end
        for first in range(start, end, _PIECE):
            yield first, self._numbers(entry, first, min(_PIECE, end - first))

    def _sound(self, entry: ArrayEntry) -> bool:
        chunk = array_chunk(entry)
        return chunk is None or (chunk in self.readable and chunk not in self.faulty)

    def _metadata(self, folder: str, shape: list[int], chunk_shape: list[int], dtype: str) -> None:
        """``zarr.json`` of an array against the manifest."""
        path = f"{folder}/zarr.json"
        if path not in self.entries:
            self.problem("metadata", path, "zarr metadata, listed in the manifest", "none")
        if path not in self.readable or path in self.faulty:
            return
        stored, extra = zarr_storage(dtype_from_name(dtype))
        chunks = [max(1, n) for n in [*chunk_shape, *extra]]
        wanted = {
            "zarr_format": 3, "node_type": "array", "shape": [*shape, *extra], "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        }  # fmt: skip
        try:
            with asking(self.store / path, "read"), open(self.store / path, "rb") as file:
                found = json.loads(file.read(_METADATA_BYTES_MAX))
            codecs = [
                (c["name"], c.get("configuration", {}).get("endian", "little")) for c in found["codecs"]
            ]
            for key, value in wanted.items():
                if found.get(key) != value:
                    self.problem("metadata", path, f"{key} = {json.dumps(value)}", json.dumps(found.get(key)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.problem("metadata", path, "zarr v3 array metadata", f"something else ({error!r})")
            return
        if codecs != [("bytes", "little")]:
            self.problem(
                "metadata", path, "the codec bytes alone, little-endian", json.dumps(found["codecs"])
            )

    def _table(self, table: TableEntry) -> None:
        layout, order, row_shape = table.layout, table.order, table.row_shape
        self._metadata(table.path, [table.rows, *row_shape], [table.rows_per_chunk, *row_shape], table.dtype)
        maps = [
            entry
            for entry in (order.node_of_row, order.row_of_node, order.rows_by_degree)
            if entry is not None
        ]
        for entry in (table.page_checksums, order.partition_offsets, *maps):
            self._metadata(entry.path, entry.shape, entry.shape, entry.dtype)
        before = self.problem_count
        self._maps(table)
        chunks = {table.chunk_path(chunk): chunk for chunk in range(layout.chunks)}
        total = sum(self._chunk(table, chunk) for path, chunk in chunks.items() if path in self.readable)
        recorded, actual = table.statistics.get("rows_digest"), f"{total % 2**64:016x}"
        # With a bad page or map the digest is wrong for a known reason; it is there for what nothing else
        # sees.
        blameless = (
            self.problem_count == before and chunks.keys() <= self.readable and all(map(self._sound, maps))
        )
        if blameless and recorded is not None and recorded != actual:
            self.problem("rows digest", table.path, recorded, actual)

    def _maps(self, table: TableEntry) -> None:
        order, rows = table.order, table.rows
        if self._sound(order.partition_offsets):
            self._partitions(order.partition_offsets, rows)
        if (order.row_of_node is None) != (order.node_of_row is None):
            self.problem("map", table.path, "both row_of_node and node_of_row, or neither", "one of them")
        row_of, node_of, degrees = order.row_of_node, order.node_of_row, order.rows_by_degree
        by_row = self._map_digest(row_of, rows, lambda nodes, rows: _sum(mix64(nodes) + rows))
        by_node = self._map_digest(node_of, rows, lambda rows, nodes: _sum(mix64(nodes) + rows))
        if node_of is not None and by_row is not None and by_node is not None and by_row != by_node:
            self.problem("map", str(array_chunk(node_of)), "the inverse of row_of_node", "something else")
        # All values against 0, 1, 2 ... as a set: the difference is zero for a permutation.
        if degrees is not None and self._map_digest(degrees, rows, lambda i, v: _sum(v) - _sum(i)):
            self.problem(
                "map", str(array_chunk(degrees)), f"a permutation of 0 to {rows - 1:,}", "something else"
            )

    def _partitions(self, entry: ArrayEntry, rows: int) -> None:
        last, ascend = 0, True
        for first, offsets in self._vector(entry):
            ascend &= last <= int(offsets[0]) and find_fall(offsets) < 0 and (first > 0 or offsets[0] == 0)
            last = int(offsets[-1])
        if not ascend or last != rows:
            self.problem("map", str(array_chunk(entry)), f"offsets that ascend from 0 to {rows:,}", "others")

    def _map_digest(self, entry: ArrayEntry | None, rows: int, digest: Callable[..., int]) -> int | None:
        """Sum of ``digest(index, values)`` modulo 2**64; None where the map is absent or damaged. Checks the
        range."""
        if entry is None or not self._sound(entry):
            return None
        total, path = 0, str(array_chunk(entry))
        for first, values in self._vector(entry):
            for at in np.flatnonzero((values < 0) | (values >= rows))[:1]:
                place = (first + int(at)) * values.itemsize
                self.problem("map", path, f"values from 0 to {rows - 1:,}", values[at], place)
            index = np.arange(first, first + len(values), dtype=np.uint64)
            total = add(total, digest(index, values.astype(np.uint64)))
        return total

    def _chunk(self, table: TableEntry, chunk: int) -> int:
        """One chunk file against its checksums and its digest; returns the digest of its rows."""
        path, layout = table.chunk_path(chunk), table.layout
        sums, first_page = array_chunk(table.page_checksums), chunk * layout.pages_per_chunk
        known = sums in self.readable
        digest, by_checksums = hashlib.sha256(), hashlib.sha256()
        for _, stored in self._vector(
            table.page_checksums, first_page, first_page + layout.pages_per_chunk * known
        ):
            by_checksums.update(stored.tobytes())
        trusted = by_checksums.hexdigest() == self.entries[path].digest
        rows = _Rows(self, table, chunk)
        for offset, buffer, bad in self._blocks(path):
            block = buffer[self.margin :]
            actual = crc_pages(block)
            digest.update(actual.tobytes())
            if known:
                at = first_page + offset // PAGE_BYTES
                stored = self._numbers(table.page_checksums, at, len(actual))
                self.pages += len(stored)
                for k in map(int, np.flatnonzero(stored != actual[: len(stored)])):
                    data, kept, place = f"{actual[k]:08x}", f"{stored[k]:08x}", offset + k * PAGE_BYTES
                    if trusted and place not in bad:
                        self.problem("page checksum", path, kept, data, place)
                    elif place not in bad:
                        self.problem("stored checksum", str(sums), data, kept, 4 * (at + k))
            rows.take(buffer)
            end = max(0, layout.data_bytes - chunk * layout.chunk_bytes - offset)
            if block[end:].any():
                self.problem("padding", path, "zero bytes after the last row", "others", offset + end)
        if (
            path in self.readable
            and path not in self.faulty
            and digest.hexdigest() != self.entries[path].digest
        ):
            self.problem("file digest", path, self.entries[path].digest, digest.hexdigest())
        return rows.digest


class _Rows:
    """The rows of one chunk, cut out of its blocks, and their digest."""

    def __init__(self, scrub: _Scrub, table: TableEntry, chunk: int) -> None:
        self.digest = 0
        self._scrub = scrub
        self._nodes = table.order.node_of_row
        self._known = self._nodes is None or scrub._sound(self._nodes)  # without node ids there is no digest
        self._row_bytes = table.row_bytes
        self._row = chunk * table.rows_per_chunk
        self._end = min(self._row + table.rows_per_chunk, table.rows)
        self._rest = np.empty(0, np.uint8)

    def take(self, buffer: NDArray[np.uint8]) -> None:
        """The next block; the begun row before it goes into the margin."""
        begin = self._scrub.margin - len(self._rest)
        buffer[begin : self._scrub.margin] = self._rest
        data = buffer[begin:]
        count = min(len(data) // self._row_bytes, self._end - self._row)
        if not self._known:
            return
        for first in range(0, count, _PIECE):
            piece, row = min(_PIECE, count - first), self._row + first
            nodes = (
                np.empty(0, np.int64)
                if self._nodes is None
                else self._scrub._numbers(self._nodes, row, piece)
            )
            if self._nodes is not None and len(nodes) < piece:
                return
            address = address_of(data) + first * self._row_bytes
            self.digest = add(self.digest, int(digest_rows(address, self._row_bytes, nodes, row, piece)))
        self._row += count
        self._rest = data[count * self._row_bytes :].copy() if self._row < self._end else data[:0]
