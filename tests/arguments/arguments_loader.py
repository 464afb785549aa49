"""The one loader; see arguments_calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from arguments_calls import (
    ANY_INTEGER,
    BATCHES,
    DISK,
    OPTIONS_OF_READING,
    POLICY_NAME,
    Call,
    State,
)
from arguments_world import NODES, World
from arguments_wrong import (
    DEVICE,
    FANOUTS,
    FLAG,
    FUNCTION,
    MEMORY,
    NAME,
    OPTION,
    STORE,
    TRAIN,
    Anything,
    choice,
    count,
)

import featstore


def seeds(w: World, **more: Any) -> dict[str, Any]:
    return {
        "store": w.store, "seeds": np.arange(50), "fanouts": [2], "batch_size": 10, "memory": "64MiB"
    } | more  # fmt: skip


def given(w: World, **more: Any) -> dict[str, Any]:
    return {"store": w.store, "batches": w.batches, "memory": "64MiB"} | more


SEEDS = TRAIN.and_also(another_name="nobody").saying("train|seed|node|id|array")
LOADER: dict[str, Call] = {
    "Loader": Call(
        lambda w: (featstore.Loader, seeds(w, mode="online", engine="threads")),
        {
            "store": STORE,
            "batches": Anything("not with seeds; see the next"),
            "seeds": SEEDS,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "seed": ANY_INTEGER.optional,
            "drop_last": FLAG.optional,
            "rank": count(0).optional.and_also(beyond=1),
            "shared": FLAG.but("a text"),
            "world_size": count().optional.and_also(and_no_rank=2),
            "graph": NAME.optional,
            "mode": choice(),
            "memory": MEMORY,
            "tensors": FLAG.optional,
            "nodes": FUNCTION.optional,
            "policy": POLICY_NAME.optional.and_also(of_traces="min"),
            "static": Anything("goes with policy='static' alone; the rules are OnlineLoader's"),
            "device": DEVICE.and_also(none_at_all=[]),
            "device_memory": MEMORY.optional.and_also(without_device="1GiB"),
            "disk": Anything("of other modes, see the next"),
            "name": Anything("of other modes, see the next"),
            "residency": Anything("of other modes, see the next"),
            "reuse": Anything("of other modes, see the next"),
            "hubs": Anything("of another mode, see the next"),
            "resident": Anything("of another mode, see the next"),
            "replaced": Anything("of another mode, see the next"),
            "passes": Anything("of another mode, see the next"),
            "weights": Anything("of another mode, see the next"),
            **{name: rule for name, rule in OPTIONS_OF_READING.items() if name != "model"},
        },
    ),
    "Loader of mini-batches": Call(
        lambda w: (featstore.Loader, given(w, mode="compiled", name="rows", engine="threads")),
        {
            "batches": BATCHES.but("None"),
            "disk": DISK,
            "name": NAME.but("another name").and_also(outside="../x").optional,
            "residency": choice().optional,
            "reuse": FLAG.optional,
            "nodes": FUNCTION.optional,
            "tensors": FLAG.optional,
        },
    ),
    "Loader of partitions": Call(
        lambda w: (featstore.Loader, seeds(w, mode="partitions", engine="threads")),
        {
            "seeds": SEEDS,
            "hubs": count(0).optional.and_also(more_than_there_are=NODES + 1),
            "resident": count().optional,
            "replaced": count().optional,
            "passes": count().optional,
            "weights": FLAG.optional,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "graph": NAME.optional,
        },
    ),
    "Loader.set_epoch": Call(lambda w: (w.loader.set_epoch, {"epoch": 0}), {"epoch": count(0)}),
    "Loader.load_state_dict": Call(
        lambda w: (w.loader.load_state_dict, {"state": w.loader.state_dict()}),
        {"state": State(lambda w: w.loader.state_dict(), ("epoch", "next"), ("at",))},
    ),
    "Store.loader": Call(
        lambda w: (w.store.loader, {k: v for k, v in seeds(w).items() if k != "store"}),
        {
            "batches": Anything("not with seeds; the rules are Loader's"),
            "seeds": SEEDS,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "mode": choice(),
            "memory": MEMORY,
            "options": OPTION,
        },
    ),
}
