"""Records: what to do for one mini-batch, and its graph sample.

Everything about a mini-batch was decided when its trace was compiled, so a record says where each row comes
from and goes to, and training looks nothing up. A record is one run of bytes in the table ``records``
(little-endian, normative in ``formats/v1/spec.md``): int64 numbers, then the arrays they announce, each from
a multiple of 8 bytes on, then the sample from a multiple of 64 on.

    for each table in turn, x being the rows of the mini-batch that pass through host memory:
    hit_place, hit_slot           from memory: x[hit_place] = slots[hit_slot]
    packed_place                  from the mini-batch's own run of rows, in its order
    shared_place, shared_row      from the table of shared rows
    base_place, base_row          from the base table
    copy_place, copy_from         rows wanted twice: x[copy_place] = x[copy_from]
    admit_place, admit_slot       after all that: slots[admit_slot] = x[admit_place]

Where rows are kept on the accelerator (all three empty elsewhere), the mini-batch's rows are there
    device_place, device_slot     rows[device_place] = device[device_slot]
    host_place                    rows[host_place] = x
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from featstore.errors import CorruptionError

_ALIGN, _SAMPLE_ALIGN = 8, 64
_ROW_FIELDS = ("shared_row", "base_row")
_HEAD = 3  # bytes of the record, offset and bytes of the sample


def _no_places() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _no_rows() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class TableRecord:
    """One table's part of a record; see the module's text. Places, slots: int32; rows: int64. ``count``: rows
    of the mini-batch, ``host_count``: of x; ``packed_first``: the row of the packed table with which the
    mini-batch's run begins."""

    count: int
    host_count: int
    packed_first: int
    hit_place: NDArray[np.int32]
    hit_slot: NDArray[np.int32]
    packed_place: NDArray[np.int32]
    shared_place: NDArray[np.int32] = field(default_factory=_no_places)
    shared_row: NDArray[np.int64] = field(default_factory=_no_rows)
    base_place: NDArray[np.int32] = field(default_factory=_no_places)
    base_row: NDArray[np.int64] = field(default_factory=_no_rows)
    copy_place: NDArray[np.int32] = field(default_factory=_no_places)
    copy_from: NDArray[np.int32] = field(default_factory=_no_places)
    admit_place: NDArray[np.int32] = field(default_factory=_no_places)
    admit_slot: NDArray[np.int32] = field(default_factory=_no_places)
    device_place: NDArray[np.int32] = field(default_factory=_no_places)
    device_slot: NDArray[np.int32] = field(default_factory=_no_places)
    host_place: NDArray[np.int32] = field(default_factory=_no_places)

    def brought_place(self, places: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where the rows at these places come from: of a copy, the place that it is copied from."""
        if not len(self.copy_place):
            return places
        origin = np.arange(self.host_count, dtype=np.int32)
        origin[self.copy_place] = self.copy_from
        found: NDArray[np.int32] = origin[places]
        return found


_ARRAYS: dict[str, np.dtype[np.int32] | np.dtype[np.int64]] = {
    f.name: np.dtype("<i8") if f.name in _ROW_FIELDS else np.dtype("<i4") for f in fields(TableRecord)[3:]
}
_NUMBERS = 3 + len(_ARRAYS)  # of a table, in a record's head


@overload
def _up(offset: int, align: int) -> int: ...
@overload
def _up(offset: NDArray[np.int64], align: int) -> NDArray[np.int64]: ...
def _up(offset: int | NDArray[np.int64], align: int) -> int | NDArray[np.int64]:
    return -(-offset // align) * align


@dataclass(frozen=True)
class Limits:
    """What the indices of a table's records point into, in rows."""

    packed_rows: int
    shared_rows: int
    base_rows: int
    slots: int
    device_slots: int


@dataclass(frozen=True)
class Lengths:
    """How many rows each mini-batch's part of a record has, by where they come from: int64 [mini-batches]
    each."""

    hit: NDArray[np.int64]
    packed: NDArray[np.int64]
    shared: NDArray[np.int64]
    base: NDArray[np.int64]
    copy: NDArray[np.int64]
    admit: NDArray[np.int64]
    device: NDArray[np.int64]
    host: NDArray[np.int64]


def record_offsets(tables: list[Lengths], sample_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each record begins, and where the last one ends: int64 [mini-batches + 1]."""
    at = np.full(len(sample_bytes), 8 * (_HEAD + _NUMBERS * len(tables)), np.int64)
    for lengths in tables:
        for name, dtype in _ARRAYS.items():
            count: NDArray[np.int64] = getattr(lengths, name.partition("_")[0])
            at = _up(at + count * dtype.itemsize, _ALIGN)
    ends = _up(_up(at, _SAMPLE_ALIGN) + sample_bytes, _SAMPLE_ALIGN)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)])


def encode_record(tables: list[TableRecord], sample: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes of a record, a multiple of 64 of them. ``sample``: uint8 [n], as
    :func:`featstore.trace.sample_encoder.encode` makes it."""
    head = np.zeros(_HEAD + _NUMBERS * len(tables), "<i8")
    pieces: list[tuple[int, NDArray[np.uint8]]] = [(0, head.view(np.uint8))]
    at = head.nbytes
    for number, table in enumerate(tables):
        base = _HEAD + number * _NUMBERS
        head[base : base + 3] = table.count, table.host_count, table.packed_first
        for index, (name, dtype) in enumerate(_ARRAYS.items()):
            data = np.ascontiguousarray(getattr(table, name), dtype)
            head[base + 3 + index] = len(data)
            pieces.append((at, data.view(np.uint8)))
            at = _up(at + data.nbytes, _ALIGN)
    begin = _up(at, _SAMPLE_ALIGN)
    head[0], head[1], head[2] = _up(begin + len(sample), _SAMPLE_ALIGN), begin, len(sample)
    out, end = np.empty(int(head[0]), np.uint8), 0
    for place, data in [*pieces, (begin, sample)]:
        out[end:place] = 0
        end = place + len(data)
        out[place:end] = data
    out[end:] = 0
    return out


def decode_record(
    data: NDArray[np.uint8], tables: int, path: Path
) -> tuple[list[TableRecord], NDArray[np.uint8]]:
    """The tables' parts of a record, and its sample: views of ``data``. Raises CorruptionError, which names
    ``path``."""
    size = 8 * (_HEAD + _NUMBERS * tables)
    if len(data) < size:
        raise bad_record(path, f"{len(data)} bytes, too few for one of {tables} tables")
    head = data[:size].view("<i8")
    parts: list[TableRecord] = []
    at = size
    for number in range(tables):
        numbers = head[_HEAD + number * _NUMBERS :][:_NUMBERS].tolist()
        arrays = []
        for (name, item), length in zip(_ARRAYS.items(), numbers[3:], strict=True):
            if not 0 <= length <= (len(data) - at) // item.itemsize:
                raise bad_record(path, f"{name} of {length} elements in a record of {len(data)} bytes")
            arrays.append(np.ndarray(length, item, data, at))
            at = _up(at + length * item.itemsize, _ALIGN)
        parts.append(TableRecord(*numbers[:3], *arrays))
    begin, length = int(head[1]), int(head[2])
    if head[0] != len(data) or not at <= begin <= begin + length <= len(data):
        raise bad_record(
            path, f"{int(head[0])} bytes with a sample at {begin} of {length} bytes, in {len(data)} bytes"
        )
    return parts, data[begin : begin + length]


def bad_record(path: Path, what: str) -> CorruptionError:
    """The error of a record with ``what`` in it."""
    return CorruptionError(
        path, None, "the record of a mini-batch", what, "pack the trace anew with --overwrite"
    )
