"""Seeds by their numbers in a list, in which a node may stand several times: as in tables of what is to be
told of nodes at different times (RelBench: Robinson et al., NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.ids import plain_array
from featstore.base.training_nodes import checked_train
from featstore.sampling.options import checked_times

__all__ = ["SeedList"]


class SeedList:
    """A sampler of the seeds of a list, which are asked for by their numbers in it.

    ``sampler``: gives each seed a subgraph of its own. ``ids`` int64 [seeds], in which a node may stand
    several times; ``times`` int64 [seeds], None where the sampler needs none. ``input_id`` of mini-batches
    are the numbers of their seeds.
    """

    def __init__(self, sampler: Any, ids: NDArray[np.int64], times: NDArray[np.int64] | None) -> None:
        self.sampler, self.ids, self.times = sampler, ids, times

    @classmethod
    def over(cls, sampler: Any, seeds: Any, input_time: Any) -> SeedList | None:
        """Of the seeds that were given, at these times; None where seeds are known by their ids: the sampler
        gives them no subgraphs of their own, or none stands twice and times are their own. Raises
        ArgumentError, IdError."""
        options = getattr(sampler, "options", None)
        if options is None or not options.has_trees:
            return None
        ids = checked_train(seeds, sampler.node_count, repeated=True)
        if input_time is not None:
            given = plain_array(input_time, "input_time")
            return cls(sampler, ids, checked_times(given, len(ids), "input_time", "seeds"))
        return cls(sampler, ids, None) if len(np.unique(ids)) < len(ids) else None

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Of all seeds."""
        return np.arange(len(self.ids))

    @property
    def seed(self) -> int:
        """Of the sampler."""
        return int(self.sampler.seed)

    @property
    def fanouts(self) -> Any:
        """Of the sampler."""
        return self.sampler.fanouts

    @property
    def node_count(self) -> int:
        """How many seeds there are."""
        return len(self.ids)

    def sample(self, seeds: NDArray[Any], batch_index: int = 0, *, epoch: int = 0) -> Any:
        """The mini-batch around the seeds of these numbers."""
        times = None if self.times is None else self.times[seeds]
        made = self.sampler.sample(self.ids[seeds], batch_index, epoch=epoch, seed_times=times)
        return replace(made, input_id=seeds)
