"""The public functions: for each its valid arguments, and for each argument what it must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from arguments_world import NODES, WIDTH, World
from arguments_wrong import (
    DEVICE,
    FANOUTS,
    FLAG,
    FUNCTION,
    GRAPH,
    IDS,
    MAPPING,
    MEMORY,
    NAME,
    NONSENSE,
    OPTION,
    PATH,
    STORE,
    TRAIN,
    Anything,
    Rule,
    choice,
    count,
    number,
    torch,
)
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

import featstore
from featstore.adapters.pyg import FeatstoreFeatures, FeatstoreGraph, FeatstoreSampler
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.rolling import RollingLoader
from featstore.measure.calibrate import calibrate, measure
from featstore.reader.keys import NodeKeys
from featstore.reader.reader import Reader
from featstore.sampling.neighbors import NeighborSampler
from featstore.sampling.stored import StoredSampler
from featstore.shared.client import BufferClient
from featstore.tune.tuning import tune


@dataclass(frozen=True)
class Call:
    """A public function, as ``make(world)`` gives it with valid arguments. ``valid``: whether these are tried
    out here, too."""

    make: Callable[[World], tuple[Callable[..., Any], dict[str, Any]]]
    parameters: Mapping[str, Rule | Anything | State]
    valid: bool = True


def bad_out(*shape: int) -> Rule:
    """Where rows of this shape cannot go."""
    whole = (*shape, WIDTH)
    readonly = np.zeros(whole, np.float32)
    readonly.flags.writeable = False
    return Rule(
        {
            **NONSENSE,
            "True": True,
            "a list": [[0.0] * WIDTH] * int(np.prod(shape)),
            "a text": "out",
            "a number": 0,
            "another dtype": np.zeros(whole, np.float64),
            "another byte order": np.zeros(whole, ">f4"),
            "fewer rows": np.zeros((1, WIDTH), np.float32),
            "narrower": np.zeros((*shape, WIDTH - 1), np.float32),
            "flat": np.zeros(int(np.prod(whole)), np.float32),
            "one number": np.zeros((), np.float32),
            "strides": np.zeros((*shape, 2 * WIDTH), np.float32)[..., ::2],
            "readonly": readonly,
            "a broadcast": np.broadcast_to(np.float32(0), whole),
            "masked": np.ma.zeros(whole, np.float32),
            "a meta tensor of floats": torch.empty(whole, device="meta"),
            "a sparse tensor": torch.zeros(whole).to_sparse(),
            "a tensor of another dtype": torch.zeros(whole, dtype=torch.float64),
            "a transposed tensor": torch.zeros(whole[::-1]).T,
            "another table": {"nobody": np.zeros(whole, np.float32)},
        },
        "out|no table",
    )


def bad_at(of: int) -> Rule:
    return Rule(
        {
            **NONSENSE,
            "a text": "at",
            "a number": 3,
            "too few": [0] * (of - 1),
            "too many": [0] * (of + 1),
            "negative": [-1] * of,
            "outside": [2**40] * of,
            "huge": [2**70] * of,
            "floats": [0.5] * of,
            "bools": [True] * of,
            "ragged": [[0], [1, 2]],
            "beyond int64": np.full(of, 2**64 - 1, np.uint64),
            "two dimensions": np.zeros((of, 1), np.int64),
            "another table": {"nobody": [0] * of},
        },
        "at |at:|no table|run|id",
    )


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


@dataclass(frozen=True)
class State:
    """A state as ``good(world)`` gives it, with something missing or wrong. ``numbers``: keys of numbers of
    at least 0; ``others``: of what may be None as well."""

    good: Callable[[World], dict[str, Any]]
    numbers: tuple[str, ...]
    others: tuple[str, ...] = ()
    says: str = "state"

    def of(self, world: World) -> Mapping[str, Any]:
        good = self.good(world)
        wrong: dict[str, Any] = {**MAPPING.wrong, "empty": {}, "of others": dict.fromkeys(good, "?")}
        for key in good:
            if key not in self.others:
                wrong[f"no {key}"] = without(good, key)
            wrong[f"{key} is an array"] = good | {key: np.zeros(3)}
        for key in self.numbers:
            for value in (-1, 2**70, 1.5, True, "1", None):
                wrong[f"{key} is {value!r}"] = good | {key: value}
        return wrong


OPTIONS_OF_READING: dict[str, Any] = {
    "engine": choice(),
    "queue_depth": count(1, 4096),
    "threads": count(1, 256).optional,
    "verify": FLAG,
    "model": Rule({**NONSENSE, "a number": 3, "a mapping": {}}),
}
SEED = count(0)
ANY_INTEGER = count(None).but("huge", "far below", "very many digits")
STATIC = Rule(
    {label: value for label, value in IDS.wrong.items() if label != "None"}
    | {"another name": "most", "another table": {"no": [1]}},
    "static|id|no table",
)
MODEL_NUMBERS = Anything("a plain record; it refuses impossible numbers, and msgspec says what no number is")
PROGRESS = FUNCTION.optional
DOOR = Anything("the door for writes is for tests: an object with the methods of Disk")
POLICY_NAME = choice()
DISK = MEMORY.but("None", "nothing", "zero").and_also(
    times_nothing="x", negative_times="-1x", many_times="1e99x", nan_times="nanx"
)
DEVICE_MEMORY = MEMORY.but("nothing", "zero")
BATCHES = Rule({**NONSENSE, "None": None, "a text": "abc", "a number": 3, "a mapping": {"a": [1]}}).but(
    "a set", "a nested list", "a meta tensor", "a nested tensor", "an array of objects", "bytes", "a type"
)
BUFFER = Rule({**NONSENSE, "a policy": "lru", "bytes": 2**20})
BY_TABLE = {"another table": {"nobody": 1}}

ELSEWHERE = Anything("its rules are tested with the adapter")
SOURCES = Anything("its rules are tested with each kind of source")
ARRAY = Rule(
    {
        **NONSENSE,
        "None": None,
        "a number": 3,
        "a text": "abc",
        "floats": np.zeros(3),
        "two dimensions": np.zeros((2, 2), np.int64),
        "a ragged list": [[1], [2, 3]],
        "unsigned": np.zeros(3, np.uint64),
    }
)

KEYS = Rule(
    {
        **NONSENSE,
        "both": ["n1", 2],
        "a null": ["n1", None],
        "floats": np.zeros(3),
        "bools": [True, False],
        "half a pair": ["\ud800"],
        "two axes": np.array([["n1"], ["n2"]]),
        "beyond int64": [2**63],
        "a text": "n1",
        "a number": 3,
    },
    "key",
)

CALLS: dict[str, Call] = {
    # Opening.
    "Store": Call(
        lambda w: (featstore.Store, {"path": w.path}),
        {"path": PATH, "_manifest": Anything("made by pickling")},
    ),
    "Store.table": Call(
        lambda w: (w.store.table, {"name": "features", "memory": "64MiB"}),
        {
            "name": NAME.saying("table"),
            "memory": MEMORY.but("None"),
            "options": OPTION.and_also(tables={"tables": ["features"]}).saying("no option|tables="),
        },
    ),
    "TableArray": Call(
        lambda w: (featstore.TableArray, {"source": w.reader, "table": "features"}),
        {
            "source": Rule({**NONSENSE, "None": None, "a path": "/x", "a store": 3}),
            "table": NAME.optional,
            "closes": FLAG,
        },
    ),
    "TableArray.index_select": Call(
        lambda w: (featstore.TableArray(w.reader).index_select, {"dim": 0, "index": [1, 2]}),
        {"dim": count(0, 0).and_also(columns=1), "index": IDS},
    ),
    "Store.file_entry": Call(
        lambda w: (w.store.file_entry, {"path": w.store.manifest.files[0].path}),
        {"path": NAME.saying("file")},
    ),
    "Store.load": Call(
        lambda w: (w.store.load, {"entry": w.store.manifest.arrays["labels"]}),
        {"entry": Rule({**NONSENSE, "None": None, "a name": "labels"}), "first": count(0).optional},
    ),
    "Store.reader": Call(
        lambda w: (w.store.reader, {"memory": "64MiB", "columns": [1]}),
        {
            "columns": Rule(
                {**NONSENSE, "a number": 3, "a text": "ab", "none": [], "outside": [WIDTH], "negative": [-1]},
                "column|table",
            ),
            "options": OPTION,
        },
    ),
    "Store.sampler": Call(
        lambda w: (w.store.sampler, {"fanouts": [2], "memory": "64MiB"}),
        {"fanouts": FANOUTS, "options": OPTION},
    ),
    "Store.zarr": Call(lambda w: (w.store.zarr, {"table": "features"}), {"table": NAME}),
    "Store.ids": Call(
        lambda w: (w.keyed.ids, {"table": "features"}),
        {"table": NAME, "memory": MEMORY.and_also(too_little="64KiB")},
    ),
    "NodeKeys": Call(
        lambda w: (NodeKeys, {"store": w.keyed, "table": "features"}),
        {"store": STORE, "table": NAME, "memory": MEMORY},
    ),
    "NodeKeys.lookup": Call(
        lambda w: (w.node_keys.lookup, {"keys": ["n1", "n2"]}),
        {"keys": KEYS.and_also(numbers=[1, 2], unknown=["n1", "x"]), "missing": count(None, -1).optional},
    ),
    "NodeKeys.keys": Call(lambda w: (w.node_keys.keys, {"ids": [1, 2]}), {"ids": IDS}),
    "Store.compiled": Call(
        lambda w: (w.compiled.base.compiled, {"name": "default"}),
        {"name": PATH.and_also(another="no-such").saying("name|compiled")},
    ),
    "Table.rows_by_degree": Call(
        lambda w: (w.store.table("features").rows_by_degree, {"count": 3}), {"count": count(0).optional}
    ),
    "StoredGraph.hub_rows": Call(
        lambda w: (next(iter(w.store.graphs.values())).hub_rows, {"count": 3}), {"count": count(0).optional}
    ),
    "verify": Call(
        lambda w: (featstore.verify, {"path": w.path}),
        {"path": PATH, "progress": PROGRESS, "access": choice()},
    ),
    # Reading.
    "Reader": Call(
        lambda w: (Reader, {"store": w.store, "memory": "64MiB", "engine": "threads"}),
        {
            "store": STORE,
            "memory": MEMORY,
            "static": STATIC,
            "static_memory": MEMORY.optional.but("zero"),
            "tables": NAME.optional.but("a tuple")
            .and_also(none=[], twice=["features", "features"])
            .saying("table"),
            "by_row": FLAG,
            **OPTIONS_OF_READING,
        },
    ),
    "Reader.read": Call(lambda w: (w.reader.read, {"ids": [1, 2, 3]}), {"ids": IDS, "out": bad_out(3)}),
    "Reader.submit": Call(
        lambda w: (
            lambda **given: w.reader.submit(**given).result(),
            {"ids": [1, 2, 3], "out": w.out(3), "at": [2, 1, 0]},
        ),
        {"ids": IDS, "out": bad_out(3).but("another table"), "at": bad_at(3)},
    ),
    "Reader.read_runs": Call(
        lambda w: (w.reader.read_runs, {"runs": [(0, 2), (5, 6)], "out": w.out(3), "at": [1, 0]}),
        {
            "runs": IDS.and_also(three=[(1, 2, 3)], backwards=[(3, 1)], outside=[(0, NODES + 1)]).saying(
                "run"
            ),
            "out": bad_out(3),
            "at": bad_at(2),
        },
    ),
    "Reader.submit_runs": Call(
        lambda w: (lambda **given: w.reader.submit_runs(**given).result(), {"runs": [(0, 2), (5, 6)]}),
        {"runs": IDS.saying("run"), "out": bad_out(3), "at": bad_at(2)},
    ),
    "Reader.plan": Call(lambda w: (w.reader.plan, {"ids": [1, 2]}), {"ids": IDS}),
    "Request.result": Call(
        lambda w: (w.reader.submit([1]).result, {"timeout": 10.0}),
        {"timeout": number().optional.but("infinity")},
    ),
    "Request.exception": Call(
        lambda w: (w.reader.submit([1]).exception, {"timeout": 10.0}),
        {"timeout": number().optional.but("infinity")},
    ),
    "ReaderStats.since": Call(
        lambda w: (w.reader.stats().since, {"before": w.reader.stats()}),
        {"before": Rule({**NONSENSE, "None": None, "a number": 3})},
    ),
    "ReaderStats.save": Call(
        lambda w: (w.reader.stats().save, {"path": w.fresh().with_suffix(".json")}),
        {"path": PATH, "overwrite": FLAG},
    ),
    # Sampling.
    "NeighborSampler": Call(
        lambda w: (NeighborSampler, {"indptr": w.indptr, "indices": w.indices, "fanouts": [2]}),
        {
            "indptr": ARRAY.and_also(negative=np.array([-1, 0]), empty=np.empty(0, np.int64)),
            "indices": ARRAY,
            "fanouts": FANOUTS,
            "seed": ANY_INTEGER,
            "edge_ids": ARRAY.optional,
            "options": Rule({**NONSENSE, "a mapping": {"replace": True}, "a text": "replace"}),
        },
    ),
    "NeighborSampler.sample": Call(
        lambda w: (w.neighbours.sample, {"seeds": [1, 2]}),
        {
            "seeds": IDS.saying("seed"),
            "batch_index": ANY_INTEGER,
            "epoch": ANY_INTEGER,
            "seed_times": ARRAY.optional,
        },
    ),
    "StoredSampler": Call(
        lambda w: (StoredSampler, {"store": w.store, "fanouts": [2], "memory": "64MiB", "engine": "threads"}),
        {
            "store": STORE,
            "fanouts": FANOUTS,
            "memory": MEMORY,
            "seed": ANY_INTEGER,
            "graph": NAME.optional,
            "edge_ids": FLAG.optional,
            "options": Rule({**NONSENSE, "a mapping": {"replace": True}, "a text": "replace"}),
            **without(OPTIONS_OF_READING, "model"),
        },
    ),
    "StoredSampler.sample": Call(
        lambda w: (w.sampler.sample, {"seeds": [1, 2]}),
        {
            "seeds": IDS.saying("seed"),
            "batch_index": ANY_INTEGER,
            "epoch": ANY_INTEGER,
            "seed_times": ARRAY.optional,
        },
    ),
    # Traces and what is compiled of them.
    "Trace": Call(lambda w: (featstore.Trace, {"path": w.trace.path}), {"path": PATH}),
    "Trace.open": Call(lambda w: (featstore.Trace.open, {"path": w.trace.path}), {"path": PATH}),
    "Trace.record": Call(
        lambda w: (featstore.Trace.record, {"batches": w.batches, "path": w.fresh()}),
        {
            "batches": BATCHES.and_also(a_function=len),
            "path": PATH,
            "nodes": FUNCTION.optional,
            "drop": Rule(
                {
                    "None": None,
                    "a text": "x",
                    "a number": 3,
                    "numbers": [1],
                    "an empty text": [""],
                    "a mapping": {"x": 1},
                }
            ),
            "resume": FLAG,
            "overwrite": FLAG,
            "fingerprint": MAPPING.optional.and_also(lists={"a": [1]}, numbers={1: 2}, nan={"a": np.nan}),
            "progress": PROGRESS,
            "limit": count().optional,
            "disk": DOOR,
        },
    ),
    **{
        f"Trace.{name}": Call(
            lambda w, name=name: (getattr(w.trace, name), {"index": 1}),
            {"index": count(0).and_also(beyond=5).saying("mini-batch")},
        )
        for name in ("batch", "expect", "ids", "sample", "sample_bytes")
    },
    "export": Call(
        lambda w: (
            featstore.export,
            {
                "store": w.path,
                "table": "features",
                "to": w.fresh().with_suffix(".npy"),
                "memory": "64MiB",
                "engine": "threads",
            },
        ),
        {
            "store": PATH.saying("store"),
            "table": NAME,
            "to": PATH.and_also(another_ending="x.csv").saying("to|ending"),
            "ids": IDS.optional,
            "columns": Rule(
                {
                    **NONSENSE,
                    "a text": "abc",
                    "a number": 3,
                    "beyond": [10**6],
                    "a fraction": [0.5],
                    "none": [],
                },
                "column",
            ),
            "dtype": Rule({**NONSENSE, "a text": "float33", "narrower": "float16"}, "dtype").but("a type"),
            "memory": MEMORY,
            "overwrite": FLAG,
            "progress": PROGRESS,
            "reader": OPTION,
        },
    ),
    "split": Call(
        lambda w: (featstore.split, {"store": w.path, "hosts": 2, "out": w.fresh(), "memory": "64MiB"}),
        {
            "store": PATH.saying("store|split"),
            "hosts": count(1, 2**16).and_also(more_than_nodes=NODES + 1),
            "out": PATH,
            "train": TRAIN.and_also(another_array="label", another_table={"nobody": [1]})
            .but("a text")
            .saying("train|node|id|array"),
            "seed": SEED.and_also(beyond_metis=2**31),
            "halo_disk": DISK,
            "split_topology": FLAG,
            "memory": MEMORY,
            "resume": FLAG,
            "overwrite": FLAG,
            "progress": PROGRESS,
            "disk": DOOR,
        },
    ),
    "compile_trace": Call(
        lambda w: (
            featstore.compile_trace,
            {"store": w.store, "trace": w.trace, "name": "other", "memory": "64MiB", "overwrite": True},
        ),
        {
            "store": PATH,
            "trace": PATH,
            "name": NAME.but("a list", "another name").and_also(outside="../x"),
            "memory": MEMORY,
            "disk": DISK,
            "train_memory": MEMORY.optional,
            "cache": MEMORY.optional.but("nothing", "zero"),
            "device_memory": DEVICE_MEMORY,
            "residency": choice(),
            "seed": SEED,
            "resume": FLAG,
            "overwrite": FLAG,
            "dry_run": FLAG,
            "progress": PROGRESS,
            "disk_door": DOOR,
            "policy": Rule({**NONSENSE, "None": None, "a name": "modelled time"}),
            "model": OPTIONS_OF_READING["model"],
            "epoch_batches": Rule({**NONSENSE, "too many": [1000], "negative": [-1], "nothing": []}),
            "read_times": count().optional,
            "sampled_by": Rule({**NONSENSE}),
        },
    ),
    "CompiledTrace": Call(
        lambda w: (CompiledTrace, {"base": w.compiled.base}),
        {"base": STORE, "name": PATH.and_also(another="no-such").saying("name|compiled")},
    ),
    "CompiledTrace.limits": Call(lambda w: (w.compiled.limits, {"table": "features"}), {"table": NAME}),
    "CompiledTrace.row_bytes": Call(lambda w: (w.compiled.row_bytes, {"table": "features"}), {"table": NAME}),
    "CompiledTrace.turn": Call(lambda w: (w.compiled.turn, {"table": "features"}), {"table": NAME}),
    "CompiledTrace.depth_within": Call(
        lambda w: (w.compiled.depth_within, {"memory_bytes": 2**26}),
        {"memory_bytes": Anything("called by its loader"), "beside_bytes": Anything("called by its loader")},
    ),
    "CompiledTrace.needed_bytes": Call(lambda w: (w.compiled.needed_bytes, {"depth": 2}), {"depth": count()}),
    "CompiledLoader": Call(
        lambda w: (CompiledLoader, {"compiled": w.compiled, "engine": "threads"}),
        {
            "compiled": Rule({**NONSENSE, "None": None, "a path": "/x"}),
            "memory": MEMORY.optional,
            "order": Rule({k: v for k, v in IDS.wrong.items() if k != "None"}, "order"),
            "device": DEVICE,
            "tensors": FLAG.optional,
            "buffer": BUFFER,
            "reader": OPTION,
            **OPTIONS_OF_READING,
        },
    ),
    "CompiledLoader.load_state": Call(
        lambda w: (w.compiled_loader.load_state, {"state": w.compiled_loader.state()}),
        {"state": State(lambda w: w.compiled_loader.state(), ("epoch", "next"))},
    ),
    "RollingLoader": Call(
        lambda w: (RollingLoader, {"store": w.store, "episode": lambda number: w.batches, "memory": "64MiB"}),
        {
            "store": STORE,
            "episode": BATCHES,
            "name": NAME.but("another name").and_also(outside="../x"),
            "memory": MEMORY,
            "disk": DISK,
            "tell": Anything("of Store.loader"),
            "loader": MAPPING.optional.and_also(typo={"engin": "threads"}, wrong={"queue_depth": 0}).saying(
                "loader|queue_depth"
            ),
            "others": OPTION.and_also(no_result={"dry_run": True}),
        },
    ),
    "RollingLoader.load_state": Call(
        lambda w: (w.rolling.load_state, {"state": w.rolling.state()}),
        {"state": State(lambda w: w.rolling.state(), ("epoch", "next"))},
    ),
    # Online.
    "OnlineLoader": Call(
        lambda w: (OnlineLoader, {"store": w.store, "batches": w.batches, "memory": "64MiB"}),
        {
            "store": STORE,
            "batches": BATCHES,
            "memory": MEMORY,
            "policy": POLICY_NAME.but("a list").and_also(of_traces="min"),
            "static": Anything("goes with policy='static' alone, see the next"),
            "halo": Rule({"of other stores": featstore.Buffer("lru", "1MiB"), "a size": "1MiB"}),
            "warm": NAME.optional.saying("cache"),
            "overtake": FLAG,
            "nodes": FUNCTION.optional,
            "device": DEVICE.and_also(none_at_all=[]),
            "device_memory": MEMORY.optional.and_also(without_device="1GiB"),
            "device_policy": POLICY_NAME.and_also(static="static", auto="auto"),
            "tensors": FLAG.optional,
            "extracted": count(),
            "reader_memory": MEMORY.optional,
            "reader": OPTION,
            **OPTIONS_OF_READING,
        },
    ),
    "OnlineLoader of static rows": Call(
        lambda w: (
            OnlineLoader,
            {"store": w.store, "batches": w.batches, "memory": "64MiB", "policy": "static"},
        ),
        {
            "static": Rule(
                {k: v for k, v in STATIC.wrong.items() if k not in ("negative", "too large")}, STATIC.says
            )
        },
    ),
    "OnlineLoader.set_epoch": Call(lambda w: (w.online.set_epoch, {"epoch": 0}), {"epoch": count(0)}),
    "OnlineLoader.load_state": Call(
        lambda w: (w.online.load_state, {"state": w.online.state()}),
        {"state": State(lambda w: w.online.state(), ("epoch", "next"))},
    ),
    "OnlineLoader.save_cache": Call(
        lambda w: (w.online.save_cache, {"name": "cache"}),
        {"name": NAME.but("another name").and_also(outside="../x").saying("name")},
        valid=False,
    ),
    **{
        name: Call(
            lambda w, order=order, first=first: (
                order,
                {first: w.store, "train": np.arange(50), "batch_size": 10},
            ),
            {
                first: GRAPH,
                "train": TRAIN.and_also(nothing=None, a_flag=True),
                "sequences": count().and_also(another="all", too_many=51),
                "labels": Rule({k: v for k, v in IDS.wrong.items() if k != "None"}, "labels"),
                "batch_size": count(),
                "seed": ANY_INTEGER,
                "trainers": count(),
                **({"redraw": FLAG} if first == "graph" else {}),
            },
        )
        for name, order, first in (
            ("PartitionOrder", featstore.PartitionOrder, "partitions"),
            ("ProximityOrder", featstore.ProximityOrder, "graph"),
        )
    },
    **{
        f"{name}.{method}": call
        for name, order in (
            ("PartitionOrder", lambda w: w.by_partition),
            ("ProximityOrder", lambda w: w.by_proximity),
        )
        for method, call in (
            ("set_epoch", Call(lambda w, o=order: (o(w).set_epoch, {"epoch": 0}), {"epoch": count(0)})),
            (
                "state_dict",
                Call(
                    lambda w, o=order: (o(w).state_dict, {"epoch": 1, "position": 10}),
                    {"epoch": count(0), "position": count(0).and_also(beyond=101)},
                ),
            ),
            (
                "load_state_dict",
                Call(
                    lambda w, o=order: (o(w).load_state_dict, {"state": o(w).state_dict()}),
                    {"state": State(lambda w, o=order: o(w).state_dict(), ("epoch", "next"))},
                ),
            ),
        )
    },
    "SharedBuffer": Call(
        lambda w: (featstore.SharedBuffer, {"store": w.store, "memory": "64MiB", "engine": "threads"}),
        {
            "store": STORE,
            "memory": MEMORY,
            "policy": POLICY_NAME.and_also(min="min", static="static"),
            "tables": NAME.optional.but("a tuple")
            .and_also(none=[], twice=["features", "features"])
            .saying("table"),
            "batch_rows": count().optional,
            "reader": OPTION,
            **OPTIONS_OF_READING,
        },
    ),
    "BufferClient": Call(
        lambda w: (BufferClient, {"address": "/nowhere", "key": b"key"}),
        {
            "address": Rule({**NONSENSE, "None": None, "a number": 3, "an empty text": ""}),
            "key": Rule({"None": None, "a text": "key", "a number": 3}),
        },
    ),
    "SharedBuffer.stats": Call(lambda w: (w.buffer.stats, {"table": "features"}), {"table": NAME.optional}),
    "BufferClient.read": Call(lambda w: (w.client.read, {"ids": [1, 2, 3]}), {"ids": IDS, "out": bad_out(3)}),
    "BufferClient.submit": Call(
        lambda w: (
            lambda **given: w.client.submit(**given).result(),
            {"ids": [1, 2, 3], "out": w.out(3), "at": [2, 1, 0]},
        ),
        {"ids": IDS, "out": bad_out(3).but("another table"), "at": bad_at(3)},
    ),
    "BufferClient.prepare": Call(
        lambda w: (
            lambda **given: w.client.prepare(**given).result(),
            {"ids": [1, 2, 3], "out": w.out(3), "at": [2, 1, 0]},
        ),
        {
            "ids": IDS,
            "out": bad_out(3).but("another table"),
            "at": bad_at(3),
            "copy": Anything("said by the package's own modules"),
        },
    ),
    "BufferClient.holds": Call(
        lambda w: (w.client.holds, {"table": "features", "ids": [1, 2]}), {"table": NAME, "ids": IDS}
    ),
    "BufferClient.stats": Call(lambda w: (w.client.stats, {"table": "features"}), {"table": NAME.optional}),
    "BufferClient.table": Call(
        lambda w: (w.client.table, {"name": "features"}), {"name": NAME.saying("table")}
    ),
    "tune": Call(
        lambda w: (tune, {"store": w.store, "make_batches": lambda workers: w.batches, "seconds": 1.0}),
        {
            "store": STORE,
            "make_batches": FUNCTION,
            "step": FUNCTION.optional,
            "memory": MEMORY,
            "cores": count().optional,
            "workers": Rule(
                {
                    "a number": 3,
                    "a text": "12",
                    "negative": [-1],
                    "a fraction": [0.5],
                    "True": [True],
                    "huge": [2**70],
                }
            ),
            "engines": Rule(
                {"a number": 3, "a text": "threads", "another": ["no-such"], "none": [], "numbers": [1]},
                "engine",
            ),
            "queue_depths": Rule(
                {
                    "None": None,
                    "a number": 3,
                    "a text": "12",
                    "none": [],
                    "zero": [0],
                    "huge": [2**70],
                    "True": [True],
                }
            ),
            "seconds": number().and_also(nothing=0),
            "trials": count(0),
            "progress": PROGRESS,
            "loader": OPTION.and_also(own={"extracted": 3}).saying("no option|extracted"),
        },
        valid=False,
    ),
    "calibrate": Call(
        lambda w: (calibrate, {"path": w.path}),
        {"path": PATH, "engine": choice(), "seconds": number().and_also(nothing=0)},
        valid=False,
    ),
    "measure": Call(
        lambda w: (measure, {"path": w.path}),
        {
            "path": PATH,
            "engine": choice(),
            "seconds": number().and_also(nothing=0),
            "data_bytes_min": count(0),
            "progress": PROGRESS,
        },
        valid=False,
    ),
    # PyG.
    "FeatstoreSampler": Call(
        lambda w: (FeatstoreSampler, {"sampler": w.neighbours}),
        {"sampler": Rule({**NONSENSE, "None": None, "a store": "store"}), "edge_permutation": ELSEWHERE},
    ),
    "FeatstoreSampler.from_data": Call(
        lambda w: (
            FeatstoreSampler.from_data,
            {"data": Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2), "fanouts": (2, 2)},
        ),
        {
            "data": Rule({**NONSENSE, "None": None, "a text": "abc", "a number": 3}).saying("Data"),
            "fanouts": FANOUTS,
            "seed": ANY_INTEGER,
        },
    ),
    "FeatstoreSampler.set_epoch": Call(
        lambda w: (w.pyg_sampler.set_epoch, {"epoch": 1}), {"epoch": count(None)}
    ),
    "FeatstoreSampler.sample_from_nodes": Call(
        lambda w: (w.pyg_sampler.sample_from_nodes, {"inputs": NodeSamplerInput(None, torch.arange(3))}),
        {"inputs": Rule({**NONSENSE, "None": None, "ids": np.arange(3)})},
    ),
    "FeatstoreSampler.sample_from_edges": Call(
        lambda w: (w.pyg_sampler.sample_from_edges, {}),
        {"_": Anything("refused whatever it is given")},
        valid=False,
    ),
    "FeatstoreFeatures": Call(
        lambda w: (FeatstoreFeatures, {"reader": w.reader}),
        {
            "reader": Rule({**NONSENSE, "a number": 3, "a path": "/x"}),
            "tables": MAPPING.optional.and_also(
                no_pair={"x": "features"}, another={(None, "x"): "nobody"}, number={(None, "x"): 3}
            ).saying("table"),
            "arrays": MAPPING.optional.and_also(
                no_pair={"y": np.zeros(3)}, objects={(None, "y"): np.array([object()])}, one={(None, "y"): 3}
            ),
        },
    ),
    "FeatstoreGraph": Call(
        lambda w: (FeatstoreGraph, {"indptr": w.indptr, "indices": w.indices}),
        {
            "indptr": ARRAY,
            "indices": ARRAY,
            "edge_type": Rule({**NONSENSE, "a text": "abc", "two": ("a", "b"), "numbers": (1, 2, 3)}),
            "source_nodes": count(0).optional,
        },
    ),
    # Packing.
    "pack": Call(
        lambda w: (featstore.pack, {"out": w.fresh(), "features": w.rows[:50], "memory": "64MiB"}),
        {
            "out": PATH,
            "features": SOURCES,
            "graph": SOURCES,
            "arrays": MAPPING.optional.and_also(
                objects={"y": np.array([object()])},
                ragged={"y": [[1], [2, 3]]},
                no_file={"y": "/no/such.npy"},
                number={3: np.zeros(3)},
                outside={"../y": np.zeros(3)},
                masked={"y": np.ma.array([1, 2], mask=[0, 1])},
            ).saying("arrays|array"),
            "order": choice().optional.and_also(no_graph="ldg", **BY_TABLE),
            "permutation": Rule(
                {
                    **NONSENSE,
                    "a number": 3,
                    "ragged": [[1], [2, 3]],
                    "too short": np.arange(3),
                    "twice": np.zeros(50, int),
                    "floats": np.zeros(50),
                },
                "permutation",
            ),
            "partitions": count(1, 2**31 - 1).optional.but("a mapping").and_also(another_table={"nobody": 3}),
            "dtype": choice().optional,
            "cast": choice().optional.saying("dtype|cast"),
            "raw_dtype": Rule({**NONSENSE, "another": "float64", "none": "no dtype"}, "dtype"),
            "shape": Rule(
                {**NONSENSE, "another": (49, WIDTH), "a text": "50x8", "a fraction": (2.5,)}, "shape"
            ),
            "offset": Rule(
                {**NONSENSE, "for an array": 8, "a text": "8", "negative": -1, "a fraction": 1.5}, "offset"
            ),
            "key": Rule({**NONSENSE, "for an array": "x", "a number": 3}, "key"),
            "columns": Rule({**NONSENSE, "for an array": ["a"], "a number": 3}, "columns"),
            "id": Rule({**NONSENSE, "for an array": "node_id", "a number": 3}, "id"),
            "node_keys": KEYS.and_also(of_no_column="id", too_few=["n1"], no_file="no/such.npy"),
            "graph_key": Rule({**NONSENSE, "without a graph": "x", "a number": 3}, "graph_key"),
            "memory": MEMORY,
            "seed": SEED,
            "topology": FLAG,
            "hubs": number(0).and_also(more_than_all=1.5),
            "hub_rank": choice(),
            "edge_ids": FLAG.optional,
            "edge_weights": Rule({**NONSENSE, "without a graph": np.ones(3)}, "edge_weights"),
            "edge_times": Rule({**NONSENSE, "without a graph": np.ones(3, int)}, "edge_times"),
            "train": Anything("with a graph, see the next"),
            "resume": FLAG,
            "overwrite": FLAG,
            "progress": PROGRESS,
            "disk": DOOR,
        },
    ),
    "pack with a graph": Call(
        lambda w: (
            featstore.pack,
            {
                "out": w.fresh(),
                "features": w.rows,
                "graph": (w.indptr, w.indices),
                "order": "bfs",
                "partitions": 2,
            },
        ),
        {
            "train": Rule(
                {
                    **{k: v for k, v in TRAIN.wrong.items() if k not in ("a text", "a nested list")},
                    "no array": "nobody",
                },
                "train|nodes",
            )
        },
    ),
    "ReaderStats": Call(lambda w: (featstore.ReaderStats, {}), {}, valid=False),
}

_OF_PACK = (
    "features", "graph", "arrays", "order", "partitions", "hubs", "graph_key", "raw_dtype", "shape", "offset",
    "key", "columns", "edge_ids", "edge_weights", "edge_times",
)  # fmt: skip
_OF_SPLIT = (
    "hosts", "out", "train", "seed", "halo_disk", "split_topology", "memory", "resume", "overwrite",
    "progress", "disk",
)  # fmt: skip
CALLS["split_features"] = Call(
    lambda w: (
        featstore.split_features,
        {"features": w.rows[:50], "hosts": 2, "out": w.fresh(), "memory": "64MiB"},
    ),
    {name: CALLS["pack"].parameters[name] for name in _OF_PACK}
    | {name: CALLS["split"].parameters[name] for name in _OF_SPLIT},
)
