"""Training nodes as they are given: node ids, or a mask of the nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.ids import plain_array
from featstore.errors import ArgumentError, IdError


def checked_train(train: Any, nodes: int, *, repeated: bool = False) -> NDArray[np.int64]:
    """Training nodes as int64 ids, in the order given; those of a mask, bool [nodes], ascend. Raises
    ArgumentError where there are none, or a mask is of another length; IdError for ids that are no nodes, or
    stand twice, unless they may be ``repeated``."""
    given = plain_array(train, "train")
    what = f"training nodes (train) are ids in one dimension, at least one, or a mask of {nodes:,} nodes"
    if given.dtype == bool:
        if given.shape != (nodes,):
            raise ArgumentError(f"{what}; the mask given has the shape {list(given.shape)}")
        given = np.flatnonzero(given)
    if given.size == 0:
        raise ArgumentError(f"{what}; those given are none, so that nothing would be trained on")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ArgumentError(f"{what}, and ids are integers; given are {given.dtype} {list(given.shape)}")
    bad = np.flatnonzero((given < 0) | (given >= nodes))
    if len(bad):
        raise IdError(
            f"training node {given[bad[0]]} is out of range: there are {nodes:,} nodes (ids 0 to {nodes - 1})"
        )
    ids = given.astype(np.int64)
    if repeated:
        return ids
    different = _different(ids, nodes)
    if different != len(ids):
        numbers = len(ids) == nodes and ids.max() <= 1
        raise IdError(
            f"of {len(ids):,} training nodes (train) only {different:,} are different ones, others stand "
            "there twice: "
            + (
                "is it a mask? Give it as one, .astype(bool)"
                if numbers
                else "give each once (np.unique). Where each seed has a subgraph of its own (disjoint=True, "
                "time_attr=), mode 'partitions' excepted, nodes may stand several times"
            )
        )
    return ids


def _different(ids: NDArray[np.int64], nodes: int) -> int:
    """How many ids there are, each counted once; few of them without a mark for each node."""
    if len(ids) <= nodes // 64:
        return len(np.unique(ids))
    seen = np.zeros(nodes, bool)
    seen[ids] = True
    return int(np.count_nonzero(seen))
