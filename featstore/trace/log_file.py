"""A trace's files as they are read: head, frames, the checkpoint, and how far an unfinished recording is.

:mod:`featstore.trace.log_format` has the bytes, :mod:`featstore.trace.recorder` what is there after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.files import open_regular, read_fully, read_small
from featstore.base.memory import check_machine
from featstore.base.system import asking
from featstore.errors import CorruptionError, FormatError
from featstore.storage.manifest import NOT_JSON
from featstore.trace.log_format import (
    FRAME,
    HEAD,
    HEAD_BYTES_MAX,
    START_BYTES,
    Front,
    Head,
    check_sample,
    decode_front,
    decode_head,
    start_of,
)

TRACE_NAME = "trace.log"
LOG_NAME = "recording.log"
CHECKPOINT_NAME = "recording.json"


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


def scan_frames(
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
    except NOT_JSON as error:
        raise FormatError(f"cannot read {path}: {error}; start anew with overwrite (--overwrite)") from None


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
            1 for _ in scan_frames(descriptor, path, head, len(block), size, checkpoint.bytes, samples=False)
        )
        return HowFar(batches, size, head.fingerprint)
    except CorruptionError:
        if checkpoint.bytes:
            raise
        return HowFar(0, size, {})  # not even its head was whole
    finally:
        os.close(descriptor)
