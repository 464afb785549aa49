"""The bytes of a trace's log: blocks that are made and checked here, and nowhere read or written.

A log is a head, a frame for each mini-batch, an index of the frames and a tail of fixed size. All begin at
multiples of 64 bytes, and alike: eight bytes that name the kind of block, the CRC-32C of what follows it in
the block, a word, the block's length. A frame is its *front* (numbers and node ids) and the sample behind it;
the front holds the sample's checksum, so that ids are read and verified without the sample.
``formats/v1/trace.md`` is the normative text.

**What binds what.** A front's checksum covers its ids and its sample's checksum. The index repeats all of
them, the tail has the SHA-256 over the head and the fronts' checksums in order, and the trace's uuid follows
from that: so no frame can be damaged, lost or put elsewhere unseen, and equal mini-batches with an equal
fingerprint make equal files.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.checks import check_offsets
from featstore.base.compilation import njit
from featstore.base.dtypes import Scalar
from featstore.base.native import address_of
from featstore.errors import CorruptionError, FormatError, FormatVersionError
from featstore.storage.rows_digest import crc_bytes

VERSION = 1
ALIGN_BYTES = 64
HEAD, FRAME, INDEX, TAIL = b"fst-head", b"fst-fram", b"fst-indx", b"fst-tail"
START_BYTES = 24  # of a block: magic, checksum, word, length
TAIL_BYTES = 128
NODE_TYPES_MAX = 1024
HEAD_BYTES_MAX = 16 * 2**20

_START = struct.Struct("<8sIIQ")
_CHECKED_FROM = 12
_HEAD_LENGTH = struct.Struct("<Q")
_FRONT = struct.Struct("<QQ")  # number of the frame, bytes of its sample
_TYPE = struct.Struct("<QQ")  # ids, bytes of one
_TAIL = struct.Struct("<QQQQ32s16s")  # where the index begins, its bytes, frames, ids in all; digest, uuid
_INT32_MAX = 2**31 - 1


@njit(cache=True, nogil=True)
def crc_of(address: int, byte_count: int) -> Any:
    """CRC-32C of the bytes at an address."""
    return crc_bytes(address, byte_count)


def checksum(data: NDArray[np.uint8]) -> int:
    """CRC-32C of ``data``, uint8, contiguous."""
    return int(crc_of(address_of(data), len(data)))


def up(at: int) -> int:
    """The next multiple of 64."""
    return -(-at // ALIGN_BYTES) * ALIGN_BYTES


def _put(block: NDArray[np.uint8], at: int, form: struct.Struct, *values: int | bytes) -> None:
    form.pack_into(block, at, *values)  # type: ignore[arg-type]


def _get(block: NDArray[np.uint8], at: int, form: struct.Struct) -> tuple[Any, ...]:
    return form.unpack_from(block, at)  # type: ignore[arg-type]


def _seal(block: NDArray[np.uint8], kind: bytes, word: int) -> NDArray[np.uint8]:
    """Fill in how a block begins, its checksum last."""
    _put(block, 0, _START, kind, 0, word, len(block))
    _put(block, 0, _START, kind, checksum(block[_CHECKED_FROM:]), word, len(block))
    return block


def _crc_in(block: NDArray[np.uint8]) -> int:
    crc: int = _get(block, 0, _START)[1]
    return crc


def start_of(data: NDArray[np.uint8], kind: bytes, path: Path, offset: int) -> tuple[int, int]:
    """(word, length) of the block that begins with ``data``. Raises CorruptionError where no such block
    begins there."""
    found, _, word, length = _get(data, 0, _START)
    if found != kind or length < START_BYTES or length % ALIGN_BYTES:
        raise CorruptionError(
            path, offset, f"a block {kind.decode()}", f"{found!r} of {length} bytes", _ADVICE
        )
    return word, length


def check_block(block: NDArray[np.uint8], kind: bytes, path: Path, offset: int) -> int:
    """The word of a whole block. Raises CorruptionError where its checksum, length or kind is wrong."""
    word, length = start_of(block, kind, path, offset)
    stored, actual = _crc_in(block), checksum(block[_CHECKED_FROM:])
    if length != len(block) or stored != actual:
        raise CorruptionError(
            path, offset, f"checksum {stored:08x} of {length} bytes", f"{actual:08x}", _ADVICE
        )
    return word


_ADVICE = "record the trace again, or restore it from a copy; `featstore verify` lists every bad mini-batch"


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for all mini-batches. ``drop``: attributes that were left out of PyG's objects."""

    node_types: list[str]
    fingerprint: dict[str, Scalar]
    drop: list[str]


def encode_head(head: Head) -> NDArray[np.uint8]:
    text = np.frombuffer(msgspec.json.encode(head), np.uint8)
    begin = START_BYTES + _HEAD_LENGTH.size
    block = np.zeros(up(begin + len(text)), np.uint8)
    _put(block, START_BYTES, _HEAD_LENGTH, len(text))
    block[begin : begin + len(text)] = text
    return _seal(block, HEAD, VERSION)


def decode_head(block: NDArray[np.uint8], path: Path) -> Head:
    """Raises CorruptionError, FormatVersionError, FormatError."""
    word, _ = start_of(block, HEAD, path, 0)
    if word > VERSION:
        raise FormatVersionError(
            f"{path} has version {word}; this featstore reads up to {VERSION}: install a newer one"
        )
    check_block(block, HEAD, path, 0)
    (length,) = _get(block, START_BYTES, _HEAD_LENGTH)
    begin = START_BYTES + _HEAD_LENGTH.size
    try:
        head = msgspec.json.decode(block[begin : begin + length].data, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path} has a malformed head: {error}") from None
    if (
        word < 1
        or not 1 <= len(head.node_types) <= NODE_TYPES_MAX
        or len(set(head.node_types)) < len(head.node_types)
    ):
        raise FormatError(f"{path} cannot be trusted: version {word}, {len(head.node_types)} node types")
    return head


def id_dtype(ids: NDArray[Any]) -> np.dtype[Any]:
    """int32 where all ids fit, else int64."""
    return np.dtype("<i4") if len(ids) == 0 or int(ids.max()) <= _INT32_MAX else np.dtype("<i8")


def front_bytes_of(counts: list[int], widths: list[int]) -> int:
    """Length of a front."""
    at = START_BYTES + _FRONT.size + _TYPE.size * len(counts)
    for count, width in zip(counts, widths, strict=True):
        at = -(-(at + count * width) // 8) * 8
    return up(at)


@dataclass(frozen=True)
class Front:
    """What a front says. ``ids``: int32 or int64 by node type, views of a front that was read; ``crc``: its
    own checksum."""

    ids: Mapping[str, NDArray[Any]]
    sample_bytes: int
    sample_crc: int
    crc: int


def encode_front(
    number: int, ids: Mapping[str, NDArray[Any]], sample: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], Front]:
    """The front of frame ``number``; ``ids`` are not negative, in the order of the head's node types."""
    arrays = [one.astype(id_dtype(one), copy=False) for one in ids.values()]
    counts, widths = [len(a) for a in arrays], [a.itemsize for a in arrays]
    block = np.zeros(front_bytes_of(counts, widths), np.uint8)
    _put(block, START_BYTES, _FRONT, number, len(sample))
    at = START_BYTES + _FRONT.size
    for count, width in zip(counts, widths, strict=True):
        _put(block, at, _TYPE, count, width)
        at += _TYPE.size
    for one in arrays:
        block[at : at + one.nbytes] = np.ascontiguousarray(one).view(np.uint8)
        at = -(-(at + one.nbytes) // 8) * 8
    sample_crc = checksum(sample)
    _seal(block, FRAME, sample_crc)
    return block, Front(ids, len(sample), sample_crc, _crc_in(block))


def decode_front(
    block: NDArray[np.uint8], number: int, node_types: list[str], path: Path, offset: int
) -> Front:
    """The front of frame ``number``, which begins at ``offset``. Raises CorruptionError."""
    sample_crc = check_block(block, FRAME, path, offset)
    at = START_BYTES + _FRONT.size
    if len(block) >= at + _TYPE.size * len(node_types):
        found, sample_bytes = _get(block, START_BYTES, _FRONT)
        sizes = [_get(block, at + k * _TYPE.size, _TYPE) for k in range(len(node_types))]
        counts, widths = [c for c, _ in sizes], [w for _, w in sizes]
        right = found == number and set(widths) <= {4, 8} and sample_bytes % ALIGN_BYTES == 0
        if right and max(counts) <= len(block) and front_bytes_of(counts, widths) == len(block):
            at += _TYPE.size * len(node_types)
            ids = {}
            for name, (count, width) in zip(node_types, sizes, strict=True):
                ids[name] = block[at : at + count * width].view(f"<i{width}")
                at = -(-(at + count * width) // 8) * 8
            return Front(ids, sample_bytes, sample_crc, _crc_in(block))
    raise CorruptionError(
        path, offset, f"frame {number} of {len(node_types)} node types", "another one", _ADVICE
    )


def check_sample(sample: NDArray[np.uint8], crc: int, path: Path, offset: int) -> None:
    """Raise CorruptionError where a sample that begins at ``offset`` has another checksum."""
    actual = checksum(sample)
    if actual != crc:
        raise CorruptionError(
            path, offset, f"checksum {crc:08x} of {len(sample)} bytes", f"{actual:08x}", _ADVICE
        )


@dataclass(frozen=True)
class FrameIndex:
    """Where each frame is and what is in it. All but ``counts`` and ``id_max`` are by frame.

    ``offsets``: int64 [frames + 1]; ``front_bytes``, ``sample_bytes``: int64; ``front_crcs``,
    ``sample_crcs``: uint32; ``counts``: int64 [node types, frames]; ``id_max``: int64 [node types], -1 where
    a type has no ids at all.
    """

    offsets: NDArray[np.int64]
    front_bytes: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    front_crcs: NDArray[np.uint32]
    sample_crcs: NDArray[np.uint32]
    counts: NDArray[np.int64]
    id_max: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.front_bytes)


class IndexBuilder:
    """Collects the index of a log, frame by frame, and the digest. Holds 24 bytes a frame, and 8 a node
    type."""

    def __init__(self, head: NDArray[np.uint8], node_types: int) -> None:
        self._digest = hashlib.sha256(head.tobytes())
        self._offsets = array("q", [len(head)])
        self._front_bytes, self._sample_bytes = array("q"), array("q")
        self._crcs, self._sample_crcs = array("I"), array("I")
        self._counts = array("q")
        self._id_max = np.full(node_types, -1, np.int64)
        self.ids = 0

    def __len__(self) -> int:
        return len(self._front_bytes)

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self._offsets[-1]

    def add(self, front_bytes: int, front: Front) -> None:
        self._digest.update(front.crc.to_bytes(4, "little"))
        self._offsets.append(self.end + front_bytes + front.sample_bytes)
        self._front_bytes.append(front_bytes)
        self._sample_bytes.append(front.sample_bytes)
        self._crcs.append(front.crc)
        self._sample_crcs.append(front.sample_crc)
        counts = [len(one) for one in front.ids.values()]
        self._counts.extend(counts)
        self.ids += sum(counts)
        largest = [int(one.max()) if len(one) else -1 for one in front.ids.values()]
        self._id_max = np.maximum(self._id_max, largest)

    def digest(self) -> bytes:
        return self._digest.digest()

    def encode(self) -> NDArray[np.uint8]:
        counts = np.array(self._counts, "<i8").reshape(-1, len(self._id_max)).T
        parts = [np.array(v, "<i8") for v in (self._offsets, self._front_bytes, self._sample_bytes)]
        parts += [counts, self._id_max, np.array(self._crcs, "<u4"), np.array(self._sample_crcs, "<u4")]
        data = b"".join(part.tobytes() for part in parts)
        block = np.zeros(up(START_BYTES + len(data)), np.uint8)
        block[START_BYTES : START_BYTES + len(data)] = np.frombuffer(data, np.uint8)
        return _seal(block, INDEX, 0)


def decode_index(
    block: NDArray[np.uint8], frames: int, node_types: int, path: Path, offset: int
) -> FrameIndex:
    """Raises CorruptionError, and FormatError where the index contradicts itself. ``offset``: where it begins
    in the file."""
    check_block(block, INDEX, path, offset)
    lengths = [frames + 1, frames, frames, frames * node_types, node_types, frames, frames]
    dtypes = ["<i8", "<i8", "<i8", "<i8", "<i8", "<u4", "<u4"]
    sizes = [length * int(dtype[2]) for length, dtype in zip(lengths, dtypes, strict=True)]
    if up(START_BYTES + sum(sizes)) != len(block):
        raise FormatError(f"{path} cannot be trusted: an index of {len(block):,} bytes for {frames:,} frames")
    ends = np.cumsum([START_BYTES, *sizes])
    parts: list[NDArray[Any]] = [block[a:b].view(d) for a, b, d in zip(ends, ends[1:], dtypes, strict=False)]
    offsets, front, sample, counts, id_max, crcs, sample_crcs = parts
    index = FrameIndex(offsets, front, sample, crcs, sample_crcs, counts.reshape(node_types, frames), id_max)
    smallest = front_bytes_of([0] * node_types, [4] * node_types)
    if (
        (front < smallest).any() or (front % ALIGN_BYTES).any() or (front > offset).any()
        or (sample < 0).any() or (sample % ALIGN_BYTES).any() or (sample > offset).any()
        or (counts < 0).any() or (counts > offset).any() or (id_max < -1).any()
        or offsets[-1] != offset or (np.diff(offsets) != front + sample).any() or not _counts_fit(index)
    ):  # fmt: skip
        raise FormatError(f"{path} cannot be trusted: its index contradicts itself; record the trace again")
    check_offsets(offsets, int(offsets[0]), offset, f"the offsets of the frames in {path}")
    return index


def _counts_fit(index: FrameIndex) -> bool:
    """Whether the ids that the index counts, of 4 or 8 bytes each, are what makes its fronts as long as they
    are."""
    room = index.front_bytes.copy()
    for counts in index.counts:  # what is left of a front never wraps around
        if (counts > room // 4).any():
            return False
        room -= 4 * counts
    return True


class Tail(msgspec.Struct, frozen=True):
    """The end of a finished log: where the index is, counts, ``digest`` over head and fronts, and the
    uuid."""

    index_offset: int
    index_bytes: int
    frames: int
    ids: int
    digest: bytes
    uuid: str


def encode_tail(index: IndexBuilder, index_bytes: int) -> tuple[NDArray[np.uint8], str]:
    """(the tail, the uuid)."""
    block = np.zeros(TAIL_BYTES, np.uint8)
    digest = index.digest()
    uuid = trace_uuid(digest)
    _put(
        block,
        START_BYTES,
        _TAIL,
        index.end,
        index_bytes,
        len(index),
        index.ids,
        digest,
        bytes.fromhex(uuid.replace("-", "")),
    )
    return _seal(block, TAIL, 0), uuid


def decode_tail(block: NDArray[np.uint8], path: Path, file_bytes: int) -> Tail:
    """Raises CorruptionError, and FormatError where the tail cannot be that of a file of this size."""
    at = file_bytes - TAIL_BYTES
    check_block(block, TAIL, path, at)
    offset, length, frames, ids, digest, uuid = _get(block, START_BYTES, _TAIL)
    if (
        offset + length != at
        or length < START_BYTES
        or offset % ALIGN_BYTES
        or uuid.hex() != trace_uuid(digest).replace("-", "")
    ):
        raise FormatError(f"{path} cannot be trusted: its tail contradicts itself; record the trace again")
    return Tail(offset, length, frames, ids, digest, trace_uuid(digest))


def digest_of(head: NDArray[np.uint8], front_crcs: NDArray[np.uint32]) -> bytes:
    """SHA-256 over the head and the checksums of all fronts."""
    return hashlib.sha256(head.tobytes() + front_crcs.astype("<u4").tobytes()).digest()


def trace_uuid(digest: bytes) -> str:
    """The uuid of a trace with this digest: its first bytes as a UUID of version 8 (RFC 9562)."""
    value = bytearray(digest[:16])
    value[6] = value[6] & 0x0F | 0x80
    value[8] = value[8] & 0x3F | 0x80
    text = value.hex()
    return "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
