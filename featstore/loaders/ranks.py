"""The ranks of a training run (``torchrun``, ``torch.distributed``): which one this process is, of how many.

Nobody has to say so. Where mini-batches are given, and the number of ranks is known from the environment
alone, a :class:`featstore.errors.FeatstoreWarning` tells once a process that each rank takes its share of
them, as whoever divided them by hand would get a share of a share. What divides itself for all to see is left
as it is: a part of it (see :func:`featstore.loaders.prefetch.parts_of`) has ``num_replicas`` or
``num_processes`` above 1, as torch's ``DistributedSampler`` and Accelerate's samplers have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from featstore.arguments import as_count
from featstore.base.modules import loaded
from featstore.base.warning import warn
from featstore.errors import ArgumentError
from featstore.loaders.prefetch import parts_of

__all__ = ["Ranks"]

_said = False


@dataclass(frozen=True)
class Ranks:
    """This process is ``rank`` of ``world_size``; ``shares``: into how many shares an epoch is divided, 1
    where what was given is divided already."""

    rank: int
    world_size: int
    shares: int

    @classmethod
    def of(cls, rank: Any, world_size: Any, batches: Any) -> Self:
        """As the user says, else as the environment does. ``batches``: mini-batches that were given, or None.
        Raises ArgumentError."""
        there = _world_size()
        world = there if world_size is None else as_count(world_size, "world_size")
        if rank is None and world != there and world > 1:
            raise ArgumentError(f"world_size={world} says how many ranks there are: say which this is, rank=")
        if rank is None:
            own = _rank() if world > 1 else 0
        else:
            own = as_count(rank, "rank", 0, world - 1)
        divided = batches is not None and world_size is None and _divides_itself(batches)
        if world > 1 and batches is not None and world_size is None and not divided:
            _tell(world)
        return cls(own, world, 1 if divided else world)


def _world_size() -> int:
    """How many processes train together: those of torch's process group, else what ``torchrun`` says; 1 where
    neither does."""
    dist = loaded("torch.distributed", "get_rank")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def _rank() -> int:
    dist = loaded("torch.distributed", "get_rank")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal():
        raise ArgumentError(f"the environment's RANK is {rank!r}, no number: say which rank this is, rank=")
    return int(rank)


def _divides_itself(batches: Any) -> bool:
    """Whether something in a loader of mini-batches says that it gives each rank its own."""
    names = ("num_replicas", "num_processes")
    counts = [getattr(part, name, None) for part in parts_of(batches) for name in names]
    return any(isinstance(count, int) and count > 1 for count in counts)


def _tell(world: int) -> None:
    """Warn, the first time in this process, that mini-batches that were given are divided."""
    global _said
    if _said:
        return
    _said = True
    warn(
        f"this process is one of {world} ranks, and each takes one in {world} of the mini-batches that are "
        "given to a loader, so that together they train on each once, as long as "
        "all have them in the same order: shuffle by the same seed on all. Where every rank was given its "
        "own part already, say world_size=1; where this is right, rank= and world_size= say so. memory= is "
        "that of one process: the ranks of a host take it once each",
    )
