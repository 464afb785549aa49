"""The mode that a loader takes by itself, ``mode="auto"``: by the rules of
:mod:`featstore.loaders.costs.choose`, but without a look at mini-batches where that could change them, or
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from featstore import arguments as args
from featstore.errors import ArgumentError, SourceError
from featstore.loaders.costs.costs import LOOKED_SECONDS, LOOKED_SHARE, Training, costs_of
from featstore.loaders.costs.partitions import OwnSampling
from featstore.loaders.costs.result import LoaderCosts
from featstore.loaders.costs.seen import look_at_batches
from featstore.loaders.options import AUTO, AUTO_OPTIONS, OF_MODES
from featstore.loaders.prefetch import Sampler
from featstore.loaders.whole import Whole
from featstore.units import format_bytes

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

EPOCHS_ASSUMED = 10


class Taken(NamedTuple):
    """The mode, why, and what each would cost; None where the choice did not depend on that."""

    mode: str
    because: str
    costs: LoaderCosts | None


def auto(
    store: OpenStore, batches: Sampler, own: OwnSampling | None, memory_bytes: int, given: Mapping[str, Any],
    reading: Mapping[str, Any], whole: Whole,
) -> Taken:  # fmt: skip
    """Choose. ``batches``: given, or those of the store's own sampling, which is ``own``; ``given``: options
    of the loader; ``whole``: what is wanted of each mini-batch."""
    repeat, epochs, step = (given.get(name) for name in AUTO_OPTIONS)
    repeats = isinstance(batches, list | tuple) if repeat is None else args.as_flag(repeat, "repeat")
    epochs = EPOCHS_ASSUMED if epochs is None else args.as_count(epochs, "epochs")
    step = None if step is None else args.as_number(step, "train_seconds")
    if given.get("disk") is None:
        for name in ("name", "residency", *AUTO_OPTIONS):
            if given.get(name) is not None:
                raise ArgumentError(
                    f"{name}= is of what is laid out on disk, and nothing is without disk=, which says how "
                    "much may be: give it, or say which mode="
                )
        rows = sum(table.data_bytes for table in store.tables.values())
        return Taken(
            "online", "nothing is written without disk=, which says how much may be (the store's tables take "
            f"{format_bytes(rows)}, the memory is {format_bytes(memory_bytes)})", None,
        )  # fmt: skip
    for name in given:
        if {*OF_MODES.get(name, AUTO)} & {*AUTO} == {"online"}:
            return Taken("online", f"{name}= is of mode online alone", None)
    if own is None and not repeats:
        return Taken(
            "online", "mini-batches of another sampler, around links, of edge types, and of seeds with times "
            "of their own or that stand twice are not gone through beforehand, which could change them: "
            "loader_costs does, and repeat=True says that they stay the same", None,
        )  # fmt: skip
    wanted = Training(
        batches, given.get("nodes"), own, memory_bytes, given["disk"], repeats, epochs, step, LOOKED_SECONDS,
        reading, whole,
    )  # fmt: skip
    try:
        seen = look_at_batches(
            store, batches, wanted.nodes, whole, seconds=LOOKED_SECONDS, share=LOOKED_SHARE
        )  # fmt: skip
    except (ArgumentError, SourceError) as error:  # of which mode online may take more
        return Taken("online", f"what they cost elsewhere cannot be told: {error}", None)
    # without trying partitions out, which auto does not take, in as much memory again
    costs = costs_of(store, wanted, seen, tried=False)
    return Taken(costs.mode, costs.because, costs)
