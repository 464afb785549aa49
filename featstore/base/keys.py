"""Keys: what a user calls nodes by, where these are no numbers from 0 on.

The keys of a type of nodes are all of one kind, whole numbers of 64 bits (``int64``) or strings (``utf8``).
They go from place to place in blocks: numbers as an array, strings as their UTF-8 bytes, one after the other,
and where each begins. Nothing is converted from one kind into the other: ``7`` and ``"7"`` are other keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.compilation import njit
from featstore.base.hashing import hash_strings, mix64
from featstore.base.ids import unmasked
from featstore.errors import SourceError

__all__ = [
    "KEY_BYTES_MAX",
    "KeyBlock",
    "KeyKind",
    "as_keys",
    "checked_strings",
    "find_no_utf8",
    "joined_keys",
    "keys_of_arrow",
]

KeyKind = Literal["int64", "utf8"]
#: Of one string.
KEY_BYTES_MAX = 2**16
_NUMBER_BYTES = 8


@dataclass(frozen=True)
class KeyBlock:
    """Some keys: ``values`` int64 [n]; of strings their bytes, uint8 [bytes], and ``offsets`` int64
    [n + 1]."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None

    @property
    def kind(self) -> KeyKind:
        return "int64" if self.offsets is None else "utf8"

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the keys themselves."""
        return int(self.values.nbytes)

    def as_bytes(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """(bytes of the keys, where each begins and the last ends): what kernels compare."""
        if self.offsets is not None:
            return self.values, self.offsets
        return self.values.view(np.uint8), np.arange(0, _NUMBER_BYTES * len(self) + 1, _NUMBER_BYTES)

    def hashes(self) -> NDArray[np.uint64]:
        """uint64 [n]; of a number it is one to one."""
        if self.offsets is None:
            words: NDArray[np.uint64] = mix64(self.values.view(np.uint64))
            return words
        out = np.empty(len(self), np.uint64)
        hash_strings(self.values, self.offsets, out)
        return out

    def part(self, low: int, high: int) -> KeyBlock:
        """Keys ``low`` to ``high``."""
        if self.offsets is None:
            return KeyBlock(self.values[low:high])
        ends = self.offsets[low : high + 1]
        return KeyBlock(self.values[ends[0] : ends[-1]], ends - ends[0])

    def take(self, places: NDArray[np.int64]) -> KeyBlock:
        """The keys at these places, in their order."""
        if self.offsets is None:
            return KeyBlock(self.values[places])
        lengths = np.diff(self.offsets)[places]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        out = np.empty(int(ends[-1]), np.uint8)
        take_strings(self.values, self.offsets, places, ends, out)
        return KeyBlock(out, ends)

    def array(self) -> NDArray[Any]:
        """As a user has them: int64 [n], or an array of ``str`` objects [n]."""
        if self.offsets is None:
            return self.values
        data, ends = self.values.tobytes(), self.offsets.tolist()
        out = np.empty(len(self), object)
        out[:] = [data[a:b].decode() for a, b in pairwise(ends)]
        return out

    def key(self, place: int) -> int | str:
        """One key."""
        found: int | str = self.part(place, place + 1).array().tolist()[0]
        return found


def joined_keys(blocks: Sequence[KeyBlock]) -> KeyBlock:
    """Blocks of one kind, at least one, one after the other."""
    values = np.concatenate([block.values for block in blocks])
    if blocks[0].offsets is None:
        return KeyBlock(values)
    lengths = [np.diff(block.offsets) for block in blocks if block.offsets is not None]
    return KeyBlock(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]))


@njit(cache=True, nogil=True)
def take_strings(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], places: NDArray[np.int64], ends: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Copy string ``places[i]`` to ``out[ends[i]:ends[i + 1]]``."""
    for i in range(places.shape[0]):
        begin = offsets[places[i]]
        for k in range(ends[i + 1] - ends[i]):
            out[ends[i] + k] = data[begin + k]


@njit(cache=True, nogil=True)
def find_no_utf8(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
    """The first string that is no UTF-8 (RFC 3629, table 3-7 of the Unicode standard), or -1."""
    for i in range(offsets.shape[0] - 1):
        at, end = offsets[i], offsets[i + 1]
        while at < end:
            byte = data[at]
            if byte < 0x80:
                at += 1
                continue
            low, high, more = 0x80, 0xBF, 1
            if byte < 0xC2 or byte > 0xF4:
                return i
            if byte >= 0xF0:
                more = 3
                low, high = (0x90 if byte == 0xF0 else 0x80), (0x8F if byte == 0xF4 else 0xBF)
            elif byte >= 0xE0:
                more = 2
                low, high = (0xA0 if byte == 0xE0 else 0x80), (0x9F if byte == 0xED else 0xBF)
            if at + more >= end or data[at + 1] < low or data[at + 1] > high:
                return i
            for k in range(2, more + 1):
                if data[at + k] & 0xC0 != 0x80:
                    return i
            at += more + 1
    return -1


@njit(cache=True, nogil=True)
def encode_text(codes: NDArray[np.uint32], out: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
    """UTF-8 of NumPy's texts, code points [n, width] filled up with zeros. Returns the first that has a code
    point which is none, or -1. ``out`` has room for four bytes a code point."""
    at = 0
    for i in range(codes.shape[0]):
        length = codes.shape[1]
        while length > 0 and codes[i, length - 1] == 0:
            length -= 1
        for k in range(length):
            code = codes[i, k]
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                return i
            if code < 0x80:
                out[at] = code
                at += 1
                continue
            more = 1 if code < 0x800 else 2 if code < 0x10000 else 3
            out[at] = ((0xFF00 >> (more + 1)) & 0xFF) | (code >> np.uint32(6 * more))
            for left in range(more - 1, -1, -1):
                out[at + more - left] = 0x80 | ((code >> np.uint32(6 * left)) & 0x3F)
            at += more + 1
        offsets[i + 1] = at
    return -1


def as_keys(values: Any, name: str, first: int = 0) -> KeyBlock:
    """Keys as a user has them: an array or tensor of whole numbers or of texts, a list of ``int`` or of
    ``str``, an Arrow array, a pandas or polars column. ``name``, ``first``: what messages call it, and the
    number of the first.

    Raises SourceError for what is neither, for both together, for nulls, for numbers beyond int64, for bytes
    that are no UTF-8, and for strings of more than 64 KiB.
    """
    if isinstance(values, KeyBlock):
        return values
    if not isinstance(values, np.ndarray | list | tuple):
        values = _plain(values, name)
        if isinstance(values, KeyBlock):
            return values
    if isinstance(values, np.ndarray):
        values = unmasked(values, name, "each node has a key; give those of all")
        if values.ndim != 1:
            raise SourceError(f"{name}: keys have one axis, not {values.ndim}")
        if values.dtype.kind in "iu":
            return _of_numbers(values, name, first)
        if values.dtype.kind == "U":
            return _of_codes(values, name, first)
        if values.dtype.kind == "S":
            return checked_strings(_of_fixed(values), name, first)
        if values.dtype.kind not in "OT":
            raise SourceError(
                f"{name}: keys are whole numbers or strings, not {values.dtype}; convert them first"
            )
        values = values.tolist()
    return _of_objects(values, name, first)


def _plain(values: Any, name: str) -> Any:
    """A column of another library as NumPy's array, or as keys."""
    try:
        if hasattr(values, "to_arrow"):
            values = values.to_arrow()
        streamed = hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc")
        if streamed or hasattr(values, "__arrow_c_array__"):
            return keys_of_arrow(values, name)
        if hasattr(values, "to_numpy"):
            return np.asarray(values.to_numpy())
        if hasattr(values, "detach"):
            return values.detach().cpu().numpy()
        if hasattr(values, "__array__"):
            return np.asarray(values)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # a tensor that NumPy cannot have
        raise SourceError(f"{name}: cannot be read as keys ({error})") from error
    raise SourceError(
        f"{name}: keys are an array, a column or a list of whole numbers or strings, not {shown(values)}"
    )


def keys_of_arrow(column: Any, name: str, first: int = 0) -> KeyBlock:
    """Keys of an Arrow array or column. Raises SourceError."""
    import pyarrow as arrow

    if not isinstance(column, arrow.Array | arrow.ChunkedArray):
        column = (arrow.array if hasattr(column, "__arrow_c_array__") else arrow.chunked_array)(column)
    kind, types = column.type, arrow.types
    if types.is_dictionary(kind):  # first: its values may have nulls, too
        column, kind = column.cast(kind.value_type), kind.value_type
    if column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise SourceError(f"{name}: row {first + at:,} has no key (a null); each node has one")
    if types.is_integer(kind):
        return _of_numbers(column.to_numpy(), name, first)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(is_text(kind) for is_text in (*texts, types.is_string_view)):
        raise SourceError(f"{name}: keys are whole numbers or strings, not {kind}; convert them first")
    column = column.cast(arrow.large_binary() if "binary" in str(kind) else arrow.large_string())
    chunks = column.chunks if isinstance(column, arrow.ChunkedArray) else [column]
    if not chunks:
        return KeyBlock(np.empty(0, np.uint8), np.zeros(1, np.int64))
    block = joined_keys([_of_buffers(chunk) for chunk in chunks])
    return checked_strings(block, name, first)


def _of_buffers(column: Any) -> KeyBlock:
    """The bytes of an Arrow array of large strings, where they are."""
    _, ends, data = column.buffers()
    if len(column) == 0:
        return KeyBlock(np.empty(0, np.uint8), np.zeros(1, np.int64))
    offsets = np.frombuffer(ends, np.int64, len(column) + 1, 8 * column.offset)
    values = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return KeyBlock(values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _of_numbers(values: NDArray[Any], name: str, first: int) -> KeyBlock:
    most = np.iinfo(np.int64).max
    if values.dtype.newbyteorder("=") == np.uint64 and len(values) and int(values.max()) > most:
        at = int(np.flatnonzero(values > np.uint64(most))[0])
        raise SourceError(f"{name}: key {int(values[at])} in row {first + at:,} does not fit int64")
    return KeyBlock(np.ascontiguousarray(values, dtype=np.int64))


def _of_codes(values: NDArray[Any], name: str, first: int) -> KeyBlock:
    width = values.dtype.itemsize // 4
    native = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    codes = native.view(np.uint32).reshape(len(values), width)
    out, offsets = np.empty(4 * codes.size, np.uint8), np.zeros(len(values) + 1, np.int64)
    bad = int(encode_text(codes, out, offsets))
    if bad >= 0:
        raise SourceError(f"{name}: the key in row {first + bad:,} has half a surrogate pair, no character")
    return checked_strings(KeyBlock(out[: offsets[-1]].copy(), offsets), name, first)


def _of_fixed(values: NDArray[Any]) -> KeyBlock:
    lengths = np.char.str_len(values)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    wide = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return KeyBlock(wide[np.arange(values.dtype.itemsize) < lengths[:, None]], offsets)


def _of_objects(values: Sequence[Any], name: str, first: int) -> KeyBlock:
    kinds = set(map(type, values))
    if all(issubclass(kind, str) for kind in kinds):
        try:
            texts = [text.encode() for text in values]
        except UnicodeEncodeError as error:
            raise SourceError(f"{name}: {error.object!r} is half a surrogate pair, no character") from None
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return checked_strings(KeyBlock(np.frombuffer(b"".join(texts), np.uint8), offsets), name, first)
    if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        try:
            return KeyBlock(np.array([int(value) for value in values], np.int64))
        except OverflowError:
            raise SourceError(f"{name}: a key does not fit int64") from None
    fits = [_fits(value, values[0]) for value in values]
    wrong = fits.index(False)
    raise SourceError(
        f"{name}: keys are all whole numbers or all strings, and that of row {first + wrong:,} is "
        f"{shown(values[wrong])}"
    )


def _fits(value: Any, beside: Any) -> bool:
    """Whether an object is a key as that beside it."""
    if isinstance(value, bool):
        return False
    return isinstance(value, str if isinstance(beside, str) else int | np.integer)


def checked_strings(block: KeyBlock, name: str, first: int) -> KeyBlock:
    """The block; raises SourceError for a string that is no UTF-8, or longer than a key may be."""
    assert block.offsets is not None
    bad = int(find_no_utf8(block.values, block.offsets))
    if bad >= 0:
        raw = block.values[block.offsets[bad] : block.offsets[bad + 1]].tobytes()
        raise SourceError(f"{name}: the key in row {first + bad:,} is no UTF-8: {raw[:40]!r}")
    lengths = np.diff(block.offsets)
    if len(lengths) and int(lengths.max()) > KEY_BYTES_MAX:
        at = int(np.argmax(lengths))
        raise SourceError(
            f"{name}: the key in row {first + at:,} has {int(lengths[at]):,} bytes, and a key may have "
            f"{KEY_BYTES_MAX:,}"
        )
    return block
