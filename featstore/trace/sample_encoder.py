"""A sample as bytes; :mod:`featstore.trace.samples` says what can be in one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.dtypes import dtype_from_name, dtype_name
from featstore.base.modules import loaded
from featstore.errors import SourceError
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

_CLASS_NAMES = {f"{module}.{name}": label for label, (module, name) in SAMPLE_CLASSES.items()}
_KEY_TYPES = (str, bytes, int, float, bool, type(None), tuple)

#: Where in the tree: the steps from the root, the last one first.
Where = tuple[Any, str] | None


def encode(sample: object, *, drop: Collection[str] = ()) -> NDArray[np.uint8]:
    """The sample as uint8 [n], n a multiple of 64, starting at an address that is one, too.

    ``drop``: names of attributes of PyG objects, and of data of DGL's graphs, to leave out. Raises
    SourceError, which names the place in the tree (``batch['edge_index'][3]``), for what cannot be encoded.
    """
    encoder = _Encoder(frozenset(drop))
    tree = encoder.node(sample, None, 0)
    try:
        header = msgspec.msgpack.encode(tree)
    except (ValueError, OverflowError) as error:
        raise SourceError(
            f"the sample is too large for one header: {error}; keep large values in arrays"
        ) from None
    return assemble(header, encoder.arrays)


def assemble(header: bytes, arrays: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """An encoded sample of the bytes of its tree, and its arrays. Raises SourceError where these are many."""
    if len(header) > SAMPLE_HEADER_BYTES_MAX:
        raise SourceError(
            f"the sample's values that are in no array take {len(header):,} bytes, and may take "
            f"{SAMPLE_HEADER_BYTES_MAX:,}: keep large ones (lists of numbers, texts) in NumPy arrays or "
            "tensors"
        )
    end = HEADER_AT + len(header)
    out = empty_rows(up(end) + sum(up(len(a)) for a in arrays), 1)
    out[:HEADER_AT] = np.frombuffer(SAMPLE_MAGIC + len(header).to_bytes(4, "little"), np.uint8)
    out[HEADER_AT:end] = np.frombuffer(header, np.uint8)
    for array in arrays:
        begin = up(end)
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
    if len(name) > DTYPE_CHARACTERS_MAX or little.subdtype is not None or little != dtype.newbyteorder("<"):
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
        if value.ndim > SAMPLE_AXES_MAX:
            advice = f"reshape it to {SAMPLE_AXES_MAX} or fewer"
            raise _refuse(where, f"is an array of {value.ndim} axes", advice)
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
        """Objects of torch, PyG, DGL and our own. What is not loaded cannot have made one."""
        kind = type(value)
        torch, pyg = loaded("torch", "Tensor"), loaded("torch_geometric.data", "Batch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(torch, value, where)
        if torch is not None and kind is torch.Size:
            return ["z", *value]
        if dgl_graphs.is_graph(value):
            return self._dgl(value, where, depth)
        if pyg is not None and kind is pyg.Data:
            return ["D", self._attributes(value.to_dict(), where, depth + 1)]
        if pyg is not None and kind is pyg.HeteroData:
            return self._hetero(value.to_dict(), where, depth)
        if pyg is not None and isinstance(value, pyg.Batch):
            return self._batch(pyg, value, where, depth)
        label = _CLASS_NAMES.get(f"{kind.__module__}.{kind.__qualname__}")
        if label is not None:
            items = [
                self.node(getattr(value, f.name), (where, f".{f.name}"), depth + 1) for f in fields(value)
            ]
            needed = sum(f.default is MISSING for f in fields(value))
            while len(items) > needed and items[-1] is None:  # values go by their places
                items.pop()
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
        if value.dim() > SAMPLE_AXES_MAX:
            advice = f"reshape it to {SAMPLE_AXES_MAX} or fewer"
            raise _refuse(where, f"is a tensor of {value.dim()} axes", advice)
        if value.layout != torch.strided or value.is_quantized or name not in TORCH_DTYPES:
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
            if not is_pyg_attribute(key):
                raise _refuse((where, f".{key}"), "is no attribute of the user's", "leave it out")
            out += [key, self.node(item, (where, f".{key}"), depth + 1)]
        return out

    def _hetero(self, value: dict[Any, dict[str, Any]], where: Where, depth: int) -> list[Any]:
        out: list[Any] = ["H"]
        for key, store in value.items():
            step = where if key == "_global_store" else (where, f"[{key!r}]")
            out += [self.node(key, step, depth + 1), self._attributes(store, step, depth + 1)]
        return out

    def _dgl(self, value: Any, where: Where, depth: int) -> list[Any]:
        problem = dgl_graphs.problem_of(value)
        if problem is not None:
            advice = "give DGL's own graphs and blocks, one by one, on the CPU, with ids of 64 bits"
            raise _refuse(where, problem, advice)
        return ["G", *(self.node(self._kept(part), where, depth + 1) for part in dgl_graphs.tree_of(value))]

    def _kept(self, part: Any) -> Any:
        """Nodes or edges of a graph of DGL's, with their data but for those to drop."""
        return part and {
            kind: [*what, {name: one for name, one in data.items() if name not in self._drop}]
            for kind, (*what, data) in part.items()
        }

    def _batch(self, pyg: Any, value: Any, where: Where, depth: int) -> list[Any]:
        """What PyG made of several graphs: a ``Data`` or ``HeteroData``, and how to take it apart again."""
        single = type(value).__bases__[-1]
        if single is pyg.Data:
            joined = ["D", self._attributes(value.to_dict(), where, depth + 2)]
        elif single is pyg.HeteroData:
            joined = self._hetero(value.to_dict(), where, depth + 1)
        else:
            raise _refuse(where, f"is a Batch of {single.__name__}", "batch Data or HeteroData instead")
        about = [
            self.node(self._without_dropped(getattr(value, name, None)), (where, f".{name}"), depth + 1)
            for name in PYG_BATCH_ABOUT
        ]
        return ["B", joined, *about]

    def _without_dropped(self, about: Any) -> Any:
        """What a batch knows of attributes, by attribute or by type and attribute, but for those to drop:
        else it could not be taken apart."""
        if not isinstance(about, dict):
            return about
        return {
            key: self._without_dropped(one) for key, one in about.items()
            if isinstance(one, dict) or key not in self._drop
        }  # fmt: skip


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


def _advice(value: Any) -> str:
    for kind in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, kind):
            return f"types are kept exactly; convert it with {kind.__name__}(...)"
    if isinstance(value, set | frozenset):
        return "a set has no order; convert it with sorted(...)"
    if isinstance(value, np.ndarray):
        return "convert it with np.asarray(...)"
    return (
        "a sample is made of dict, list, tuple, text, numbers, NumPy arrays, torch tensors, PyG's Data, "
        "HeteroData and Batch, DGL's graphs and blocks; convert it, leave it out, or record pairs (node ids, "
        "sample)"
    )
