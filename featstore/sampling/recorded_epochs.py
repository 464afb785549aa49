"""The mini-batches of several epochs, to be recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from featstore.sampling.batches import GraphSampler, SampledBatches
from featstore.sampling.neighbors import SampledSubgraph


class RecordedEpochs(Sequence[tuple[NDArray[np.int64], dict[str, Any]]]):
    """The mini-batches of several epochs as pairs to record: node ids, and {"batch": the mini-batch,
    "batch_size": number of its seeds, "epoch": number of the epoch}."""

    def __init__(self, sampler: GraphSampler, train: NDArray[Any], batch_size: int, epochs: int) -> None:
        self._sampler, self._train, self._batch_size, self._epochs = sampler, train, batch_size, epochs
        self._current = SampledBatches(sampler, train, batch_size, 0)

    def __len__(self) -> int:
        return self._epochs * len(self._current)

    @overload
    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], dict[str, Any]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[NDArray[np.int64], dict[str, Any]]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        epoch, number = divmod(numbers, len(self._current))
        if epoch != self._current.epoch:
            self._current = SampledBatches(self._sampler, self._train, self._batch_size, epoch)
        return _recorded(self._current[number], epoch)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], dict[str, Any]]]:
        for epoch in range(self._epochs):
            for batch in SampledBatches(self._sampler, self._train, self._batch_size, epoch):
                yield _recorded(batch, epoch)


def _recorded(batch: SampledSubgraph, epoch: int) -> tuple[NDArray[np.int64], dict[str, Any]]:
    return batch.node, {"batch": batch, "batch_size": batch.num_sampled_nodes[0], "epoch": epoch}
