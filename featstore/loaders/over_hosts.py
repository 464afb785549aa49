"""What loaders over hosts ask of ranks, and say of what they were given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from featstore import arguments as args
from featstore.base.warning import warn
from featstore.errors import ArgumentError
from featstore.hosts.split_store import WholeStore
from featstore.loaders.costs.auto import Taken
from featstore.loaders.online.lookahead import check_known_ahead
from featstore.loaders.options import AUTO_OPTIONS, MODES, OF_MODES, Given
from featstore.loaders.prefetch import Sampler
from featstore.loaders.ranks import Ranks
from featstore.sampling.attributes import said_otherwise
from featstore.sampling.batches import RankedBatches
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


def said_alike(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the options of sampling that are not as by default: names, and what tells them from others."""
    return sorted((name, told(said[name])) for name in said_otherwise(said))


def told(option: Any) -> str:
    """What tells an option of other hosts': of an array the checksum of its values."""
    if isinstance(option, str) or not hasattr(option, "__len__"):
        return str(option)
    return hashlib.sha256(np.ascontiguousarray(option).tobytes()).hexdigest()


def tell_uneven(made: RankedBatches) -> None:
    """Warn where hosts own so unequal numbers of seeds that much of an epoch comes again, or is left out."""
    odd = made.num_replicas * (made.batch_size if made.dropped else 1)  # what is left over of even shares
    most = _UNEVEN * made.total + odd
    if max(made.padded, made.dropped) > most:
        what = f"{made.padded:,} come again" if made.padded else f"{made.dropped:,} are left out"
        warn(
            f"hosts own very unequal numbers of the {made.total:,} seeds: so that all have as many "
            f"mini-batches, {what} in each epoch. Split the store with train=, which spreads them evenly"
        )
