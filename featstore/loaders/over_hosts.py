"""What loaders over hosts ask of ranks, and say of what they were given; and where mode auto is online."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore import arguments as args
from featstore.base.warning import warn
from featstore.errors import ArgumentError, SourceError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.costs.auto import Taken
from featstore.loaders.online.lookahead import check_known_ahead
from featstore.loaders.options import AUTO_OPTIONS, MODES, OF_MODES, Given
from featstore.loaders.prefetch import Sampler
from featstore.loaders.ranks import Ranks
from featstore.storage.store import OpenStore
from featstore.units import parse_bytes

_UNEVEN = 0.05  # of the seeds: as much as a split has its hosts differ by, without a warning


def auto_is_online(given: Given, because: str) -> Taken:
    """Mode auto takes online here, whatever else was said; warn of what that leaves without effect."""
    given.mode, given.auto = "online", False
    idle = [name for name in given.said if name in AUTO_OPTIONS or "online" not in OF_MODES.get(name, MODES)]
    if idle:
        warn(
            f"{', '.join(f'{name}=' for name in idle)} {'has' if len(idle) == 1 else 'have'} no effect: "
            f"mode='auto' is online here, as {because}"
        )
    return Taken("online", because, None)


def check_rows(store: OpenStore) -> None:
    """Raise SourceError for the topology of a split by itself, whose rows are not those of the features."""
    family = store.manifest.family
    if family is not None and family.host is None and not isinstance(store, WholeStore):
        raise SourceError(
            f"{store.path} is the topology of a store that is split by hosts: its rows say who owns a node. "
            f"Open the split: featstore.open_split({str(store.path.parent)!r})"
        )


def check_ranks(store: WholeStore, given: Given, ranks: Ranks, batches: Any) -> None:
    """Raise ArgumentError where the ranks of the run are not those that train."""
    place = store.place
    world = place.hosts * place.ranks
    if batches is None and ranks.world_size != world:
        raise ArgumentError(
            f"of a store that is split by {place.hosts} hosts, all {world} ranks of the run train "
            f"together, not {ranks.world_size}"
        )
    own = place.machine * place.ranks + place.local_rank
    if batches is None and ranks.rank != own:
        raise ArgumentError(
            f"rank={ranks.rank} is another process: this is rank {own}, and trains on the seeds of its own "
            "host; leave it out"
        )
    if batches is not None and place.ranks > 1:
        raise ArgumentError(
            f"each host has {place.ranks} ranks, which share a loader, and that samples by itself: give "
            "seeds= instead of mini-batches, or start one rank a host"
        )


def halo_bytes(store: OpenStore, given: Given, batches: Sampler | None) -> int:
    """What the rows kept of other hosts take."""
    halo = given.get("halo")
    if halo is None:
        return 0
    if not isinstance(store, WholeStore):
        raise ArgumentError("halo= keeps rows of other hosts: it is of a store that is split by hosts")
    needed = ("over", "host_bytes", "least_bytes")
    if not isinstance(halo, int | str) and not all(callable(getattr(halo, n, None)) for n in needed):
        raise ArgumentError(
            f"halo must be a size, featstore.Buffer(...) or featstore.MassiveGNN(...), not {args.shown(halo)}"
        )
    if isinstance(halo, int | str):
        check_known_ahead(None if given.get("seeds") is not None else batches)
        return parse_bytes(halo, "halo")
    tables = list(store.tables.values())
    found = halo.host_bytes(tables)
    if found is None:
        raise ArgumentError(f"halo={halo!r} has no memory of its own: say how much, memory=")
    return int(max(found, halo.least_bytes(tables)))


def tell_uneven(owner: NDArray[Any], hosts: int, ranks: int, batch_size: int, drop_last: bool) -> None:
    """Warn where hosts own so unequal numbers of seeds (``owner`` of each) that many come again in an epoch,
    or are left out. Each of them has so many ``ranks``; what is over of even shares is not told."""
    counts = np.bincount(owner, minlength=hosts)
    total = int(counts.sum())
    odd = total - int(counts.min()) * hosts if drop_last else int(counts.max()) * hosts - total
    over, several = hosts * ranks * (batch_size if drop_last else 1), counts.max() > ranks * batch_size
    if odd > _UNEVEN * total + over and (several or drop_last):  # within a mini-batch none comes again
        what = "seeds of the others are left out" if drop_last else "seeds of the others come again"
        warn(
            f"hosts own very unequal numbers of the {total:,} seeds, {counts.min():,} to {counts.max():,}: "
            f"so that all have as many mini-batches, {what} in each epoch. Split the store with train=, "
            "which spreads them evenly"
        )
