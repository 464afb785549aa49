"""A trace: mini-batches recorded once, to be gone through again.

What a mini-batch of a GNN reads is known as soon as it is sampled, and sampling does not look at features. So
mini-batches can be drawn beforehand and kept: their node ids, which say what rows they will need, and the
graph sample that training wants, of which only its sampler and the training loop know what it is (DiskGNN,
SIGMOD 2025). A trace is independent of any store: node ids are as the user knows them.

:meth:`Trace.record` takes any iterable of mini-batches as a black box (:mod:`featstore.sampling.minibatch`
says how ids are found in one), turns each graph sample into bytes (:mod:`featstore.trace.samples`, no pickle)
and appends both to a log, one frame a mini-batch (:mod:`featstore.trace.recorder`; the bytes:
:mod:`featstore.trace.log_format`). It holds one mini-batch and a small buffer. What was killed goes on with
``resume=True``.

A finished trace is opened by its index. Reading a mini-batch is one ``pread`` of its frame (or of the part of
it that holds the ids, or the sample), held against its checksum. Nothing is mapped; threads may read side by
side; a trace survives fork and is opened again when it is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.dtypes import Scalar
from featstore.base.files import open_regular
from featstore.base.folders import real_path
from featstore.base.progress import watched
from featstore.base.system import asking, is_directory, is_regular, is_there
from featstore.errors import (
    ClosedError,
    CorruptionError,
    FormatError,
    IdError,
    IncompleteStoreError,
    SourceError,
    StaleError,
)
from featstore.storage.disk import Disk
from featstore.storage.generations import writing
from featstore.trace.filling import TraceProgress, checked_fingerprint, fill
from featstore.trace.log_file import LOG_NAME, TRACE_NAME, read_head, read_piece
from featstore.trace.log_format import (
    TAIL_BYTES,
    Front,
    Head,
    check_sample,
    decode_front,
    decode_index,
    decode_tail,
    digest_of,
)
from featstore.trace.recorder import Recorder, begin_recording
from featstore.trace.sample_decoder import decode

__all__ = ["Trace", "TraceProgress", "is_trace"]


class Trace:
    """A finished trace; made by :meth:`record`. A context manager.

    ``path``, ``uuid`` (derived from the content), ``fingerprint``, ``node_types`` (``("",)`` for ids without
    a type), ``drop`` (attributes that were left out of PyG's objects), ``bytes`` of the file; ``counts``:
    int64 [mini-batches], how many ids, by node type; ``id_max``: the largest id by node type, -1 where there
    is none; ``sample_sizes``: bytes of each mini-batch's sample, 0 where there is none. Iterating gives its
    mini-batches in order, as :meth:`batch` does.

    Raises IncompleteStoreError where there is no finished trace, CorruptionError, FormatError, DeviceError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.descriptor = -1
        self.path = Path(os.path.abspath(args.as_path(path, "path")))
        self.file = self.path / TRACE_NAME
        if not is_there(self.file):
            raise IncompleteStoreError(_what_is_there(self.path))
        with asking(self.file, "look at"):
            size = self.file.stat().st_size
        self.descriptor = open_regular(self.file, size)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with asking(self.file, "look at"):
            self.bytes = os.fstat(self.descriptor).st_size
        head, block = read_head(self.descriptor, self.file, self.bytes)
        if self.bytes < len(block) + TAIL_BYTES:
            raise CorruptionError(self.file, None, "a head, an index and a tail", f"{self.bytes:,} bytes")
        tail = decode_tail(
            read_piece(self.descriptor, self.file, self.bytes - TAIL_BYTES, TAIL_BYTES),
            self.file,
            self.bytes,
        )
        piece = read_piece(self.descriptor, self.file, tail.index_offset, tail.index_bytes)
        index = decode_index(piece, tail.frames, len(head.node_types), self.file, tail.index_offset)
        if (
            index.offsets[0] != len(block) or int(index.counts.sum()) != tail.ids
            or digest_of(block, index.front_crcs) != tail.digest
        ):  # fmt: skip
            raise FormatError(
                f"{self.file} cannot be trusted: head, index and tail contradict each other; record "
                "the trace again"
            )
        self._head: Head = head
        self.index = index
        self.uuid = tail.uuid
        self.fingerprint: dict[str, Scalar] = head.fingerprint
        self.node_types = tuple(head.node_types)
        self.drop = tuple(head.drop)
        self.counts = dict(zip(self.node_types, index.counts, strict=True))
        self.id_max: dict[str, int] = dict(zip(self.node_types, index.id_max.tolist(), strict=True))
        self.sample_sizes: list[int] = index.sample_bytes.tolist()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """The same as ``Trace(path)``."""
        return cls(path)

    # Recording.

    @classmethod
    @watched
    def record(
        cls, batches: Iterable[Any], path: str | os.PathLike[str], *,
        nodes: Callable[[Any], Any] | None = None, drop: Collection[str] = ("x",), resume: bool = False,
        overwrite: bool = False, fingerprint: Mapping[str, Scalar] | None = None,
        progress: bool | Callable[[TraceProgress], None] | None = None, limit: int | None = None,
        disk: Disk | None = None,
    ) -> Trace:  # fmt: skip
        """Record mini-batches, and open what was recorded.

        Args:
            batches: any iterable of mini-batches: ours, PyG's, DGL's, arrays or tensors of node ids, mappings
                {node type: ids}, pairs (ids or mapping, sample); :mod:`featstore.sampling.minibatch` has the
                rules. All have the node types of the first.
            path: the trace's directory.
            nodes: a function from a mini-batch to its node ids, or to {node type: ids}, where no rule finds
                them.
            drop: names of attributes of PyG objects, and of the data of DGL's graphs, that are not kept:
                features, which are read from a store again.
            resume: go on with the recording that was stopped in ``path``. ``batches`` must give the same
                mini-batches again; those recorded are skipped (not even made, where ``batches`` is a
                sequence), and the last of them is compared.
            overwrite: replace what is in ``path``; a finished trace stands until the new one is.
            fingerprint: what tells this recording from another (sampler, seed, fan-outs ...): text, numbers,
                booleans, None. It is kept, is part of the uuid, and a resumed recording must have the same.
            progress: called after each mini-batch with a :class:`TraceProgress`; True for a line on standard
                error.
            limit: record so many mini-batches at most.
            disk: the door for writes.

        Raises SourceError for what cannot be recorded, StoreExistsError, IncompleteStoreError (nothing to
        resume), StoreLockedError, CorruptionError (damage in what is to be resumed), DiskFullError,
        DeviceError.
        """
        if args.as_flag(resume, "resume") & args.as_flag(overwrite, "overwrite"):
            raise SourceError("resume and overwrite contradict each other")
        limit = None if limit is None else args.as_count(limit, "limit")
        nodes, progress = args.as_callback(nodes, "nodes"), args.as_callback(progress, "progress")
        args.as_batches(batches, "batches", functions=False)
        drop = [
            args.as_text(name, "a name in drop")
            for name in args.as_sequence(drop, "drop", "names of attributes")
        ]
        directory, door = real_path(args.as_path(path, "path")), disk or Disk()
        recorder = Recorder(door, directory, checked_fingerprint(fingerprint), sorted(set(drop)))
        if not is_directory(directory):
            if resume:
                raise IncompleteStoreError(f"there is nothing to resume: {directory} is not there")
            if is_there(directory):
                raise SourceError(f"{directory} is a file; give the path of a directory to make")
        with writing(directory, door):
            try:
                if begin_recording(directory, door, resume=resume, overwrite=overwrite):
                    recorder.resume()
                fill(recorder, batches, nodes, drop, limit, progress)
                recorder.commit()
            except BaseException as error:
                # an interrupt, a mini-batch that cannot be kept: not the disk
                if not isinstance(error, OSError):
                    recorder.save()
                raise
            finally:
                recorder.close()
        return cls(path)

    # Reading.

    def __len__(self) -> int:
        """Number of mini-batches."""
        return len(self.index)

    def ids(self, index: int) -> dict[str, NDArray[Any]]:
        """Node ids of a mini-batch by node type, int32 or int64, in memory of their own. Reads nothing else
        of it.

        Raises IndexError, CorruptionError, DeviceError, ClosedError.
        """
        number = self._number(index)
        block = self._read(int(self.index.offsets[number]), int(self.index.front_bytes[number]))
        return dict(self._front(block, number).ids)

    def expect(self, index: int) -> None:
        """Advise the system that the ids of a mini-batch will be read soon. Raises IndexError,
        ClosedError."""
        number = self._number(index)
        if self.descriptor < 0:
            raise _closed()
        offset, length = int(self.index.offsets[number]), int(self.index.front_bytes[number])
        with asking(self.file, "read ahead", offset):
            os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def sample_bytes(self, index: int) -> NDArray[np.uint8]:
        """The encoded sample of a mini-batch, uint8 [n], as :func:`featstore.trace.sample_encoder.encode`
        made it; empty where there is none. Raises as :meth:`ids`."""
        return self._sample_of(index, self.sample_sizes)

    def _sample_of(self, index: int, sizes: list[int]) -> NDArray[np.uint8]:
        number = self._number(index)
        offset = int(self.index.offsets[number] + self.index.front_bytes[number])
        sample = self._read(offset, sizes[number])
        check_sample(sample, int(self.index.sample_crcs[number]), self.file, offset)
        return sample

    def sample(self, index: int) -> object:
        """The sample of a mini-batch, None where there is none; arrays are views of one buffer. Raises as
        :meth:`ids`, and FormatError."""
        return _decoded(self.sample_bytes(index))

    def batch(self, index: int) -> tuple[dict[str, NDArray[Any]], object]:
        """A whole mini-batch, in one read: its ids and its sample, a pair as :meth:`record` takes it. Raises
        as :meth:`sample`."""
        number = self._number(index)
        offset, front_bytes = int(self.index.offsets[number]), int(self.index.front_bytes[number])
        frame = self._read(offset, front_bytes + self.sample_sizes[number])
        front, sample = self._front(frame[:front_bytes], number), frame[front_bytes:]
        check_sample(sample, int(self.index.sample_crcs[number]), self.file, offset + front_bytes)
        return dict(front.ids), _decoded(sample)

    def __iter__(self) -> Iterator[tuple[dict[str, NDArray[Any]], object]]:
        return map(self.batch, range(len(self)))

    def _number(self, index: int) -> int:
        number = args.as_integer(index, "the number of a mini-batch")
        if not 0 <= number < len(self):
            raise IdError(f"mini-batch {args.shown(number)} is none of this trace's {len(self):,}")
        return number

    def _read(self, offset: int, length: int) -> NDArray[np.uint8]:
        if self.descriptor < 0:
            raise _closed()
        return read_piece(self.descriptor, self.file, offset, length)

    def _front(self, block: NDArray[np.uint8], number: int) -> Front:
        """A front that has been read, checked against itself and the index."""
        offset = int(self.index.offsets[number])
        front = decode_front(block, number, self._head.node_types, self.file, offset)
        expected = int(self.index.front_crcs[number])
        if front.crc != expected:
            raise CorruptionError(self.file, offset, f"checksum {expected:08x}", f"{front.crc:08x}")
        for (name, ids), said in zip(front.ids.items(), self.index.counts[:, number].tolist(), strict=True):
            largest = self.id_max[name]
            if len(ids) != said:
                raise CorruptionError(
                    self.file, offset, f"{said:,} ids of type {name!r}, as the index says", f"{len(ids):,}"
                )
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= largest:
                expected_ids = f"node ids of type {name!r} from 0 to {largest:,}, as the index says"
                raise CorruptionError(
                    self.file, offset, expected_ids, f"{int(ids.min()):,} to {int(ids.max()):,}"
                )
        return front

    def close(self) -> None:
        """Close the file. May be called more than once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.uuid)

    def __repr__(self) -> str:
        return f"<Trace {str(self.path)!r}: {len(self):,} mini-batches, {self.bytes:,} bytes>"


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a trace, finished or not."""
    path = args.as_path(path, "path")
    return any(is_regular(Path(path) / name) for name in (TRACE_NAME, LOG_NAME))


def _what_is_there(path: Path) -> str:
    if is_there(path / LOG_NAME):
        return (
            f"{path} holds an unfinished recording: go on with resume=True (`featstore sample` with "
            "--resume, and the same options), or start anew with overwrite"
        )
    return (
        f"{path} is not a trace: it has no {TRACE_NAME}" if is_there(path) else f"there is no trace at {path}"
    )


def _reopen(path: Path, uuid: str) -> Trace:
    trace = Trace(path)
    if trace.uuid != uuid:
        trace.close()
        raise StaleError(f"the trace at {path} was recorded anew since it was pickled; open it again")
    return trace


def _closed() -> ClosedError:
    return ClosedError("the trace is closed; open it again")


def _decoded(sample: NDArray[np.uint8]) -> object:
    return decode(sample) if len(sample) else None


# Filling a recording.
