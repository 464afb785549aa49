"""A sample from its bytes, which nobody vouches for; :mod:`featstore.trace.samples` has the layout."""

from __future__ import annotations

import importlib
import math
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.dtypes import dtype_from_name
from featstore.errors import ArgumentError, FormatError, MissingPackageError
from featstore.sampling import dgl_graphs
from featstore.trace.log_format import up
from featstore.trace.samples import (
    DEPTH_MAX,
    DTYPE_CHARACTERS_MAX,
    HEADER_AT,
    PYG_BATCH_ABOUT,
    SAMPLE_AXES_MAX,
    SAMPLE_CLASSES,
    SAMPLE_HEADER_BYTES_MAX,
    SAMPLE_MAGIC,
    TORCH_DTYPES,
    is_pyg_attribute,
)


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
    if len(raw) < HEADER_AT or raw[:4].tobytes() != SAMPLE_MAGIC:
        raise _bad(f"it begins with {raw[:4].tobytes()!r}, not {SAMPLE_MAGIC!r}")
    end = HEADER_AT + int.from_bytes(raw[4:HEADER_AT].tobytes(), "little")
    if end > len(raw) or end - HEADER_AT > SAMPLE_HEADER_BYTES_MAX:
        raise _bad(
            f"a header of {end - HEADER_AT:,} bytes in {len(raw):,}; it may have {SAMPLE_HEADER_BYTES_MAX:,}"
        )
    try:
        tree = msgspec.msgpack.decode(raw[HEADER_AT:end].data)
        decoder = _Decoder(raw, end)
        sample = decoder.value(tree, 0)
    except (FormatError, ImportError):
        raise
    # msgspec, NumPy, torch, PyG, DGL: each has errors of its own for what makes no sense
    except Exception as error:
        raise _bad(f"{type(error).__name__}: {error}") from error
    if up(decoder.at) != len(raw):
        raise _bad(f"its arrays end at byte {decoder.at:,} of {len(raw):,}")
    return sample


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
        if len(extents) > SAMPLE_AXES_MAX or min(extents, default=0) < 0:
            raise _bad(f"an array of the shape {extents[:SAMPLE_AXES_MAX]}")
        size = math.prod(extents) * item_bytes
        begin = up(self.at) if size else self.at
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
        if name not in TORCH_DTYPES:
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

    def _batch(self, items: list[Any], depth: int) -> Any:
        joined, *about = (self.value(item, depth) for item in items)
        pyg = _module("torch_geometric.data")
        if type(joined) not in (pyg.Data, pyg.HeteroData) or len(about) != len(PYG_BATCH_ABOUT):
            raise _bad(f"a Batch of a {type(joined).__name__}")
        kinds = (int, dict, dict)
        if any(one is not None and type(one) is not kind for one, kind in zip(about, kinds, strict=True)):
            raise _bad("a Batch of graphs that are none")
        out = pyg.Batch(_base_cls=type(joined))
        for store in joined.stores:
            own = out if store._key is None else out[store._key]
            for key, value in store.items():
                own[key] = value
        for name, value in zip(PYG_BATCH_ABOUT, about, strict=True):
            if value is not None:
                setattr(out, name, value)
        return out

    def _dgl(self, items: list[Any], depth: int) -> Any:
        tree = self._list(items, depth)
        _module("dgl")
        return dgl_graphs.built(tree)

    def _attributes(self, tree: Any, depth: int) -> dict[str, Any]:
        found = self.value(tree, depth)
        if type(found) is not dict or not all(map(is_pyg_attribute, found)):
            raise _bad("attributes of a PyG object that are none")
        return found

    def _dataclass(self, items: list[Any], depth: int) -> Any:
        label, *values = items
        if type(label) is not str or label not in SAMPLE_CLASSES:
            raise _bad(f"an object of {label!r}")
        module, name = SAMPLE_CLASSES[label]
        own = getattr(importlib.import_module(module), name)
        needed = [f for f in fields(own) if f.default is MISSING]
        if not len(needed) <= len(values) <= len(fields(own)):
            raise _bad(f"a {label} of {len(values)} values")
        return own(*self._list(values, depth))


_MAKERS = {
    "d": _Decoder._dict, "l": _Decoder._list, "t": _Decoder._tuple, "i": _Decoder._integer,
    "c": _Decoder._complex, "n": _Decoder._array, "s": _Decoder._scalar, "x": _Decoder._tensor,
    "z": _Decoder._size, "m": _Decoder._dataclass, "D": _Decoder._data, "H": _Decoder._hetero,
    "B": _Decoder._batch, "G": _Decoder._dgl,
}  # fmt: skip


def _bad(what: str) -> FormatError:
    return FormatError(f"these bytes are no sample, or a damaged one: {what}; record the trace again")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _bad(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _named_dtype(name: Any) -> np.dtype[Any]:
    if len(_typed(name, str)) > DTYPE_CHARACTERS_MAX:
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
    """torch, PyG or DGL, which a sample needs that was made of their objects."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = name if name in ("torch", "dgl") else "pyg"
        raise MissingPackageError(
            f"this sample holds objects of {name}: pip install 'featstore[{extra}]'", name=name
        ) from error
