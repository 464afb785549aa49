"""DGL's mini-batches: recorded, compiled and read online, as its data loaders give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import featstore
from featstore.errors import FormatError, SourceError
from featstore.trace.sample_decoder import decode
from featstore.trace.sample_encoder import encode
from featstore.trace.samples import HEADER_AT, SAMPLE_MAGIC

os.environ.setdefault("DGLBACKEND", "pytorch")  # else importing it writes into the user's home
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
dgl = pytest.importorskip("dgl", exc_type=ImportError)

NODES, DIM = 600, 8
FEATURES = np.random.default_rng(0).standard_normal((NODES, DIM), np.float32)
MODES = ["online", "compiled", "rolling"]


def graph_of(seed: int = 1, **options: Any) -> Any:
    rng = np.random.default_rng(seed)
    ends = torch.from_numpy(rng.integers(0, NODES, (2, 4000)))
    return dgl.graph((ends[0], ends[1]), num_nodes=NODES, **options)


def batches_of(graph: Any, seeds: Any, sampler: Any = None, **options: Any) -> list[Any]:
    dgl.seed(3)
    sampler = sampler or dgl.dataloading.NeighborSampler([4, 3])
    return list(dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=50, **options))


def same_graph(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.idtype == other.idtype
    assert one.canonical_etypes == other.canonical_etypes
    for relation in other.canonical_etypes:
        for found, wanted in zip(
            one.edges("all", etype=relation), other.edges("all", etype=relation), strict=True
        ):
            assert torch.equal(found, wanted)
        same_data(one.edges[relation].data, other.edges[relation].data)
    for view, types, count in (
        [("srcnodes", "srctypes", "num_src_nodes"), ("dstnodes", "dsttypes", "num_dst_nodes")]
        if other.is_block else [("nodes", "ntypes", "num_nodes")]
    ):  # fmt: skip
        assert getattr(one, types) == getattr(other, types)
        for kind in getattr(other, types):
            assert getattr(one, count)(kind) == getattr(other, count)(kind)
            same_data(getattr(one, view)[kind].data, getattr(other, view)[kind].data)


def same_data(one: Any, other: Any) -> None:
    assert set(one) == set(other)
    for name, value in other.items():
        assert one[name].dtype == value.dtype
        assert torch.equal(one[name], value)


def typed_graph() -> Any:
    rng = np.random.default_rng(5)
    ends = {r: torch.from_numpy(rng.integers(0, 90, (2, 300))) for r in ("writes", "cites")}
    none = torch.empty(0, dtype=torch.int64)
    return dgl.heterograph({
        ("author", "writes", "paper"): tuple(ends["writes"]),
        ("paper", "cites", "paper"): tuple(ends["cites"]),
        ("paper", "in", "venue"): (none, none),
    }, num_nodes_dict={"author": 90, "paper": 100, "venue": 3})  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("dgl") / "nodes.fs"
    featstore.pack(path, FEATURES)
    with featstore.open(path) as opened:
        yield opened


# Graphs and blocks as bytes, and back.


def test_blocks_come_back_as_they_are() -> None:
    graph = graph_of()
    graph.ndata["label"] = torch.arange(NODES)
    graph.edata["weight"] = torch.rand(graph.num_edges(), dtype=torch.float16)
    for inputs, outputs, blocks in batches_of(graph, torch.arange(100)):
        found: Any = decode(encode([inputs, outputs, blocks]))
        assert torch.equal(found[0], inputs)
        for one, wanted in zip(found[2], blocks, strict=True):
            same_graph(one, wanted)
            assert {"label", dgl.NID} <= set(one.srcdata)
            assert {"weight", dgl.EID} <= set(one.edata)


def test_ids_of_32_bits_stay_so() -> None:
    ends = torch.tensor([[0, 4, 2], [1, 0, 1]], dtype=torch.int32)
    for made in (
        dgl.create_block(tuple(ends), num_src_nodes=5, num_dst_nodes=2), dgl.graph(tuple(ends), num_nodes=9)
    ):  # fmt: skip
        assert made.idtype == torch.int32
        same_graph(decode(encode(made)), made)


def test_typed_blocks_and_relations_without_edges() -> None:
    graph = typed_graph()
    same_graph(decode(encode(graph)), graph)
    seeds = {"paper": torch.arange(30), "venue": torch.arange(2)}
    for _, _, blocks in batches_of(graph, seeds):
        for block in blocks:
            same_graph(decode(encode(block)), block)
    empty = dgl.heterograph({("a", "r", "b"): ([], [])}, num_nodes_dict={"a": 0, "b": 2, "c": 4})
    same_graph(decode(encode(empty)), empty)


def test_what_is_dropped_of_a_graph() -> None:
    graph = graph_of()
    graph.ndata["feat"] = torch.rand(NODES, 3)
    _, _, (block, _) = batches_of(graph, torch.arange(10))[0]
    found: Any = decode(encode(block, drop=["feat"]))
    assert set(found.srcdata) == set(found.dstdata) == {dgl.NID}
    assert torch.equal(found.srcdata[dgl.NID], block.srcdata[dgl.NID])


def test_graphs_that_would_not_come_back_are_refused() -> None:
    class Own(dgl.DGLGraph):  # type: ignore[misc, name-defined]
        pass

    own = graph_of()
    own.__class__ = Own
    with pytest.raises(SourceError, match=r"batch\[0\] is a Own and cannot be stored: give DGL's own"):
        encode([own])
    with pytest.raises(SourceError, match="is 2 graphs in one"):
        encode(dgl.batch([graph_of(), graph_of(2)]))


def test_a_block_that_dgl_made_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DGL 1.1.3 does with ids of 32 bits: edges from position 416 of 139."""
    block = dgl.create_block((torch.tensor([2]), torch.tensor([0])), num_src_nodes=3, num_dst_nodes=1)
    monkeypatch.setattr(type(block), "num_src_nodes", lambda *_: 2)
    with pytest.raises(SourceError, match=r"has edges of nodes that it has not .*: give .* ids of 64 bits"):
        encode(block)


def x(count: int) -> list[Any]:
    return ["x", "int64", [count]]


@pytest.mark.parametrize(
    "tree",
    [
        ["G"], ["G", 1], ["G", ["d"], None], ["G", ["d"], None, 1],
        ["G", ["d", "a", ["l", -1, ["d"]]], None, ["d"]],
        ["G", ["d", "a", ["l", 2**63, ["d"]]], None, ["d"]],
        ["G", ["d", "a", ["l", "1", ["d"]]], None, ["d"]],
        ["G", ["d", "a", ["l", 1, ["d"]]], None, ["d", ["t", "a", "r", "b"], ["l", x(1), x(1), ["d"]]]],
        ["G", ["d", "a", ["l", 1, ["d"]]], None, ["d", "r", ["l", x(1), x(1), ["d"]]]],
        # edges are 3 and 4: of nodes that there are not; and as many sources as targets there must be
        ["G", ["d", "a", ["l", 3, ["d"]]], None, ["d", ["t", "a", "r", "a"], ["l", x(1), x(1), ["d"]]]],
        ["G", ["d", "a", ["l", 9, ["d"]]], None, ["d", ["t", "a", "r", "a"], ["l", x(1), x(2), ["d"]]]],
        ["G", ["d", "a", ["l", 9, ["d", "v", x(3)]]], None, ["d", ["t", "a", "r", "a"],
         ["l", x(1), x(1), ["d"]]]],
        ["G", ["d", "a", ["l", 9, ["d"]]], ["d", "a", ["l", 3, ["d"]]],
         ["d", ["t", "a", "r", "a"], ["l", x(1), x(1), ["d"]]]],
    ],
    ids=repr,
)  # fmt: skip
def test_graphs_that_lie_are_refused(tree: Any) -> None:
    header = msgspec.msgpack.encode(tree)
    end = HEADER_AT + len(header)
    raw = np.zeros((end + 63) // 64 * 64 + 256, np.uint8)
    raw[:end] = np.frombuffer(SAMPLE_MAGIC + len(header).to_bytes(4, "little") + header, np.uint8)
    raw[(end + 63) // 64 * 64 :] = np.repeat(np.arange(3, 7), 64).astype(np.uint8) * (np.arange(256) % 8 == 0)
    for cut in range(64, 320, 64):  # however many arrays it has
        with pytest.raises(FormatError, match="no sample"):
            decode(raw[: len(raw) - 256 + cut - 64])


# Loaders.


@pytest.mark.parametrize("mode", MODES)
def test_dgl_s_mini_batches_under_every_mode(store: Any, mode: str) -> None:
    made = batches_of(graph_of(), torch.arange(230), drop_last=False)
    with store.loader(made, mode=mode, memory="64MiB") as loader:
        count = 0
        for batch, (inputs, outputs, blocks) in zip(loader, made, strict=False):
            assert torch.equal(batch.n_id, inputs)
            assert torch.equal(batch.x, torch.from_numpy(FEATURES)[inputs])
            assert torch.equal(batch.output_nodes, outputs)
            assert torch.equal(batch.n_id[: batch.batch_size], outputs)
            for one, wanted in zip(batch.blocks, blocks, strict=True):
                same_graph(one, wanted)
            convolved = dgl.nn.SAGEConv(DIM, 2, "mean")(
                batch.blocks[0], (batch.x, batch.x[: batch.blocks[0].num_dst_nodes()])
            )
            assert convolved.shape == (blocks[0].num_dst_nodes(), 2)
            with pytest.raises(AttributeError, match="edge_index"):
                _ = batch.edge_index
            count += 1
        assert count == len(made) == 5


@pytest.mark.parametrize("mode", MODES)
def test_links_with_negative_ones(store: Any, mode: str) -> None:
    graph = graph_of()
    for negative in (None, dgl.dataloading.negative_sampler.Uniform(2)):
        sampler = dgl.dataloading.as_edge_prediction_sampler(
            dgl.dataloading.NeighborSampler([3]), negative_sampler=negative
        )
        made = batches_of(graph, torch.arange(120), sampler)
        named = {} if mode == "online" else {"name": f"links{negative is None}"}
        with store.loader(made, mode=mode, memory="64MiB", **named) as loader:
            for batch, parts in zip(loader, made, strict=False):
                assert torch.equal(batch.x, torch.from_numpy(FEATURES)[parts[0]])
                same_graph(batch.pair_graph, parts[1])
                same_graph(batch.blocks[0], parts[-1][0])
                if negative is not None:
                    same_graph(batch.neg_pair_graph, parts[2])


@pytest.mark.parametrize("mode", MODES)
def test_types(tmp_path: Path, mode: str) -> None:
    graph = typed_graph()
    tables = {
        t: np.random.default_rng(k).standard_normal((graph.num_nodes(t), 4), np.float32)
        for k, t in enumerate(graph.ntypes)
    }
    made = batches_of(graph, {"paper": torch.arange(100)})
    featstore.pack(tmp_path / "s", tables)
    with featstore.open(tmp_path / "s") as opened, opened.loader(made, mode=mode, memory="64MiB") as loader:
        for batch, (inputs, outputs, blocks) in zip(loader, made, strict=False):
            for kind, ids in inputs.items():
                assert torch.equal(torch.as_tensor(batch.x[kind]), torch.from_numpy(tables[kind])[ids])
            assert torch.equal(batch.output_nodes["paper"], outputs["paper"])
            same_graph(batch.blocks[0], blocks[0])


def test_a_trace_of_a_data_loader_itself(store: Any, tmp_path: Path) -> None:
    """What is recorded is what a loader of the same seed gives."""
    loader = dgl.dataloading.DataLoader(
        graph_of(), torch.arange(100), dgl.dataloading.NeighborSampler([4]), batch_size=30
    )
    with featstore.Trace.record(loader, tmp_path / "t") as trace:
        assert len(trace) == 4
        for ids, sample in trace:
            assert np.array_equal(ids[""], sample["input_nodes"].numpy())
            assert np.array_equal(sample["blocks"][0].srcdata[dgl.NID].numpy(), ids[""])
            assert sample["batch_size"] == len(sample["output_nodes"])
