"""What each mode would cost, and which one is taken by itself: :func:`loader_costs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featstore import arguments as args
from featstore.base.environment import MEMORY
from featstore.base.system import free_bytes
from featstore.compile.budget import parse_disk
from featstore.compile.forecast import CompileForecast
from featstore.errors import ArgumentError, FeatstoreError
from featstore.loaders.costs.choose import choice
from featstore.loaders.costs.online import online_cost
from featstore.loaders.costs.packed import compiled_cost, rolling_cost
from featstore.loaders.costs.partitions import OwnSampling, not_told, partitions_cost
from featstore.loaders.costs.result import LoaderCosts, ModeCost
from featstore.loaders.costs.seen import Looked, look_at_batches
from featstore.loaders.costs.world import World
from featstore.loaders.options import BATCH_SIZE, MODES
from featstore.loaders.prefetch import Sampler, check_repeatable
from featstore.loaders.shares import MemoryShares, wanted_bytes
from featstore.loaders.train import forecast_once
from featstore.loaders.typed import whole_of
from featstore.loaders.whole import Whole
from featstore.reader.options import as_memory, check_reading
from featstore.sampling.batches import SampledBatches, open_sampler, sampler_needs
from featstore.storage.relations import graph_of
from featstore.storage.store import as_store

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

LOOKED_SECONDS, LOOKED_SHARE = 2.0, 0.05  # of an epoch, at most
_NAME = "costs"  # of the trace that is recorded for a forecast, and removed


@dataclass(frozen=True)
class Training:
    """What is to be trained on, and how: mini-batches, budgets, ``epochs``, seconds of a training step;
    ``seconds`` to look at them."""

    batches: Sampler
    nodes: Callable[[Any], Any] | None
    own: OwnSampling | None  # None where mini-batches were given
    memory_bytes: int
    disk: int | str | None
    repeats: bool
    epochs: int
    train_seconds: float | None
    seconds: float
    reading: Mapping[str, Any]
    whole: Whole  # what is wanted of each


def loader_costs(
    store: OpenStore, batches: Sampler | None = None, *, seeds: Any = None,
    fanouts: Sequence[int] | None = None, batch_size: int | None = None, seed: int | None = None,
    graph: str | None = None, edge_table: str | None = None,
    memory: int | str = MEMORY, disk: int | str | None = None, repeat: bool | None = None, epochs: int = 10,
    train_seconds: float | None = None, nodes: Callable[[Any], Any] | None = None,
    epoch_batches: int | None = None, seconds: float = LOOKED_SECONDS, share: float = LOOKED_SHARE,
    engine: str = "auto", queue_depth: int = 128, verify: bool = True,
    threads: int | None = None,
) -> LoaderCosts:  # fmt: skip
    """What training on these mini-batches would cost in each mode of :meth:`featstore.Store.loader`, on this
    machine; a few of them are sampled for it.

    Args:
        store: the open store.
        batches, seeds, fanouts, batch_size, seed, graph, edge_table, nodes, memory, disk, engine,
            queue_depth, threads, verify: as for :class:`featstore.loaders.loader.Loader`; 1024 seeds of a
            mini-batch by default. ``batches`` are gone through here, too: what depends on how often that
            happened (a shuffling data loader without a generator of its own) gives others afterwards.
        repeat: mini-batches are the same in every epoch; by default a list or tuple of them is.
        epochs: how many are trained, over which preparing once is spread.
        train_seconds: of a training step on one mini-batch; by default training costs nothing, and what is
            compared is loading.
        epoch_batches: mini-batches of an epoch, where ``batches`` has no length, which it must be
            otherwise.
        seconds, share: look at mini-batches for about so long, and at this share of an epoch (or 16), at
            most. With ``share=1`` and time enough all are looked at, and bytes of mode compiled are exact:
            then a trace is recorded in the store's ``packs`` for a moment.

    Raises ArgumentError, SourceError, and what opening a sampler and sampling raise. A mode that cannot be
    had is no error: its cost says why.
    """
    store, memory_bytes = as_store(store), as_memory(memory)
    check_reading(engine, queue_depth, verify, threads=threads)
    parse_disk(disk, store)
    epochs = args.as_count(epochs, "epochs")
    seconds = args.as_number(seconds, "seconds", above=True)
    share = args.as_number(share, "share", above=True)
    step = None if train_seconds is None else args.as_number(train_seconds, "train_seconds")
    per_epoch = None if epoch_batches is None else args.as_count(epoch_batches, "epoch_batches")
    repeats = isinstance(batches, list | tuple) if repeat is None else args.as_flag(repeat, "repeat")
    nodes = None if nodes is None else args.as_function(nodes, "nodes")
    reading = {"engine": engine, "queue_depth": queue_depth, "verify": verify, "threads": threads}
    whole, own = whole_of(store, edge_table, (), named=nodes is not None), None
    with ExitStack() as stack:
        if batches is not None:
            sampling = {"seeds": seeds, "fanouts": fanouts, "batch_size": batch_size, "seed": seed}
            for name, value in (sampling | {"graph": graph}).items():
                if value is not None:
                    raise ArgumentError(
                        f"{name}= is for the store to sample: give batches or seeds, not both"
                    )
            args.as_batches(batches, "batches")
            check_repeatable(batches)
        elif seeds is None or fanouts is None:
            raise ArgumentError("give batches, or seeds= and fanouts= for the store to sample")
        else:
            size = BATCH_SIZE if batch_size is None else args.as_count(batch_size, "batch_size")
            own = OwnSampling(seeds, args.as_fanouts(fanouts), size, graph)
            whole.check_sampled(graph_of(store, graph))
            most, least = sampler_needs(store, own.fanouts, graph)
            shares = MemoryShares(memory_bytes, most, least_bytes=least)
            with shares.told_of_all():
                drawn = 0 if seed is None else args.as_integer(seed, "seed")
                sampler = open_sampler(
                    store, own.fanouts, seed=drawn, graph=graph, memory=shares.sampler_bytes
                )  # fmt: skip
            train = store.arrays[seeds] if isinstance(seeds, str) else seeds
            batches = stack.enter_context(SampledBatches(sampler, train, own.batch_size, own=True))
        asked = Training(
            batches, nodes, own, memory_bytes, disk, repeats, epochs, step, seconds, reading, whole
        )  # fmt: skip
        seen = look_at_batches(
            store, batches, nodes, whole, seconds=seconds, share=share, epoch_batches=per_epoch
        )  # fmt: skip
        return costs_of(store, asked, seen)


def costs_of(store: OpenStore, asked: Training, seen: Looked, *, tried: bool = True) -> LoaderCosts:
    """What each mode costs for mini-batches that were looked at. ``tried``: sampling in partitions is tried
    out, where there is time."""
    world = World(
        store, seen, _shares(store, asked, seen),
        parse_disk(asked.disk, store), free_bytes(store.path), asked.train_seconds or 0.0, asked.reading,
    )  # fmt: skip
    exact = _decided(world, asked) if seen.whole else None
    parts = (
        partitions_cost(world, asked.own, asked.memory_bytes, asked.seconds if tried else 0)
        if not asked.whole.wanted_edge_tables else not_told("what it costs with rows of edges")
    )  # fmt: skip
    found = {
        "online": online_cost(world), "compiled": compiled_cost(world, exact), "rolling": rolling_cost(world),
        "partitions": parts,
    }  # fmt: skip
    modes: dict[str, ModeCost] = {name: found[name] for name in MODES}
    mode, because = choice(modes, disk=asked.disk is not None, repeats=asked.repeats, epochs=asked.epochs)
    return LoaderCosts(
        mode, because, modes, asked.memory_bytes, world.disk_bytes, asked.epochs, world.batches, seen.batches,
        seen.seconds, asked.repeats, world.model.calibrated, asked.train_seconds,
    )  # fmt: skip


def _shares(store: OpenStore, asked: Training, seen: Looked) -> MemoryShares:
    """Of sampler and rows, as a loader divides them that looked at the largest of these mini-batches."""
    if asked.own is None:
        return MemoryShares(asked.memory_bytes)
    whole, least = sampler_needs(store, asked.own.fanouts, asked.own.graph)
    table = graph_of(store, asked.own.graph).table
    rows = max((len(ids) for ids in seen.ids[table.name]), default=0)
    wanted = wanted_bytes(asked.memory_bytes, {table.name: rows}, {table.name: table}, seen.held_bytes)
    return MemoryShares(asked.memory_bytes, whole, 0, least, wanted)


def _decided(world: World, asked: Training) -> CompileForecast | str:
    """What compiling the epoch would give, or why nobody can tell."""
    recorded = asked.whole.recorded(asked.batches, asked.nodes)
    try:
        return forecast_once(
            world.store, recorded.epoch, _NAME, memory=world.memory_bytes, disk=asked.disk
        )  # fmt: skip
    except FeatstoreError as error:
        return f"not decided exactly: {error}"
