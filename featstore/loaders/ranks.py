"""The ranks of a training run (``torchrun``, ``torch.distributed``): nothing is divided among them yet, and
that is said.

A loader goes through all that it is given, in whatever process. Started by ``torchrun``, each rank would
train on all seeds, which looks like training and is the same epoch so many times over. Until loaders divide
their epochs themselves, a :class:`featstore.errors.FeatstoreWarning` says so, once a process. It is left out
where what a loader is given divides itself for all to see: a part of it (see
:func:`featstore.loaders.prefetch.parts_of`) has ``num_replicas`` or ``num_processes`` above 1, as torch's
``DistributedSampler`` and Accelerate's samplers have. What cannot be seen is warned of: seeds that were
divided by hand, an ``IterableDataset`` that divides itself, a function of the epoch, a trace.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from featstore.base.warning import warn
from featstore.loaders.prefetch import parts_of

__all__ = ["divides_itself", "rank_of", "warn_of_ranks", "world_size"]

_said = False


def world_size() -> int:
    """How many processes train together: those of torch's process group, else what ``torchrun`` says; 1 where
    neither does."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def rank_of() -> int:
    """Which of these processes this is: 0 where there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def divides_itself(batches: Any) -> bool:
    """Whether something in a loader of mini-batches says that it gives each rank its own."""
    names = ("num_replicas", "num_processes")
    counts = [getattr(part, name, None) for part in parts_of(batches) for name in names]
    return any(isinstance(count, int) and count > 1 for count in counts)


def warn_of_ranks(who: str, batches: Any = None) -> None:
    """Warn, the first time in this process, that ``who`` gives every rank the same."""
    global _said
    world = world_size()
    if _said or world < 2 or divides_itself(batches):
        return
    _said = True
    warn(
        f"this process is one of {world} ranks, and {who} goes through all that it is given in each of "
        "them: unless every rank is given its own part, all train on the same. featstore does not "
        f"divide it yet: give each rank its own training nodes (train[rank::{world}]), or a torch "
        "DistributedSampler as the loader's sampler. memory= is that of one process: the ranks of a "
        "host take it once each (featstore.SharedBuffer is one buffer for all of them). Where the "
        "parts are divided already: warnings.filterwarnings('ignore', 'this process is one of')",
    )
