"""Writing a trace's log: mini-batch after mini-batch, so that one that is killed at any moment can go on.

A trace is a directory. While it is recorded it holds ``recording.log``, which grows by frames, and
``recording.json``, which says how much of it is durable; at the end the index and the tail are appended,
everything is fsynced, and the log is renamed to ``trace.log``: before that rename there is the old trace or
none, after it the new one.

**What can be relied on after a crash.** Frames are written in order, so what is usable is a prefix. Every 64
MiB the log is fsynced and then ``recording.json`` replaced; a bad frame before the place it names is damage
(CorruptionError), behind it it is only torn, and cut off with all that follows. Whole frames behind it are
taken, and written once more: after a failed fsync the kernel may hold pages that it calls clean and that
never reached the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.files import open_regular, read_fully, read_small
from featstore.base.memory import check_machine
from featstore.base.system import asking, is_there
from featstore.errors import (
    CorruptionError,
    FormatError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
)
from featstore.storage.belongings import is_ours
from featstore.storage.disk import Disk, File
from featstore.storage.manifest import MANIFEST_NAME
from featstore.trace.log_format import (
    FRAME,
    HEAD,
    HEAD_BYTES_MAX,
    NODE_TYPES_MAX,
    START_BYTES,
    Front,
    Head,
    IndexBuilder,
    check_sample,
    decode_front,
    decode_head,
    encode_front,
    encode_head,
    encode_tail,
    start_of,
)

TRACE_NAME = "trace.log"
LOG_NAME = "recording.log"
CHECKPOINT_NAME = "recording.json"
BEGINS = {TRACE_NAME: HEAD, LOG_NAME: HEAD, CHECKPOINT_NAME: b'{"'}
CHECKPOINT_BYTES = 64 * 2**20
_HOLD_BYTES = 2**20


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of a log is durable."""

    frames: int
    bytes: int


def read_piece(descriptor: int, path: Path, offset: int, length: int) -> NDArray[np.uint8]:
    """Bytes of a file in memory of their own, which begins at a multiple of 64. Raises CorruptionError where
    the file ends before, BudgetError where no memory of this machine holds so many."""
    check_machine(length, f"read {length:,} bytes of {path} at byte {offset:,}")
    out = empty_rows(length, 1)
    got = read_fully(descriptor, out, offset, path)
    if got < length:
        raise CorruptionError(path, offset + got, f"{length - got} bytes more", "the end of the file")
    return out


def read_head(descriptor: int, path: Path, file_bytes: int) -> tuple[Head, NDArray[np.uint8]]:
    """A log's head, and its bytes."""
    start = read_piece(descriptor, path, 0, START_BYTES)
    _, length = start_of(start, HEAD, path, 0)
    if length > min(file_bytes, HEAD_BYTES_MAX):
        raise CorruptionError(
            path, 0, f"a head of at most {min(file_bytes, HEAD_BYTES_MAX):,} bytes", f"{length:,}"
        )
    block = read_piece(descriptor, path, 0, length)
    return decode_head(block, path), block


def read_frame(
    descriptor: int,
    path: Path,
    offset: int,
    end: int,
    number: int,
    node_types: list[str],
    samples: bool = True,
) -> tuple[Front, NDArray[np.uint8], NDArray[np.uint8]]:
    """(front, its bytes, the sample) of the frame at ``offset`` of a log that ends at ``end``. Raises
    CorruptionError unless it is whole.

    Without ``samples`` the sample is neither read nor checked, and comes out empty.
    """
    _, length = start_of(read_piece(descriptor, path, offset, START_BYTES), FRAME, path, offset)
    if length > end - offset:
        raise CorruptionError(path, offset, f"at most {end - offset:,} bytes", f"a frame of {length:,}")
    block = read_piece(descriptor, path, offset, length)
    front = decode_front(block, number, node_types, path, offset)
    if front.sample_bytes > end - offset - length:
        raise CorruptionError(
            path, offset, f"at most {end - offset - length:,} bytes", f"a sample of {front.sample_bytes:,}"
        )
    if not samples:
        return front, block, np.empty(0, np.uint8)
    sample = read_piece(descriptor, path, offset + length, front.sample_bytes)
    check_sample(sample, front.sample_crc, path, offset + length)
    return front, block, sample


def scan(
    descriptor: int, path: Path, head: Head, begin: int, end: int, durable: int, samples: bool = True
) -> Iterator[tuple[Front, NDArray[np.uint8], NDArray[np.uint8]]]:
    """The whole frames of an unfinished log, in order, up to the first that is torn.

    Raises CorruptionError for a bad frame that begins before ``durable``.
    """
    number, at = 0, begin
    while at < end:
        try:
            found = read_frame(descriptor, path, at, end, number, head.node_types, samples)
        except CorruptionError:
            if at < durable:
                raise
            return
        yield found
        number += 1
        at += len(found[1]) + found[0].sample_bytes


def load_checkpoint(directory: Path) -> Checkpoint:
    """How much of a directory's log is durable; nothing where no checkpoint was reached."""
    path = directory / CHECKPOINT_NAME
    try:
        return msgspec.json.decode(read_small(path, 2**10), type=Checkpoint)
    except FileNotFoundError:
        return Checkpoint(0, 0)
    except msgspec.DecodeError as error:
        raise FormatError(f"cannot read {path}: {error}; start anew with overwrite (--overwrite)") from None


def begin(directory: Path, disk: Disk, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is a recording to go on with. The caller holds the lock.

    Raises StoreExistsError where there is something that neither option allows to touch, IncompleteStoreError
    where there is nothing to resume.
    """
    if is_there(directory / MANIFEST_NAME):
        raise StoreExistsError(f"{directory} is a store, not a trace; give another path")
    finished, checkpoint = (is_ours(directory / name, BEGINS[name]) for name in (TRACE_NAME, CHECKPOINT_NAME))
    unfinished = is_ours(directory / LOG_NAME, b"" if checkpoint else HEAD)  # which proves a damaged log, too
    if resume and unfinished:
        return True
    if resume and finished:
        raise StoreExistsError(f"there is nothing to resume in {directory}: its recording was completed")
    if resume:
        raise IncompleteStoreError(
            f"there is nothing to resume in {directory}; record without resume (--resume)"
        )
    if unfinished and not overwrite:
        raise StoreExistsError(
            f"{directory} holds an unfinished recording; go on with resume (--resume; the same sampler "
            "and options), or start anew with overwrite (--overwrite)"
        )
    if finished and not overwrite:
        raise StoreExistsError(
            f"{directory} already holds a trace; give another path, or replace it with overwrite "
            "(--overwrite)"
        )
    if unfinished or checkpoint:
        # An old checkpoint must never be taken for the new log's: it is gone for good before that begins.
        disk.unlink(directory / CHECKPOINT_NAME)
        disk.unlink(directory / LOG_NAME)
        disk.fsync_dir(directory)
    return False


@dataclass(frozen=True)
class HowFar:
    """What there is of an unfinished recording: whole mini-batches (the bytes of their samples are not looked
    at), bytes of the log, fingerprint."""

    batches: int
    bytes: int
    fingerprint: Mapping[str, Any]


def how_far(directory: Path) -> HowFar:
    """How far the unfinished recording in a directory is. Raises CorruptionError for damage in what was
    durable, DeviceError."""
    path, checkpoint = directory / LOG_NAME, load_checkpoint(directory)
    with asking(path, "look at"):
        size = path.stat().st_size
    descriptor = open_regular(path, size)
    try:
        head, block = read_head(descriptor, path, size)
        batches = sum(
            1 for _ in scan(descriptor, path, head, len(block), size, checkpoint.bytes, samples=False)
        )
        return HowFar(batches, size, head.fingerprint)
    except CorruptionError:
        if checkpoint.bytes:
            raise
        return HowFar(0, size, {})  # not even its head was whole
    finally:
        os.close(descriptor)


class Recorder:
    """Appends mini-batches to a log. The file is made with the first one, which says what node types there
    are."""

    def __init__(
        self, disk: Disk, directory: Path, fingerprint: Mapping[str, Any] | None, drop: list[str]
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._path = directory / LOG_NAME
        self._fingerprint = fingerprint
        self._drop = drop
        self._file: File | None = None
        self._index: IndexBuilder | None = None
        self._held: list[NDArray[np.uint8]] = []
        self._held_bytes = self._written = self._durable = 0
        self.head: Head | None = None
        self.last_ids: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return 0 if self._index is None else len(self._index)

    @property
    def bytes(self) -> int:
        """Of the log, as far as it is."""
        return self._written + self._held_bytes

    # Going on.

    def resume(self) -> None:
        """Take up what is whole of the log. Raises CorruptionError for damage, SourceError where it was of
        something else."""
        checkpoint = load_checkpoint(self._directory)
        self._file = self._disk.create(self._path, keep=True)
        with asking(self._path, "look at"):
            end = os.fstat(self._file.descriptor).st_size
        if end < checkpoint.bytes:
            raise CorruptionError(self._path, end, f"{checkpoint.bytes:,} durable bytes", f"{end:,} bytes")
        try:
            head, block = read_head(self._file.descriptor, self._path, end)
        except CorruptionError:
            if checkpoint.bytes:
                raise
            self._disk.close(self._file)
            self._file = None  # killed before anything was whole: the first mini-batch makes the file anew
            return
        self._check(head)
        self._start(head, block, checkpoint.bytes)
        assert self._index is not None
        for front, front_block, sample in scan(
            self._file.descriptor, self._path, head, len(block), end, checkpoint.bytes
        ):
            for piece in (front_block, sample) if self._index.end >= checkpoint.bytes else ():
                self._put(piece)
            self._index.add(len(front_block), front)
            self.last_ids = dict(front.ids)
            if self._index.end <= checkpoint.bytes:
                self._written = self._durable = self._index.end
            self._flush_some()
        self._flush()
        if self._durable < checkpoint.bytes or len(self) < checkpoint.frames:
            raise CorruptionError(
                self._path, self._durable, f"{checkpoint.frames} durable frames", f"{len(self)} frames"
            )
        self._disk.truncate(self._file, self._written)

    def _check(self, head: Head) -> None:
        """Raise SourceError where the unfinished recording was of something else, naming what differs."""
        then, now = head.fingerprint, self._fingerprint
        for key in () if now is None else sorted({*then, *now}):
            assert now is not None
            if (key in then, then.get(key)) != (key in now, now.get(key)):
                raise SourceError(
                    f"cannot resume: the unfinished recording had {key} = {then.get(key)!r}, this one "
                    f"has {now.get(key)!r}; give the same sampler and options, or start anew with "
                    "overwrite (--overwrite)"
                )
        if head.drop != self._drop:
            raise SourceError(
                f"cannot resume: the unfinished recording had drop = {head.drop!r}, this one has "
                f"{self._drop!r}"
            )

    def _start(self, head: Head, block: NDArray[np.uint8], durable: int) -> None:
        self.head = head
        self._index = IndexBuilder(block, len(head.node_types))
        if durable:
            self._written = self._durable = len(block)
        else:
            self._put(block)

    # Appending.

    def append(self, ids: dict[str, NDArray[Any]], sample: NDArray[np.uint8]) -> None:
        """Add a mini-batch. Raises SourceError for a node type that the first one had not."""
        if self.head is None:
            self._begin(list(ids))
        assert self.head is not None
        assert self._index is not None
        unknown = [name for name in ids if len(ids[name]) and name not in self.head.node_types]
        if unknown:
            raise SourceError(
                f"there are nodes of type {unknown[0]!r}, which the first mini-batch had not: it had "
                f"{self.head.node_types}; give every node type from the first one on, with no ids "
                "where there are none"
            )
        none = np.empty(0, np.int32)
        ordered = {name: ids.get(name, none) for name in self.head.node_types}
        block, front = encode_front(len(self), ordered, sample)
        self._put(block)
        self._put(sample)
        self._index.add(len(block), front)
        self._flush_some()
        if self._index.end - self._durable >= CHECKPOINT_BYTES:
            self._checkpoint()

    def _begin(self, node_types: list[str]) -> None:
        if not 1 <= len(node_types) <= NODE_TYPES_MAX:
            raise SourceError(f"there are {len(node_types)} node types; a trace has 1 to {NODE_TYPES_MAX}")
        head = Head(node_types, dict(self._fingerprint or {}), self._drop)
        block = encode_head(head)
        if len(block) > HEAD_BYTES_MAX:
            raise SourceError(
                f"fingerprint and node types take {len(block):,} bytes; at most {HEAD_BYTES_MAX:,} can "
                "be kept"
            )
        self._file = self._disk.create(self._path)
        self._disk.fsync_dir(self._directory)
        self._start(head, block, 0)

    def _put(self, piece: NDArray[np.uint8]) -> None:
        if len(piece):
            self._held.append(piece)
            self._held_bytes += len(piece)

    def _flush_some(self) -> None:
        if self._held_bytes >= _HOLD_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what is held, small pieces together."""
        small: list[NDArray[np.uint8]] = []
        for piece in self._held:
            if len(piece) >= _HOLD_BYTES:
                self._write(small)
                small = []
                self._write([piece])
            else:
                small.append(piece)
        self._write(small)
        self._held, self._held_bytes = [], 0

    def _write(self, pieces: list[NDArray[np.uint8]]) -> None:
        assert self._file is not None
        if pieces:
            data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            self._disk.write(self._file, self._written, data)
            self._written += len(data)

    def _checkpoint(self) -> None:
        assert self._file is not None
        self._flush()
        self._disk.fsync(self._file)
        state = msgspec.json.encode(Checkpoint(len(self), self._written))
        self._disk.replace_file(self._directory / CHECKPOINT_NAME, state)
        self._durable = self._written

    # Ending.

    def commit(self) -> None:
        """Finish the log and make it the directory's trace."""
        assert self._file is not None
        assert self._index is not None
        index = self._index.encode()
        tail, _ = encode_tail(self._index, len(index))
        self._put(index)
        self._put(tail)
        self._flush()
        self._disk.fsync(self._file)
        self.close()
        self._disk.rename(self._path, self._directory / TRACE_NAME)
        self._disk.fsync_dir(self._directory)
        self._disk.unlink(self._directory / CHECKPOINT_NAME)

    def save(self) -> None:
        """After an error that has to be told: write what is held, so that only the mini-batch in hand is
        lost."""
        if self._file is not None:
            with suppress(OSError):
                self._flush()

    def close(self) -> None:
        """Leave the log as it is. May be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)
