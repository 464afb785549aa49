"""Whose numbers the edges of a mini-batch have: the user's, or those of a sampler's own order.

PyG takes ``e_id`` for the number of an edge in the user's ``edge_index``, and picks all data of edges
(``edge_attr``, ``edge_weight``, ``edge_time`` ...) by it. A sampler's edges are numbered as in the lists that
it samples from, and those of a store are in the store's order. So a mini-batch has ``e_id`` and data of edges
only where the sampler knows whose numbers its edges have: by ``edge_permutation``, by
``FeatstoreSampler.from_data``, which makes the lists itself, or of a store that keeps the user's numbers
(``edge_ids``). Else there is no ``e_id``, and a loader that wants to pick data of edges gets a SourceError.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.sampling.batches import GraphInMemory
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.stored import StoredSampler

__all__ = ["UnnumberedEdges", "check_permutation", "csc_of"]


class UnnumberedEdges:
    """Stands where PyG looks for the numbers of a mini-batch's edges and nobody told whose numbers they are.

    PyG moves the numbers to where data of edges lie before it picks any (``to(device)``, ``cpu()``): that is
    refused. ``e_id`` becomes what ``to(torch.long)`` gives: nothing.
    """

    def to(self, target: Any, *_: Any, **__: Any) -> None:
        if not isinstance(target, torch.dtype):
            self._refuse()

    def cpu(self) -> None:
        self._refuse()

    def __getitem__(self, _: Any) -> None:
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise SourceError(
            "the loader's data has data of edges (edge_attr, edge_weight, edge_time ...), and the "
            "sampler numbers edges in an order of its own, so that other edges' data would come out: "
            "make the sampler with FeatstoreSampler.from_data(data, fanouts); or give "
            "edge_permutation=, the column in edge_index of each edge of the CSC arrays; or pack the store "
            "with edge_ids=True; or take the data of edges out of the loader's data"
        )


def check_permutation(permutation: Any, sampler: NeighborSampler | StoredSampler) -> None:
    """Raise SourceError for anything but a number for each edge of arrays that the user knows."""
    if isinstance(sampler, StoredSampler | GraphInMemory):
        raise SourceError(
            "edge_permutation is for a graph in memory: a stored one has its edges in an order of its "
            "own; FeatstoreSampler.from_data(data, fanouts) makes a sampler whose edges have the "
            "numbers of data.edge_index"
        )
    given = permutation if isinstance(permutation, torch.Tensor) else None
    if (
        given is None
        or given.dtype != torch.int64
        or given.shape != (len(sampler.indices),)
        or (given < 0).any()
    ):
        found = type(permutation).__name__ if given is None else f"{given.dtype} {list(given.shape)}"
        raise SourceError(
            "edge_permutation must be an int64 tensor with the number, from 0, of each of the "
            f"{len(sampler.indices):,} edges, not {found}"
        )


def csc_of(data: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
    """(indptr, indices, int64 tensor [e]: the column of each edge in ``edge_index``) of a PyG ``Data``.
    Raises SourceError."""
    edge_index = getattr(data, "edge_index", None)
    if not isinstance(edge_index, torch.Tensor) or edge_index.ndim != 2 or len(edge_index) != 2:
        raise SourceError(
            f"a sampler is made from a PyG Data with edge_index [2, edges]; this {type(data).__name__} "
            "has none"
        )
    if edge_index.dtype.is_floating_point or edge_index.dtype.is_complex or edge_index.dtype == torch.bool:
        raise SourceError(
            f"edge_index holds {str(edge_index.dtype).removeprefix('torch.')}, and nodes are whole numbers: "
            "make it of int64, where they were rounded from where they still are exact"
        )
    source, target = edge_index.cpu().numpy().astype(np.int64, copy=False)
    nodes = int(data.num_nodes)
    if len(target) and (edge_index.min() < 0 or edge_index.max() >= nodes):
        found = f"{int(edge_index.min())} to {int(edge_index.max())}"
        raise SourceError(f"edge_index has nodes {found}, and num_nodes is {nodes:,}: give all nodes, from 0")
    order = np.argsort(target, kind="stable")
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(target, minlength=nodes))])
    return indptr, source[order], torch.from_numpy(order)
