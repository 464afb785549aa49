"""Traces whose samples tell the ids of their rows, as what is compiled of them has to: there, nothing else
does. What loaders record does so (:data:`TOLD`); a trace of a user's own has ids and samples that need not be
of each other (``nodes=``, pairs), or samples that have none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.errors import MissingPackageError
from featstore.trace.log_format import up
from featstore.trace.sample_decoder import decode
from featstore.trace.sample_encoder import assemble, encode
from featstore.trace.samples import HEADER_AT
from featstore.trace.trace import Trace

#: In the fingerprint of a trace whose samples do.
TOLD = {"ids": "told by samples"}
#: Under which a recorded mini-batch keeps ids that its sample does not have.
RECORDED_IDS = "featstore.n_id"
_OF_SAMPLERS = ["batch", "batch_size", "epoch"]  # what ``featstore sample`` records
_KNOWING = ("D", "H", "B")  # PyG's, which have n_id
_OF_IDS = ("n_id", "node", "input_nodes")  # of mappings, as a loader looks for them


class TraceWithIds(Trace):
    """The same trace, opened once more, where those samples that do not tell the ids of their rows have them
    beside them: a mapping of :data:`RECORDED_IDS` and ``"sample"``. Raises as :class:`Trace`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._own_sizes = self.sample_sizes
        self.sample_sizes = [len(self.sample_bytes(number)) for number in range(len(self))]

    def sample_bytes(self, index: int) -> NDArray[np.uint8]:
        return _told(self.ids(index), self._sample_of(index, self._own_sizes))


def opened_with_ids(trace: Trace) -> Trace | None:
    """A trace whose samples tell their ids, opened for this; None where they do already."""
    told = all(trace.fingerprint.get(name) == value for name, value in TOLD.items())
    return None if told else TraceWithIds(trace.path)


def _told(found: Any, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    ids = found[""] if isinstance(found, Mapping) and list(found) == [""] else found
    if not len(raw):
        return encode({"node": found})
    tree, arrays = _parts(raw)
    kind = tree[0] if isinstance(tree, list) else ""
    if kind == "d" and tree[1::2] == _OF_SAMPLERS and isinstance(tree[2], list) and tree[2][0] == "m":
        tree, kind = tree[2], "m"
        raw = assemble(msgspec.msgpack.encode(tree), [arrays])
    if kind in _KNOWING or (kind in ("m", "d") and _knows(kind, tree, raw, ids)):
        return raw
    (_, *more), own = _parts(encode({RECORDED_IDS: _int64(ids)}))
    return assemble(msgspec.msgpack.encode(["d", *more, "sample", tree]), [own, arrays])


def _knows(kind: str, tree: Any, raw: NDArray[np.uint8], ids: Any) -> bool:
    """Whether a sample of ours, or a mapping, has these ids; DGL's blocks have, whatever they are beside."""
    if kind == "m":
        return same_nodes(getattr(decode(raw), "node", None), ids)
    keys = dict(zip(map(str, tree[1::2]), tree[2::2], strict=True))
    blocks = keys.get("blocks")
    if RECORDED_IDS in keys or (isinstance(blocks, list) and any(_is(one, "G") for one in blocks[1:])):
        return True
    if not {*keys} & {*_OF_IDS}:
        return False
    try:
        sample: Any = decode(raw)
    except MissingPackageError:  # of whose tensors the ids are
        return False
    known = next((sample[name] for name in _OF_IDS if sample.get(name) is not None), None)
    return same_nodes(known, ids)


def _is(tree: Any, tag: str) -> bool:
    return isinstance(tree, list) and tree[:1] == [tag]


def _int64(ids: Any) -> Any:
    if isinstance(ids, Mapping):
        return {name: one.astype(np.int64, copy=False) for name, one in ids.items()}
    return ids.astype(np.int64, copy=False)


def has_recorded_ids(sample: Any) -> bool:
    """Whether a recorded sample has the ids whose rows were wanted beside it."""
    return isinstance(sample, Mapping) and RECORDED_IDS in sample


def _parts(raw: NDArray[np.uint8]) -> tuple[Any, NDArray[np.uint8]]:
    """The header of an encoded sample, and its arrays."""
    end = HEADER_AT + int.from_bytes(raw[4:HEADER_AT].tobytes(), "little")
    return msgspec.msgpack.decode(raw[HEADER_AT:end].data), raw[up(end) :]


def same_nodes(known: Any, ids: Any) -> bool:
    """Whether a sample's own nodes are those whose rows are wanted."""
    if isinstance(ids, Mapping) and len(ids) == 1 and not isinstance(known, Mapping):
        (ids,) = ids.values()
    if isinstance(known, Mapping) and isinstance(ids, Mapping):
        return all(np.array_equal(known.get(t, ()), ids.get(t, ())) for t in {*known, *ids})
    return not isinstance(known, Mapping) and known is not None and np.array_equal(known, ids)
