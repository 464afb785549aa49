"""The mini-batches of featstore's samplers as PyG's loaders ask for them; :mod:`featstore.adapters.pyg` has
the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from featstore.adapters.indices import to_shared
from featstore.arguments import INT64_MAX, as_integer, shown
from featstore.base.hashing import fold_ids
from featstore.base.ids import as_integers
from featstore.errors import ArgumentError, MissingPackageError, SourceError
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.sampling.options import SamplingOptions
from featstore.sampling.stored import StoredSampler

try:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.sampler import BaseSampler, NodeSamplerInput

    from featstore.adapters.edge_numbers import UnnumberedEdges, check_permutation, csc_of
    from featstore.adapters.sampled import SampledNodes
except ImportError as error:
    raise MissingPackageError(f"the PyG adapter needs {error.name}: pip install 'featstore[pyg]'") from error


class FeatstoreSampler(BaseSampler):  # type: ignore[misc]
    """A PyG sampler for homogeneous graphs, for ``torch_geometric.loader.NodeLoader`` with 0, fork or spawn
    workers.

    ``sampler``: the graph, fan-outs and seed: in memory, or on disk (``store.sampler(...)``; each worker then
    takes its budget once more). ``edge_permutation``: int64[e], the user's number of each edge of the CSC
    arrays, its column in ``edge_index``; ``torch.arange(e)`` where they are in the order of the user's data
    of edges. Without it mini-batches have ``e_id`` where the sampler's graph has edge ids; else they have
    none, and a loader over data of edges raises SourceError.
    The loader's ``Data`` is to have an ``edge_index``, which may be empty: PyG leaves it out of mini-batches
    of a ``Data`` without one, which is a SourceError (:mod:`featstore.adapters.sampled`).

    Raises SourceError for a permutation that is not a number, from 0, for each edge, and for one of a stored
    graph.
    """

    def __init__(
        self, sampler: NeighborSampler | StoredSampler, *, edge_permutation: torch.Tensor | None = None
    ) -> None:
        if not isinstance(sampler, NeighborSampler | StoredSampler):
            raise ArgumentError(
                f"sampler must be a NeighborSampler or a store's sampler, not {shown(sampler)}"
            )
        if edge_permutation is not None:
            check_permutation(edge_permutation, sampler)
        self.sampler = sampler
        self._edge_permutation = edge_permutation
        self._epoch = to_shared(np.zeros(1, dtype=np.int64))
        self._shared: tuple[torch.Tensor | None, ...] | None = None

    @classmethod
    def from_data(cls, data: Data, fanouts: Sequence[int], *, seed: int = 0) -> FeatstoreSampler:
        """A sampler over the ``edge_index`` (int64 [2, e]) of a PyG ``Data``, in memory (24 bytes an edge),
        whose ``e_id`` are columns of it. Raises SourceError for data without one, and for ids that are no
        nodes."""
        indptr, indices, numbers = csc_of(data)
        return cls(NeighborSampler(indptr, indices, fanouts, seed), edge_permutation=numbers)

    def set_epoch(self, epoch: int) -> None:
        """Fresh neighbours for the same seeds from now on, in all workers. Call it before iterating the
        loader."""
        self._epoch[0] = as_integer(epoch, "epoch", -INT64_MAX, INT64_MAX)

    def sample_from_nodes(self, inputs: NodeSamplerInput, **_: Any) -> SampledNodes:
        """The mini-batch around ``inputs.node`` (int64[b], no duplicates).

        Raises IdError for seeds that are no nodes or stand twice, SourceError for typed or timed seeds.
        """
        if not isinstance(inputs, NodeSamplerInput):
            raise ArgumentError(f"inputs must be PyG's NodeSamplerInput, not {shown(inputs)}")
        if inputs.input_type is not None or inputs.time is not None:
            raise SourceError(
                "FeatstoreSampler samples homogeneous graphs without time stamps; pass input_nodes as "
                "a tensor and no input_time, and a Data, not a HeteroData: typed graphs come later"
            )
        seeds = np.ascontiguousarray(as_integers(inputs.node, "seeds must be integers"), dtype=np.int64)
        batch = self.sampler.sample(seeds, int(fold_ids(seeds)), epoch=int(self._epoch[0]))
        return SampledNodes(
            node=torch.from_numpy(batch.node),
            row=torch.from_numpy(batch.row),
            col=torch.from_numpy(batch.col),
            edge=self._edges(batch),
            batch=None if batch.batch is None else torch.from_numpy(batch.batch),
            num_sampled_nodes=list(batch.num_sampled_nodes),
            num_sampled_edges=list(batch.num_sampled_edges),
            metadata=(inputs.input_id, inputs.time),
        )

    def _edges(self, batch: SampledSubgraph) -> torch.Tensor | UnnumberedEdges:
        """What PyG looks up in the permutation, where there is one, and takes for ``e_id``."""
        if self._edge_permutation is not None:
            return torch.from_numpy(batch.edge_id)
        return UnnumberedEdges() if batch.e_id is None else torch.from_numpy(batch.e_id)

    def sample_from_edges(self, *_: Any, **__: Any) -> SampledNodes:
        """Link-level sampling is not offered: raises SourceError."""
        raise SourceError("FeatstoreSampler samples around nodes: use NodeLoader, not LinkLoader")

    @property
    def edge_permutation(self) -> torch.Tensor | None:
        """The user's number of each CSC edge, or None where nobody told."""
        return self._edge_permutation

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for a spawned worker, the topology goes as handles of shared memory, into which it moves
        once."""
        if not isinstance(self.sampler, NeighborSampler):
            return self.__dict__
        if self._shared is None:
            ids = self.sampler.edge_ids
            arrays = self.sampler.indptr, self.sampler.indices
            self._shared = *map(to_shared, arrays), None if ids is None else to_shared(ids)
            self.sampler = self._over(self._shared, *self._told)
        return self.__dict__ | {"sampler": self._told}

    @property
    def _told(self) -> tuple[tuple[int, ...], int, SamplingOptions]:
        """What a sampler in memory was told beside the topology."""
        assert isinstance(self.sampler, NeighborSampler)
        return self.sampler.fanouts, self.sampler.seed, self.sampler.options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["sampler"], tuple):
            self.sampler = self._over(state["_shared"], *state["sampler"])

    @staticmethod
    def _over(
        shared: tuple[torch.Tensor | None, ...], fanouts: tuple[int, ...], seed: int,
        options: SamplingOptions,
    ) -> NeighborSampler:  # fmt: skip
        indptr, indices, ids = (None if part is None else part.numpy() for part in shared)
        assert indptr is not None and indices is not None  # noqa: PT018
        return NeighborSampler(indptr, indices, fanouts, seed, edge_ids=ids, options=options)
