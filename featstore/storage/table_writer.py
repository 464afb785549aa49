"""Writing a table's chunk files: pages in row order, their checksums beside them, never more than a few
buffers in memory.

:class:`TableWriter` takes runs of whole pages at page offsets of the table's address space and hands them to
two threads, which compute the checksums, write through the :class:`~featstore.storage.disk.Disk` with direct
I/O, and give the buffer back. A checkpoint waits for the threads and fsyncs the files written since the last
one; what lies before it survives a crash and is not written again by a resumed pack. :func:`write_array`
writes a small array as a zarr array of one chunk, :func:`write_vector` a table of plain numbers.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.base.dtypes import dtype_name, zarr_storage
from featstore.base.files import RegularFile
from featstore.base.native import address_of
from featstore.base.system import room_for_files, status_of, submitted
from featstore.base.threads import thread_pool
from featstore.errors import ArgumentError, CorruptionError
from featstore.layout import TableLayout
from featstore.storage.disk import Disk, File
from featstore.storage.manifest import ArrayEntry, FileEntry, OrderEntry, TableEntry, array_chunk
from featstore.storage.rows_digest import add, digest_rows
from featstore.units import PAGE_BYTES

WRITE_THREADS = 2
_BLOCK_BYTES = 2 * 2**20
_NO_NODES = np.empty(0, np.int64)
_ZERO_PAGE_CHECKSUM = int(crc_pages(np.zeros(PAGE_BYTES, np.uint8))[0])


def zarr_array_json(shape: list[int], chunk_shape: list[int], data_type: str) -> bytes:
    """The zarr v3 metadata of an array of raw little-endian chunks named ``c.0.0``."""
    fill: Any = False if data_type == "bool" else [0, 0] if data_type.startswith("complex") else 0
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if data_type not in ("bool", "int8", "uint8"):
        bytes_codec["configuration"] = {"endian": "little"}
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [bytes_codec],
        "attributes": {},
    }
    return json.dumps(metadata, indent=2).encode() + b"\n"


def zarr_group_json() -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=2).encode() + b"\n"


class Catalogue:
    """Writes the small files of a generation and remembers every file for the manifest."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk = disk
        self.root = root
        self.files: dict[str, FileEntry] = {}
        self.directories: set[Path] = set()

    def directory(self, path: str) -> Path:
        """Make a directory below the store, with the ones above it."""
        full = self.root
        for part in path.split("/"):
            full = full / part
            if full not in self.directories:
                self.disk.mkdir(full)
                self.disk.fsync_dir(full.parent)
                self.directories.add(full)
        return full

    def write(self, path: str, data: bytes | NDArray[np.uint8]) -> None:
        """Write a file below the store, durable."""
        self.directory(path.rpartition("/")[0])
        self.disk.write_file(self.root / path, data)
        view = np.frombuffer(data, np.uint8)
        self.add(path, len(view), digest_of_checksums(crc_pages(view)))

    def add(self, path: str, size: int, digest: str) -> None:
        self.files[path] = FileEntry(path, size, digest)

    def fsync_directories(self) -> None:
        """Make all names durable, the deepest directories first."""
        for directory in sorted(self.directories, key=lambda p: (-len(p.parts), p)):
            self.disk.fsync_dir(directory)


def write_array(catalogue: Catalogue, path: str, values: NDArray[Any]) -> ArrayEntry:
    """Write a small array in the directory ``path`` (below the store) and return its entry."""
    values = np.ascontiguousarray(values).reshape(values.shape)
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    entry = ArrayEntry(path, list(values.shape), dtype_name(values.dtype))
    stored, extra = zarr_storage(little.dtype)
    shape = [*values.shape, *extra]
    catalogue.write(f"{path}/zarr.json", zarr_array_json(shape, [max(1, n) for n in shape], stored))
    chunk = array_chunk(entry)
    if chunk is not None:
        catalogue.write(chunk, little.reshape(-1).view(np.uint8))
    return entry


def write_rows_metadata(catalogue: Catalogue, entry: TableEntry, dtype: np.dtype[Any]) -> None:
    """The ``zarr.json`` of a table's rows and of its checksums."""
    stored, extra = zarr_storage(dtype)
    rest = [*entry.row_shape, *extra]
    catalogue.write(
        f"{entry.path}/zarr.json", zarr_array_json([entry.rows, *rest], [entry.rows_per_chunk, *rest], stored)
    )
    sums = entry.page_checksums
    catalogue.write(f"{sums.path}/zarr.json", zarr_array_json(sums.shape, [max(1, sums.shape[0])], "uint32"))


def catalogue_rows(catalogue: Catalogue, entry: TableEntry) -> None:
    """Enter a table's chunk files, with digests made from the checksums that were written, and the checksums'
    own file. Raises CorruptionError where one is not there, whole: a journal may call done what is not."""
    layout, own = entry.layout, []
    path = array_chunk(entry.page_checksums)
    if path is None:
        return
    size, chunk_bytes = 4 * layout.pages, 4 * layout.pages_per_chunk
    sizes = {entry.chunk_path(chunk): layout.chunk_bytes for chunk in range(layout.chunks)}
    for name, expected in (sizes | {path: size}).items():
        status = status_of(catalogue.root / name)
        if status is None or status.st_size != expected:
            found = "no file" if status is None else f"{status.st_size:,} bytes"
            advice = "start anew with --overwrite"
            raise CorruptionError(catalogue.root / name, None, f"a file of {expected:,} bytes", found, advice)
    with RegularFile(catalogue.root / path, size) as file:
        for chunk in range(layout.chunks):
            checksums = file.read_at(chunk * chunk_bytes, min(chunk_bytes, size - chunk * chunk_bytes))
            digest = digest_of_checksums(checksums.view("<u4"))
            catalogue.add(entry.chunk_path(chunk), layout.chunk_bytes, digest)
        for at in range(0, size, _BLOCK_BYTES):
            own.append(crc_pages(file.read_at(at, min(_BLOCK_BYTES, size - at))))
    catalogue.add(path, size, digest_of_checksums(np.concatenate(own)))


def write_vector(
    catalogue: Catalogue, base: str, blocks: Iterable[NDArray[Any]], rows: int, dtype: np.dtype[Any]
) -> TableEntry:
    """Write ``rows`` numbers, which come in blocks, as a table in the directory ``base`` (below the store),
    durably."""
    layout = TableLayout.choose(rows, dtype.itemsize)
    catalogue.directory(f"{base}/rows")
    catalogue.directory(f"{base}/page_checksums")
    catalogue.write(f"{base}/zarr.json", zarr_group_json())
    offsets = write_array(catalogue, f"{base}/partition_offsets", np.array([0, rows]))
    entry = TableEntry(
        path=f"{base}/rows", rows=rows, row_shape=[], dtype=dtype_name(dtype), row_bytes=dtype.itemsize,
        rows_per_chunk=layout.rows_per_chunk,
        page_checksums=ArrayEntry(f"{base}/page_checksums", [layout.pages], "uint32"),
        order=OrderEntry("given", {}, offsets), statistics={},
    )  # fmt: skip
    write_rows_metadata(catalogue, entry, dtype)
    digest = done = 0
    checksums = array_chunk(entry.page_checksums)
    if checksums is not None:
        writer = TableWriter(
            catalogue.disk,
            layout,
            lambda chunk: catalogue.root / entry.chunk_path(chunk),
            catalogue.root / checksums,
        )
        try:
            appender = Appender(writer, 0, _BLOCK_BYTES // 2)
            for block in blocks:
                data = np.ascontiguousarray(block, dtype)
                digest = add(
                    digest, int(digest_rows(address_of(data), dtype.itemsize, _NO_NODES, done, len(data)))
                )
                appender.append(data.view(np.uint8))
                done += len(data)
            appender.finish()
            writer.finish()
        finally:
            writer.close()
        catalogue_rows(catalogue, entry)
    if done != rows:
        raise ArgumentError(f"{base}: {done} rows were given, {rows} were announced")
    return msgspec.structs.replace(entry, statistics={"rows_digest": f"{digest:016x}"})


class TableWriter:
    """Writes the chunk files and the page checksums of one table; see the module's text.

    ``path`` is the directory of the rows, ``checksum_path`` the file of the checksums, both below ``root``.
    ``threads``: writes under way at once; short ones need more of them.
    """

    def __init__(
        self, disk: Disk, layout: TableLayout, chunk_path: Callable[[int], Path], checksum_path: Path,
        threads: int = WRITE_THREADS
    ) -> None:  # fmt: skip
        self._disk = disk
        self._layout = layout
        self._chunk_path = chunk_path
        self._files: dict[int, File] = {}
        room_for_files(layout.chunks)
        self._allocated: set[int] = set()  # chunks whose files have their place on the disk
        self._checksums = disk.create(checksum_path, keep=True)
        self._pool = thread_pool(threads, "featstore-write")
        self._pending: deque[Future[None]] = deque()

    def write(self, first_page: int, pages: NDArray[np.uint8], on_written: Callable[[], None]) -> None:
        """Write whole pages at a page offset, soon. ``on_written`` is called when ``pages`` may be used
        again."""
        self.write_runs(pages, np.array([[first_page, 0, len(pages) // PAGE_BYTES]]), on_written)

    def write_runs(
        self, memory: NDArray[np.uint8], runs: NDArray[np.int64], on_written: Callable[[], None]
    ) -> None:
        """Write runs of whole pages, soon, one after the other. ``runs``, int64 [n, 3]: the page where a run
        goes, the byte of ``memory`` at which it begins, and its pages. ``on_written`` is called when these
        bytes may be used again."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        # Files are opened here, by one thread, so that two writers of one chunk share a descriptor.
        for page, _, count in runs.tolist():
            per_file = self._layout.pages_per_chunk
            for chunk in range(page // per_file, (page + count - 1) // per_file + 1):
                if chunk not in self._files:
                    self._open(chunk)
        self._pending.append(submitted(self._pool, self._write, memory, runs, on_written))

    def _open(self, chunk: int) -> None:
        file = self._files[chunk] = self._disk.create(self._chunk_path(chunk), keep=True, direct=True)
        if chunk not in self._allocated:
            self._allocated.add(chunk)
            per_file = self._layout.pages_per_chunk
            used = -(-self._layout.data_bytes // PAGE_BYTES) - chunk * per_file
            self._disk.allocate(file, min(per_file, used) * PAGE_BYTES)

    def _write(
        self, memory: NDArray[np.uint8], runs: NDArray[np.int64], on_written: Callable[[], None]
    ) -> None:
        per_file = self._layout.pages_per_chunk
        files: list[File] = []
        parts: list[tuple[int, int, int, int]] = []
        try:
            for page, at, count in runs.tolist():
                end = page + count
                while page < end:
                    chunk, within = divmod(page, per_file)
                    pages = min(per_file - within, end - page)
                    files.append(self._files[chunk])
                    parts.append((within * PAGE_BYTES, at, pages, 4 * page))
                    page, at = page + pages, at + pages * PAGE_BYTES
            self._disk.write_pages(memory, files, np.array(parts), self._checksums)
        finally:
            on_written()

    def check_written(self, first_page: int, pages: NDArray[np.uint8], path: Path, offset: int) -> None:
        """Raise CorruptionError unless whole pages, read back from ``path`` at ``offset``, are what was
        written there; nothing may have been written since."""
        found = crc_pages(pages)
        with RegularFile(self._checksums.path) as file:
            expected = file.read_at(4 * first_page, 4 * len(found)).view("<u4")
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            bad, advice = int(wrong[0]), "start anew with --overwrite"
            raise CorruptionError(
                path, offset + bad * PAGE_BYTES, f"checksum {expected[bad]:08x} of the 4 KiB page",
                f"{found[bad]:08x}", advice,
            )  # fmt: skip

    def checkpoint(self) -> None:
        """Wait until all that was written is durable."""
        pending, self._pending = self._pending, deque()
        for future in pending:
            future.result()
        for chunk, file in list(self._files.items()):  # what is left after an error, close() closes
            self._disk.fsync(file)
            del self._files[chunk]
            self._disk.close(file)
        self._disk.fsync(self._checksums)
        for directory in (self._chunk_path(0).parent, self._checksums.path.parent):
            self._disk.fsync_dir(directory)

    def finish(self) -> None:
        """Give the last chunk file its final size, fill in the checksums of its padding, make all durable."""
        self.checkpoint()
        layout = self._layout
        written_pages = -(-layout.data_bytes // PAGE_BYTES)
        if layout.chunks:
            last = self._disk.create(self._chunk_path(layout.chunks - 1), keep=True)
            try:
                self._disk.truncate(last, layout.chunk_bytes)
                self._disk.fsync(last)
            finally:
                self._disk.close(last)
        padding = np.full(layout.pages - written_pages, _ZERO_PAGE_CHECKSUM, np.uint32)
        if len(padding):
            self._disk.write(self._checksums, 4 * written_pages, padding.view(np.uint8))
        self._disk.fsync(self._checksums)

    def close(self) -> None:
        """Stop the threads and close what is open, also after an error."""
        self._pool.shutdown(wait=True)
        for file in self._files.values():
            self._disk.close(file)
        self._files = {}
        self._disk.close(self._checksums)


class Appender:
    """A stream of bytes to whole pages: copies what it is given into aligned buffers and writes each when
    full."""

    def __init__(
        self, writer: TableWriter, start_byte: int, buffer_bytes: int, buffers: int = WRITE_THREADS + 1
    ) -> None:
        import queue

        if start_byte % PAGE_BYTES:
            raise ArgumentError("an appender starts at a page")
        self._writer = writer
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        size = max(PAGE_BYTES, buffer_bytes // PAGE_BYTES * PAGE_BYTES)
        for _ in range(buffers):
            self._free.put(aligned_buffer(size))
        self._buffer = self._free.get()
        self._fill = 0
        self.page = start_byte // PAGE_BYTES

    def append(self, data: NDArray[np.uint8]) -> None:
        """Add bytes (uint8 [n]) at the end."""
        done = 0
        while done < len(data):
            take = min(len(data) - done, len(self._buffer) - self._fill)
            self._buffer[self._fill : self._fill + take] = data[done : done + take]
            self._fill += take
            done += take
            if self._fill == len(self._buffer):
                self._flush(len(self._buffer))

    def _flush(self, size: int) -> None:
        buffer = self._buffer
        self._writer.write(self.page, buffer[:size], lambda: self._free.put(buffer))
        self.page += size // PAGE_BYTES
        self._buffer = self._free.get()
        self._fill = 0

    def finish(self) -> None:
        """Write what is left, the last page filled up with zeros."""
        if self._fill:
            size = -(-self._fill // PAGE_BYTES) * PAGE_BYTES
            self._buffer[self._fill : size] = 0
            self._flush(size)
