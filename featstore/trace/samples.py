"""Samples: the graph part of a mini-batch as bytes, and back; no pickle.

What a sampler hands out beside node ids is its own business: edges, labels, sizes, nested as it likes. Here
such a tree becomes one run of bytes: a header that says what it is made of (MessagePack), then the bytes of
its arrays, one after the other, each from a multiple of 64 bytes on. An array that is decoded is a view of
those bytes, writable where they are, so that a mini-batch read from disk is ready without a copy. The layout
is normative in ``formats/v1/trace.md``.

**What can be in a tree**: dict (keys: text, bytes, numbers, None, and tuples of them), list, tuple, str,
bytes, int, float, complex, bool, None; NumPy scalars and arrays of any dtype of a fixed size; torch tensors
on the CPU; PyG's ``Data``, ``HeteroData`` and ``Batch`` of these; DGL's graphs and blocks; our own
:class:`~featstore.sampling.neighbors.SampledSubgraph`. Types are taken exactly: a subclass would come back as
something else, so it is refused. torch, PyG and DGL are imported only where such an object occurs.

This module is what both sides share: :mod:`featstore.trace.sample_encoder` and
:mod:`featstore.trace.sample_decoder`.

**Trust.** The bytes may come from a stranger. Decoding executes nothing they name; arrays lie one after the
other in the order of the header, so that no header can make them overlap or add up to more than the bytes
there are; depth is limited.
"""

from __future__ import annotations

from typing import Any

SAMPLE_MAGIC = b"fss1"
DEPTH_MAX = 64
HEADER_AT = 8  # of the header: after the magic and its length
SAMPLE_HEADER_BYTES_MAX = 8 * 2**20  # decoded, little lists take seventy times their bytes
SAMPLE_AXES_MAX = 32
DTYPE_CHARACTERS_MAX = 1 << 16  # of a dtype's name

#: Frozen dataclasses of ours, by the name that the format gives them in the header: module and class.
SAMPLE_CLASSES = {
    "MiniBatch": ("featstore.sampling.neighbors", "SampledSubgraph"),
    "TypedMiniBatch": ("featstore.sampling.typed", "TypedSubgraph"),
}
#: What PyG's ``Batch`` knows of the graphs that it was made of: how many, where each one's values lie, and
#: what was added to them.
PYG_BATCH_ABOUT = ("_num_graphs", "_slice_dict", "_inc_dict")
TORCH_DTYPES = frozenset([
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
])  # fmt: skip


def is_pyg_attribute(key: Any) -> bool:
    """PyG keeps things of its own under names that begin with an underscore; one of them is data."""
    return type(key) is str and (not key.startswith("_") or key == "_num_nodes")
