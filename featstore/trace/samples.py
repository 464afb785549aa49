"""Samples: the graph part of a mini-batch as bytes, and back; no pickle.

What a sampler hands out beside node ids is its own business: edges, labels, sizes, nested as it likes. Here
such a tree becomes one run of bytes: a header that says what it is made of (MessagePack), then the bytes of
its arrays, one after the other, each from a multiple of 64 bytes on. An array that is decoded is a view of
those bytes, writable where they are, so that a mini-batch read from disk is ready without a copy. The layout
is normative in ``formats/v1/trace.md``.

**What can be in a tree**: dict (keys: text, bytes, numbers, None, and tuples of them), list, tuple, str,
bytes, int, float, complex, bool, None; NumPy scalars and arrays of any dtype of a fixed size; torch tensors
on the CPU; PyG's ``Data`` and ``HeteroData``; our own :class:`~featstore.sampling.neighbors.MiniBatch`. Types
are taken exactly: a subclass would come back as something else, so it is refused. torch and PyG are imported
only where such an object occurs.

**Trust.** The bytes may come from a stranger. Decoding executes nothing they name; arrays lie one after the
other in the order of the header, so that no header can make them overlap or add up to more than the bytes
there are; depth is limited.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.dtypes import dtype_from_name, dtype_name
from featstore.errors import ArgumentError, FormatError, MissingPackageError, SourceError

__all__ = ["ALIGN_BYTES", "decode", "encode"]

ALIGN_BYTES = 64
MAGIC = b"fss1"
DEPTH_MAX = 64
_START = 8  # of the header: after the magic and its length
_HEADER_BYTES_MAX = 8 * 2**20  # decoded, little lists take seventy times their bytes
_AXES_MAX = 32
_NAME_CHARACTERS_MAX = 1 << 16  # of a dtype's name

#: Frozen dataclasses of ours, by the name that stands in the header: module and class.
_CLASSES = {"MiniBatch": ("featstore.sampling.neighbors", "MiniBatch")}
_CLASS_NAMES = {f"{module}.{name}": label for label, (module, name) in _CLASSES.items()}
_TORCH_DTYPES = frozenset([
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
])  # fmt: skip
_KEY_TYPES = (str, bytes, int, float, bool, type(None), tuple)

#: Where in the tree: the steps from the root, the last one first.
Where = tuple[Any, str] | None


def encode(sample: object, *, drop: Collection[str] = ()) -> NDArray[np.uint8]:
    """The sample as uint8 [n], n a multiple of 64, starting at an address that is one, too.

    ``drop``: names of attributes of PyG objects to leave out. Raises SourceError, which names the place in
    the tree (``batch['edge_index'][3]``), for what cannot be encoded.
    """
    encoder = _Encoder(frozenset(drop))
    tree = encoder.node(sample, None, 0)
    try:
        header = msgspec.msgpack.encode(tree)
    except (ValueError, OverflowError) as error:
        raise SourceError(
            f"the sample is too large for one header: {error}; keep large values in arrays"
        ) from None
    return _assemble(header, encoder.arrays)


def decode(data: NDArray[np.uint8]) -> object:
    """The sample that :func:`encode` made ``data`` (uint8 [n]) of. Arrays and tensors are views of ``data``,
    writable if it is; tensors of read-only data, and arrays whose address does not suit their dtype, are
    copies.

    Raises FormatError for bytes that are no sample.
    """
    raw = data
    if (
        not isinstance(raw, np.ndarray)
        or raw.dtype != np.uint8
        or raw.ndim != 1
        or not raw.flags.c_contiguous
    ):
        raise ArgumentError(
            "a sample is decoded from a contiguous array, uint8 [n]; for bytes give "
            "np.frombuffer(data, np.uint8)"
        )
    if len(raw) < _START or raw[:4].tobytes() != MAGIC:
        raise _bad(f"it begins with {raw[:4].tobytes()!r}, not {MAGIC!r}")
    end = _START + int.from_bytes(raw[4:_START].tobytes(), "little")
    if end > len(raw) or end - _START > _HEADER_BYTES_MAX:
        raise _bad(f"a header of {end - _START:,} bytes in {len(raw):,}; it may have {_HEADER_BYTES_MAX:,}")
    try:
        tree = msgspec.msgpack.decode(raw[_START:end].data)
        decoder = _Decoder(raw, end)
        sample = decoder.value(tree, 0)
    except (FormatError, ImportError):
        raise
    # msgspec, NumPy, torch, PyG: each has errors of its own for what makes no sense
    except Exception as error:
        raise _bad(f"{type(error).__name__}: {error}") from error
    if _up(decoder.at) != len(raw):
        raise _bad(f"its arrays end at byte {decoder.at:,} of {len(raw):,}")
    return sample


def _up(at: int) -> int:
    return -(-at // ALIGN_BYTES) * ALIGN_BYTES


def _assemble(header: bytes, arrays: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    if len(header) > _HEADER_BYTES_MAX:
        raise SourceError(
            f"the sample's values that are in no array take {len(header):,} bytes, and may take "
            f"{_HEADER_BYTES_MAX:,}: keep large ones (lists of numbers, texts) in NumPy arrays or "
            "tensors"
        )
    end = _START + len(header)
    out = empty_rows(_up(end) + sum(_up(len(a)) for a in arrays), 1)
    out[:_START] = np.frombuffer(MAGIC + len(header).to_bytes(4, "little"), np.uint8)
    out[_START:end] = np.frombuffer(header, np.uint8)
    for array in arrays:
        begin = _up(end)
        out[end:begin] = 0
        end = begin + len(array)
        out[begin:end] = array
    out[end:] = 0
    return out


def _spelled(where: Where) -> str:
    """The place as Python spells it."""
    steps = []
    while where is not None:
        where, step = where
        steps.append(step)
    return "batch" + "".join(reversed(steps))


def _refuse(where: Where, what: str, advice: str) -> SourceError:
    return SourceError(f"{_spelled(where)} {what} and cannot be stored: {advice}")


@lru_cache(maxsize=256)
def _stored_dtype(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """A dtype's name, and what it is when it is read again. Raises SourceError where that is not the same."""
    name = dtype_name(dtype)
    little = dtype_from_name(name)
    if len(name) > _NAME_CHARACTERS_MAX or little.subdtype is not None or little != dtype.newbyteorder("<"):
        raise SourceError(f"dtype {dtype} has no name that NumPy reads again")
    return name, little


class _Encoder:
    """Turns a tree into one of plain lists, and collects the bytes of its arrays."""

    def __init__(self, drop: frozenset[str]) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._drop = drop

    def node(self, value: Any, where: Where, depth: int) -> Any:
        """What stands in the header for a value. Lists there begin with a tag; everything else stands for
        itself."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if kind is int and -(2**63) <= value < 2**64:
            return value
        if kind is str:
            return _text(value, where)
        _check_depth(where, depth)
        if kind is dict:
            return self._mapping(value, where, depth)
        if kind is list or kind is tuple:
            items = [self.node(item, (where, f"[{k}]"), depth + 1) for k, item in enumerate(value)]
            return ["l" if kind is list else "t", *items]
        if kind is int:
            return ["i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is np.ndarray or kind is np.memmap:
            return self._array(value, where)
        if isinstance(value, np.generic):
            return self._scalar(value, where)
        return self._foreign(value, where, depth)

    def _mapping(self, value: dict[Any, Any], where: Where, depth: int) -> list[Any]:
        out: list[Any] = ["d"]
        for key, item in value.items():
            _check_key(key, where)
            step = (where, f"[{key!r}]")
            out += [self.node(key, step, depth + 1), self.node(item, step, depth + 1)]
        return out

    def _array(self, value: NDArray[Any], where: Where) -> list[Any]:
        name, data = self._bytes_of(value, where)
        self._keep(data)
        return ["n", name, list(value.shape)]

    def _scalar(self, value: np.generic, where: Where) -> list[Any]:
        # a slice is plain text, and keeps the NULs at its end, which str() cuts off
        if isinstance(value, np.str_):
            return ["s", "str", _text(str.__getitem__(value, slice(None)), where)]
        if isinstance(value, np.bytes_):
            return ["s", "bytes", bytes.__getitem__(value, slice(None))]
        name, data = self._bytes_of(np.asarray(value), where)
        return ["s", name, data.tobytes()]

    def _bytes_of(self, value: NDArray[Any], where: Where) -> tuple[str, NDArray[np.uint8]]:
        """The dtype's name and the bytes, little-endian, in C order."""
        if value.ndim > _AXES_MAX:
            raise _refuse(where, f"is an array of {value.ndim} axes", f"reshape it to {_AXES_MAX} or fewer")
        try:
            name, dtype = _stored_dtype(value.dtype)
        except SourceError:
            advice = "convert it to numbers or to text of a fixed size, or leave it out"
            raise _refuse(where, f"is an array of dtype {value.dtype}", advice) from None
        if value.size == 0:
            return name, np.empty(0, np.uint8)
        flat = np.ascontiguousarray(np.asarray(value), dtype)
        return name, flat.reshape(-1).view(np.uint8)

    def _keep(self, data: NDArray[np.uint8]) -> None:
        if len(data):
            self.arrays.append(data)

    def _foreign(self, value: Any, where: Where, depth: int) -> list[Any]:
        """Objects of torch, PyG and our own. What is not loaded cannot have made one."""
        kind = type(value)
        torch, pyg = sys.modules.get("torch"), sys.modules.get("torch_geometric.data")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(torch, value, where)
        if torch is not None and kind is torch.Size:
            return ["z", *value]
        if pyg is not None and kind is pyg.Data:
            return ["D", self._attributes(value.to_dict(), where, depth + 1)]
        if pyg is not None and kind is pyg.HeteroData:
            return self._hetero(value.to_dict(), where, depth)
        label = _CLASS_NAMES.get(f"{kind.__module__}.{kind.__qualname__}")
        if label is not None:
            items = [
                self.node(getattr(value, f.name), (where, f".{f.name}"), depth + 1) for f in fields(value)
            ]
            return ["m", label, *items]
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise _refuse(where, f"is a {module}{kind.__qualname__}", _advice(value))

    def _tensor(self, torch: Any, value: Any, where: Where) -> list[Any]:
        name = str(value.dtype).removeprefix("torch.")
        if type(value) is not torch.Tensor:
            raise _refuse(
                where,
                f"is a {type(value).__name__}",
                "give the plain tensor: value.as_subclass(torch.Tensor)",
            )
        if value.device.type != "cpu":
            raise _refuse(where, f"is a tensor on {value.device}", "move it to the CPU: value.cpu()")
        if value.requires_grad:
            raise _refuse(where, "is a tensor that requires grad", "give its data: value.detach()")
        if value.dim() > _AXES_MAX:
            raise _refuse(where, f"is a tensor of {value.dim()} axes", f"reshape it to {_AXES_MAX} or fewer")
        if value.layout != torch.strided or value.is_quantized or name not in _TORCH_DTYPES:
            advice = "give its parts (row, column, values) as dense tensors, or leave it out"
            raise _refuse(where, f"is a tensor of {value.dtype} in the layout {value.layout}", advice)
        if value.numel():
            flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            self._keep(flat.numpy())
        return ["x", name, list(value.shape)]

    def _attributes(self, value: dict[str, Any], where: Where, depth: int) -> list[Any]:
        """The attributes of one of PyG's stores, but for those to drop."""
        _check_depth(where, depth)
        out: list[Any] = ["d"]
        for key, item in value.items():
            if key in self._drop:
                continue
            if not _is_attribute(key):
                raise _refuse((where, f".{key}"), "is no attribute of the user's", "leave it out")
            out += [key, self.node(item, (where, f".{key}"), depth + 1)]
        return out

    def _hetero(self, value: dict[Any, dict[str, Any]], where: Where, depth: int) -> list[Any]:
        out: list[Any] = ["H"]
        for key, store in value.items():
            step = where if key == "_global_store" else (where, f"[{key!r}]")
            out += [self.node(key, step, depth + 1), self._attributes(store, step, depth + 1)]
        return out


def _check_depth(where: Where, depth: int) -> None:
    if depth > DEPTH_MAX:
        advice = "make the sample flatter; it may contain itself"
        raise _refuse(where, f"lies more than {DEPTH_MAX} levels deep", advice)


def _text(value: str, where: Where) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _refuse(where, f"is text that is no Unicode ({error})", "give bytes instead") from None
    return value


def _check_key(key: Any, where: Where) -> None:
    """Keys are looked up by value, so they are values."""
    if type(key) is tuple:
        for part in key:
            _check_key(part, where)
    elif type(key) not in _KEY_TYPES:
        raise _refuse(
            where,
            f"has a key of type {type(key).__name__}",
            "take text, a number, or a tuple of them for keys",
        )


def _is_attribute(key: Any) -> bool:
    """PyG keeps things of its own under names that begin with an underscore; one of them is data."""
    return type(key) is str and (not key.startswith("_") or key == "_num_nodes")


def _advice(value: Any) -> str:
    for kind in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, kind):
            return f"types are kept exactly; convert it with {kind.__name__}(...)"
    if isinstance(value, set | frozenset):
        return "a set has no order; convert it with sorted(...)"
    if isinstance(value, np.ndarray):
        return "convert it with np.asarray(...)"
    return (
        "a sample is made of dict, list, tuple, text, numbers, NumPy arrays, torch tensors, PyG's Data "
        "and HeteroData; convert it, leave it out, or record pairs (node ids, sample)"
    )


class _Decoder:
    """Turns the header's tree back; ``at`` is where the arrays so far end."""

    def __init__(self, raw: NDArray[np.uint8], at: int) -> None:
        self._raw = raw
        self.at = at

    def value(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if tree is None or kind is bool or kind is int or kind is float or kind is str or kind is bytes:
            return tree
        if kind is not list or not tree or type(tree[0]) is not str:
            raise _bad(f"a {kind.__name__} in its header that is nothing")
        if depth > DEPTH_MAX:
            raise _bad(f"it is more than {DEPTH_MAX} levels deep")
        make = _MAKERS.get(tree[0])
        if make is None:
            raise _bad(f"the tag {tree[0]!r} in its header")
        return make(self, tree[1:], depth + 1)

    def _list(self, items: list[Any], depth: int) -> list[Any]:
        return [self.value(item, depth) for item in items]

    def _tuple(self, items: list[Any], depth: int) -> tuple[Any, ...]:
        return tuple(self._list(items, depth))

    def _dict(self, items: list[Any], depth: int) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        for key, item in zip(items[::2], items[1::2], strict=True):
            out[self.value(key, depth)] = self.value(item, depth)
        if 2 * len(out) != len(items):
            raise _bad("a key occurs twice")
        return out

    def _complex(self, items: list[Any], depth: int) -> complex:
        real, imaginary = (_typed(item, float) for item in items)
        return complex(real, imaginary)

    def _integer(self, items: list[Any], depth: int) -> int:
        (data,) = items
        return int.from_bytes(_typed(data, bytes), "little", signed=True)

    def _take(self, shape: Any, item_bytes: int) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
        """(shape, the bytes of the next array). The shape is not trusted."""
        extents = tuple(_typed(extent, int) for extent in _typed(shape, list))
        if len(extents) > _AXES_MAX or min(extents, default=0) < 0:
            raise _bad(f"an array of the shape {extents[:_AXES_MAX]}")
        size = math.prod(extents) * item_bytes
        begin = _up(self.at) if size else self.at
        if size > len(self._raw) - begin:
            raise _bad(f"an array of {size:,} bytes from byte {begin:,} of {len(self._raw):,}")
        self.at = begin + size
        return extents, self._raw[begin : begin + size]

    def _array(self, items: list[Any], depth: int) -> NDArray[Any]:
        name, shape = items
        dtype = _named_dtype(name)
        extents, data = self._take(shape, dtype.itemsize)
        if len(data) == 0:
            return np.empty(extents, dtype)
        return np.ndarray(extents, dtype, _aligned(data, dtype.alignment))

    def _scalar(self, items: list[Any], depth: int) -> np.generic:
        name, data = items
        if name == "str":
            return np.str_(_typed(data, str))
        if name == "bytes":
            return np.bytes_(_typed(data, bytes))
        scalar: Any = np.frombuffer(_typed(data, bytes), _named_dtype(name)).reshape(())[()]
        if not isinstance(scalar, np.generic):
            raise _bad(f"a scalar of {name[:80]!r}")
        return scalar

    def _tensor(self, items: list[Any], depth: int) -> Any:
        name, shape = items
        if name not in _TORCH_DTYPES:
            raise _bad(f"tensors of {name!r}")
        torch = _module("torch")
        dtype = getattr(torch, name)
        extents, data = self._take(shape, dtype.itemsize)
        if len(data) == 0:
            return torch.empty(extents, dtype=dtype)
        own = _aligned(data, dtype.itemsize)
        return torch.from_numpy(own if own.flags.writeable else own.copy()).view(dtype).reshape(extents)

    def _size(self, items: list[Any], depth: int) -> Any:
        return _module("torch").Size([_typed(item, int) for item in items])

    def _data(self, items: list[Any], depth: int) -> Any:
        (attributes,) = items
        out = _module("torch_geometric.data").Data()
        for key, item in self._attributes(attributes, depth).items():
            out[key] = item
        return out

    def _hetero(self, items: list[Any], depth: int) -> Any:
        stores: dict[Any, dict[str, Any]] = {}
        for key, attributes in zip(items[::2], items[1::2], strict=True):
            name = self.value(key, depth)
            if type(name) is not str and not (
                type(name) is tuple and [type(part) for part in name] == [str] * 3
            ):
                raise _bad(f"a node or edge type {name!r}")
            stores[name] = self._attributes(attributes, depth)
        return _module("torch_geometric.data").HeteroData.from_dict(stores)

    def _attributes(self, tree: Any, depth: int) -> dict[str, Any]:
        found = self.value(tree, depth)
        if type(found) is not dict or not all(map(_is_attribute, found)):
            raise _bad("attributes of a PyG object that are none")
        return found

    def _dataclass(self, items: list[Any], depth: int) -> Any:
        label, *values = items
        if type(label) is not str or label not in _CLASSES:
            raise _bad(f"an object of {label!r}")
        module, name = _CLASSES[label]
        own = getattr(importlib.import_module(module), name)
        if len(values) != len(fields(own)):
            raise _bad(f"a {label} of {len(values)} values")
        return own(*self._list(values, depth))


_MAKERS = {
    "d": _Decoder._dict, "l": _Decoder._list, "t": _Decoder._tuple, "i": _Decoder._integer,
    "c": _Decoder._complex, "n": _Decoder._array, "s": _Decoder._scalar, "x": _Decoder._tensor,
    "z": _Decoder._size, "m": _Decoder._dataclass, "D": _Decoder._data, "H": _Decoder._hetero,
}  # fmt: skip


def _bad(what: str) -> FormatError:
    return FormatError(f"these bytes are no sample, or a damaged one: {what}; record the trace again")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _bad(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _named_dtype(name: Any) -> np.dtype[Any]:
    if len(_typed(name, str)) > _NAME_CHARACTERS_MAX:
        raise _bad(f"a dtype's name of {len(name):,} characters")
    return _dtype_of(name)


@lru_cache(maxsize=256)
def _dtype_of(name: str) -> np.dtype[Any]:
    dtype = dtype_from_name(name)
    if dtype.subdtype is not None:
        raise _bad(f"the dtype {name[:80]!r}")
    return dtype


def _aligned(data: NDArray[np.uint8], alignment: int) -> NDArray[np.uint8]:
    return data if data.ctypes.data % alignment == 0 else data.copy()


def _module(name: str) -> Any:
    """torch or PyG, which a sample needs that was made of their objects."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "torch" if name == "torch" else "pyg"
        raise MissingPackageError(
            f"this sample holds objects of {name}: pip install 'featstore[{extra}]'", name=name
        ) from error
