"""The one loader; see arguments_calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from arguments_calls import (
    ANY_INTEGER,
    BATCHES,
    BUFFER,
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
    Rule,
    choice,
    count,
    number,
)

import featstore
from featstore.loaders.costs.costs import loader_costs
from featstore.loaders.options import LoaderOptions

BY_ITSELF = [np.arange(40), np.arange(20, 60)]


def seeds(w: World, **more: Any) -> dict[str, Any]:
    return {
        "store": w.store, "seeds": np.arange(50), "fanouts": [2], "batch_size": 10, "memory": "64MiB"
    } | more  # fmt: skip


def given(w: World, **more: Any) -> dict[str, Any]:
    return {"store": w.store, "batches": w.batches, "memory": "64MiB"} | more


#: Of a function that takes a loader's options.
PASSED_ON: dict[str, Any] = dict.fromkeys(
    LoaderOptions.__annotations__, Anything("passed on to Loader, whose rules they are")
) | {"options": OPTION, "batches": Anything("the rules are Loader's")}
ATTACH = NAME.optional.saying("attach")
EDGE_TABLE = NAME.optional.and_also(of_nodes="features").saying("edge_table")
RANK = count(0).optional.and_also(beyond=1)
WORLD_SIZE = count().optional.and_also(and_no_rank=2)
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
            "seeds_in_order": FLAG.optional,
            "replace": FLAG.optional,
            "disjoint": FLAG.optional,
            "subgraph_type": choice().optional,
            "weight_attr": NAME.optional,
            "time_attr": NAME.optional,
            "temporal_strategy": choice().optional,
            "time_window": count(0).optional,
            "input_time": Anything("goes with time_attr= alone"),
            "rank": RANK,
            "world_size": WORLD_SIZE,
            "shared": FLAG.but("a text"),
            "graph": NAME.optional,
            "mode": choice(),
            "memory": MEMORY,
            "validation_memory": MEMORY.optional.and_also(all_of_it="64MiB"),
            "attach": ATTACH,
            "edge_table": EDGE_TABLE,
            "tensors": FLAG.optional,
            "progress": FLAG.optional,
            "nodes": FUNCTION.optional,
            "policy": POLICY_NAME.optional.and_also(of_traces="min"),
            "static": Anything("goes with policy='static' alone; the rules are OnlineLoader's"),
            "device": DEVICE.and_also(none_at_all=[]),
            "device_memory": MEMORY.optional.and_also(without_device="1GiB"),
            "device_policy": POLICY_NAME.optional.and_also(static="static", auto="auto"),
            "warm": NAME.optional.saying("cache"),
            "halo": MEMORY.optional.and_also(a_tier=featstore.Buffer("lru", "1MiB")).saying("halo"),
            "overtake": FLAG.optional,
            "extracted": count().optional,
            "reader_memory": MEMORY.optional,
            "disk": Anything("of other modes, see the next"),
            "name": Anything("of other modes, see the next"),
            "residency": Anything("of other modes, see the next"),
            "reuse": Anything("of other modes, see the next"),
            "buffer": Anything("of another mode, see the next"),
            "options": OPTION,
            "recorded_epochs": Anything("of other modes, see the next"),
            "shuffle": Anything("of other modes, see the next"),
            "hubs": Anything("of another mode, see the next"),
            "resident": Anything("of another mode, see the next"),
            "replaced": Anything("of another mode, see the next"),
            "passes": Anything("of another mode, see the next"),
            "weights": Anything("of another mode, see the next"),
            "repeat": Anything("of mode auto, see Loader by itself"),
            "epochs": Anything("of mode auto, see Loader by itself"),
            "train_seconds": Anything("of mode auto, see Loader by itself"),
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
            "buffer": BUFFER,
            "rank": RANK,
            "world_size": WORLD_SIZE,
            "drop_last": FLAG.optional,
            "seeds": Anything("not with mini-batches; see the one before"),
            "attach": ATTACH,
            "edge_table": EDGE_TABLE,
            "validation_memory": MEMORY.optional.and_also(all_of_it="64MiB"),
            "recorded_epochs": count().optional,
            "shuffle": FLAG.optional,
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
            "attach": ATTACH,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "graph": NAME.optional,
            "device": DEVICE.and_also(none_at_all=[]),
            "device_memory": MEMORY.optional.and_also(without_device="1GiB"),
            "device_policy": POLICY_NAME.optional.and_also(without_memory="lru", auto="auto"),
            "tensors": FLAG.optional,
            "drop_last": FLAG.optional,
        },
    ),
    "Loader by itself": Call(
        lambda w: (
            featstore.Loader,
            given(w, batches=BY_ITSELF, mode="auto", disk="64MiB", engine="threads"),
        ),
        {
            "disk": DISK,
            "repeat": FLAG.optional,
            "epochs": count().optional,
            "train_seconds": number().optional,
        },
    ),
    "loader_costs": Call(
        lambda w: (loader_costs, seeds(w, engine="threads")),
        {
            "store": STORE,
            "batches": Anything("not with seeds; see the next"),
            "seeds": SEEDS,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "seed": ANY_INTEGER.optional,
            "graph": NAME.optional,
            "edge_table": EDGE_TABLE,
            "memory": MEMORY,
            "disk": DISK,
            "repeat": FLAG.optional,
            "epochs": count(),
            "train_seconds": number().optional,
            "nodes": FUNCTION.optional,
            "epoch_batches": count().optional,
            "seconds": number().and_also(nothing=0),
            "share": number().and_also(nothing=0),
            **{name: rule for name, rule in OPTIONS_OF_READING.items() if name != "model"},
        },
    ),
    "loader_costs of mini-batches": Call(
        lambda w: (loader_costs, given(w, batches=BY_ITSELF, engine="threads")),
        {"batches": BATCHES.but("None")},
    ),
    "Store.loader_costs": Call(
        lambda w: (w.store.loader_costs, {k: v for k, v in seeds(w).items() if k != "store"}),
        {
            "batches": Anything("not with seeds; the rules are loader_costs'"),
            "seeds": SEEDS,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "memory": MEMORY,
            "disk": DISK,
            "options": OPTION,
        },
    ),
    "Loader.set_epoch": Call(lambda w: (w.loader.set_epoch, {"epoch": 0}), {"epoch": count(0)}),
    "Loader.load_state_dict": Call(
        lambda w: (w.loader.load_state_dict, {"state": w.loader.state_dict()}),
        {"state": State(lambda w: w.loader.state_dict(), ("epoch", "next"))},
    ),
    "Loader.validation": Call(
        lambda w: (w.validated.validation, {"batches": w.batches}),
        PASSED_ON
        | {
            "batches": BATCHES.but("None"),
            "mode": choice(),
            "memory": Rule({"as much as there is": "8MiB", "a number": 2**20}),
            "seeds": Rule({"beside mini-batches": [1, 2]}),
        },
        valid=False,  # it would be in use from then on
    ),
    "Loader.save_cache": Call(
        lambda w: (w.loader.save_cache, {"name": "cache"}),
        {"name": NAME.but("another name").and_also(outside="../x")},
        valid=False,
    ),
    "Store.loader": Call(
        lambda w: (w.store.loader, {k: v for k, v in seeds(w).items() if k != "store"}),
        PASSED_ON
        | {
            "seeds": SEEDS,
            "fanouts": FANOUTS.but("None"),
            "batch_size": count().optional,
            "mode": choice(),
            "memory": MEMORY,
        },
    ),
}
