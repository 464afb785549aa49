"""Hosts as processes, over gloo: the same rows and mini-batches as of one store, equal steps, every rank
told of a host that is gone, and a restart that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from fault_hosts import all_of, forked_from
from mode_hosts import be_any_host, be_learner

import featstore
from featstore.errors import ArgumentError, FeatstoreWarning, SourceError
from featstore.loaders.mega.options import DrawnWith
from featstore.loaders.mega.parts import Parts

NODES = 1200
SECONDS = 90

COMMON = """
import json, os
from datetime import timedelta
import numpy as np
import torch
import torch.distributed as dist
import featstore
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
features = np.load("features.npy")
"""


def graph_and_rows(path: Path, pack: Any, *hosts: int) -> None:
    """A store of two communities, split by one host, by two, and by three, with its
    topology, or by so many ``hosts``."""
    rng = np.random.default_rng(7)
    features = rng.standard_normal((NODES, 17), np.float32)
    side = np.arange(NODES) * 2 // NODES
    target = rng.integers(0, NODES, 9 * NODES)
    near = rng.integers(0, NODES // 2, 9 * NODES) + side[target] * (NODES // 2)
    source = np.where(rng.random(9 * NODES) < 0.8, near, rng.integers(0, NODES, 9 * NODES))
    np.save(path / "features.npy", features)
    arrays = {"train": np.arange(0, NODES, 3), "label": np.arange(NODES) % 5}
    graph = np.stack([source, target])
    pack(path / "s", features, graph=graph, arrays=arrays, order="ldg", partitions=32).close()
    for count in hosts or (1, 2, 3):
        copies = "1000x" if count == 3 else None  # of the whole halo
        featstore.split(
            path / "s", count, path / f"parts{count}", train="train", halo_disk=copies,
            split_topology=count == 3,
        )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("training")
    graph_and_rows(made, pack)
    return made


def torchrun(folder: Path, ranks: int, script: str) -> None:
    """Run a script on so many ranks of ``torchrun``."""
    (folder / "script.py").write_text(COMMON + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "script.py"], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_rows_and_mini_batches_of_any_number_of_hosts(folder: Path, hosts: int) -> None:
    """Every row is the source's, every seed comes in every epoch, and all ranks have as many steps; whatever
    is kept of the halo."""
    assert all_of(forked_from(folder), be_any_host, hosts, hosts, str(folder)) == [0] * hosts
    by_rank = [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(hosts)]
    for told in zip(*by_rank, strict=True):
        assert sorted(one["rank"] for one in told) == list(range(hosts))
        assert len({one["steps"] for one in told}) == 1
        seen = Counter(node for one in told for node in one["seen"])
        assert set(seen) == set(range(0, NODES, 3))
        assert min(seen.values()) == 2
        assert sum(seen.values()) == 2 * (NODES // 3) + 2 * told[0]["padded"]
    assert len(by_rank[0]) == 4


def test_losses_are_the_same_on_any_number_of_hosts(tmp_path: Path, pack: Any) -> None:
    """To the last bit, on every host, whatever is kept."""
    graph_and_rows(tmp_path, pack, 1, 2, 4)
    expected = None
    for hosts in (1, 2, 4):
        name = f"learn{hosts}"
        assert all_of(forked_from(tmp_path), be_learner, hosts, hosts, str(tmp_path), name) == [0] * hosts
        for rank in range(hosts):
            told = json.loads((tmp_path / f"{name}.told.{rank}").read_text())
            assert len(told) == 2
            for one in told.values():
                expected = expected or one["losses"]
                assert one["losses"] == expected
                assert (one["rows"] > 0) == (hosts > 1)
    assert expected is not None
    assert len(set(expected)) == 18


def test_wrong_calls_say_what_to_do(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"open_split has no option 'queue_dept'.*queue_depth"):
        featstore.open_split(folder / "parts1", queue_dept=4)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"come over torch\.distributed.*init_process_group"):
        featstore.open_split(folder / "parts2")
    with pytest.raises(SourceError, match="has no topology in it or beside it"):
        featstore.open_split(folder / "s")
    with featstore.open(folder / "s") as plain, pytest.raises(ArgumentError, match="split by hosts"):
        plain.loader(seeds="train", fanouts=(2,), halo="20KiB")
    with featstore.open_split(folder / "parts1", memory="16MiB") as store:
        for options, words in (
            ({"halo": "20KiB", "mode": "compiled"}, "halo= is of mode 'online', not of 'compiled'"),
            ({"halo": 3.5}, "halo must be a size"),
            ({"rank": 0, "world_size": 2}, "all 1 ranks of the run train together"),
        ):
            with pytest.raises(ArgumentError, match=words):
                store.loader(seeds="train", fanouts=(2,), memory="48MiB", **options)
        with pytest.raises(ArgumentError, match="for mini-batches that are known beforehand"):
            store.loader(lambda epoch: [np.arange(9)], memory="48MiB", halo="20KiB")


def test_files_of_the_topology_are_not_taken_for_rows(tmp_path: Path, pack: Any) -> None:
    """Labels of a byte and the hosts of their nodes have files of one size."""
    kind = np.arange(NODES, dtype=np.uint8) % 7 + 3
    edges = np.random.default_rng(0).integers(0, NODES, (2, 5000))
    pack(tmp_path / "s", kind, graph=edges, order="ldg", partitions=4).close()
    featstore.split(tmp_path / "s", 1, tmp_path / "parts")
    with featstore.open_split(tmp_path / "parts", memory="16MiB") as store:
        with store.reader(memory="16MiB") as reader:
            assert (reader.read(np.arange(NODES)) == kind).all()
        for call in (
            lambda: featstore.Reader(store, memory="16MiB"),
            lambda: featstore.SharedBuffer(store, memory="32MiB"),
            lambda: store.zarr("features"),
        ):
            with pytest.raises(SourceError, match=r"'features' are on several hosts.*store\.part"):
                call()
        with pytest.raises(ArgumentError, match=r"topology of a split store.*each host's part"):
            featstore.export(store, "features", tmp_path / "o.npy")
        featstore.export(store.part, "features", tmp_path / "o.npy")
        assert (np.load(tmp_path / "o.npy") == kind).all(), "of one host, whose ids are those of all"


def test_partitions_of_hosts_are_drawn_with_what_the_whole_store_has(tmp_path: Path, pack: Any) -> None:
    """Weights and times that graphs keep, of edges that are in a part; times of nodes by their ids in all."""
    random = np.random.default_rng(1)
    rows, edges = random.standard_normal((NODES, 4), np.float32), random.integers(0, NODES, (2, 5000))
    weights, when = (random.random(5000) * (random.random(5000) < 0.5)).astype(np.float32), np.arange(NODES)
    pack(
        tmp_path / "s", rows, graph=edges, edge_weights=weights, arrays={"when": when}, order="ldg",
        partitions=8,
    ).close()  # fmt: skip
    featstore.split(tmp_path / "s", 1, tmp_path / "parts")
    given: Any = {"seeds": np.arange(0, NODES, 5), "fanouts": (-1,), "memory": "48MiB", "mode": "partitions"}
    degrees = np.bincount(edges[1][weights > 0], minlength=NODES)
    with featstore.open_split(tmp_path / "parts", memory="16MiB") as store:
        with store.loader(**given, hubs=0, resident=8, weight_attr="weights") as loader:
            for batch in loader:
                found = np.bincount(batch.edge_index[1], minlength=len(batch.n_id))[: batch.batch_size]
                assert (found == degrees[batch.n_id[: batch.batch_size]]).all()
        until = np.full(len(given["seeds"]), 700)
        with store.loader(**given, time_attr="when", input_time=until) as loader:
            for batch in loader:
                assert (batch.n_id[batch.batch_size :] <= 700).all()
                assert len(batch.n_id) > batch.batch_size
    with (
        pack(tmp_path / "bare", rows, graph=edges) as bare,
        featstore.open(tmp_path / "s") as whole,
        pytest.raises(SourceError, match="has no weights of its edges, and the topology has: parts"),
    ):
        DrawnWith(Parts(bare, None), {"weight_attr": "weights"}, whole=whole)


def test_partitions_of_hosts_say_that_they_have_no_numbers_of_edges(tmp_path: Path, pack: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((NODES, 4), np.float32)
    edges = np.random.default_rng(1).integers(0, NODES, (2, 5000))
    tables = {"features": rows, "edge_features": np.arange(5000, dtype=np.float32)[:, None]}
    pack(tmp_path / "s", tables, graph={"features": edges}, memory="256MiB").close()
    featstore.split(tmp_path / "s", 1, tmp_path / "parts")
    given: Any = {"seeds": np.arange(NODES), "fanouts": (2,), "memory": "48MiB"}
    with featstore.open_split(tmp_path / "parts", memory="16MiB") as store:
        with pytest.raises(
            SourceError, match="read by e_id, which mini-batches of mode 'partitions' have not"
        ):
            store.loader(mode="partitions", edge_table="edge_features", **given)
        with (
            pytest.warns(FeatstoreWarning, match="have no e_id where rows are on several hosts"),
            store.loader(mode="partitions", **given) as loader,
        ):
            assert not hasattr(next(iter(loader)), "e_id")
        with store.loader(mode="online", edge_table="edge_features", **given) as loader:
            for batch in loader:
                assert (batch.edge_attr[:, 0] == batch.e_id).all()
                assert (batch.n_id[batch.edge_index] == edges[:, batch.e_id]).all()


SHARED = """
with featstore.open_split("parts2", memory="16MiB", timeout_seconds=30) as store:
    assert (store.place.host, store.place.local_rank) == divmod(rank, 2)
    seeds = {"seeds": "train", "fanouts": (4, 3), "batch_size": 30, "memory": "48MiB", "attach": "label"}
    told = {"rank": rank, "seen": [], "refused": []}
    for call in (lambda: store.reader(memory="16MiB").read([0]), lambda: store.loader(**seeds)):
        try:
            call()
        except featstore.errors.ArgumentError as error:
            told["refused"].append(str(error))
    before = store.received()[0]
    with store.loader(**seeds, shared=True, halo="20KiB") as loader:
        for epoch in range(2):
            for batch in loader:
                assert (batch.x == features[batch.n_id]).all()
                assert (batch.label == batch.n_id % 5).all()
                told["seen"].extend(batch.n_id[: batch.batch_size].tolist())
                dist.all_reduce(torch.ones(1))
                told["steps"] = told.get("steps", 0) + 1
        report = loader.report()
        told |= {"padded": report.padded, "remote_rows": report.remote_rows}
    told["received"] = store.received()[0] - before
    come = []
    for warm in (None, "kept"):  # what was kept is there before the first mini-batch
        few = seeds | {"batch_size": 4, "halo": featstore.Buffer("lru", "1MiB")}
        with store.loader(**few, shared=True, warm=warm) as loader:
            first = None
            for batch in loader:
                assert (batch.x == features[batch.n_id]).all()
                first = first or loader.report().remote_rows
                dist.all_reduce(torch.ones(1))
            come.append((loader.report().remote_rows, first))
            loader.save_cache("kept")
            dist.all_reduce(torch.ones(1))
    told["come"] = come
    assert (store._owners is None) == (rank % 2 == 1), "the host knows them once"
    assert (store.owners["features"].hosts[told["seen"]] == rank // 2).all()
    json.dump(told, open(f"told{rank}.json", "w"))
dist.destroy_process_group()
"""


def test_two_ranks_of_each_of_two_hosts_share_a_loader(folder: Path) -> None:
    """Rows are right, steps equal, every seed comes in every epoch; the first rank of a host has the lines,
    and reads each row for both."""
    torchrun(folder, 4, SHARED)
    told = [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(4)]
    assert len({one["steps"] for one in told}) == 1
    seen = Counter(node for one in told for node in one["seen"])
    assert set(seen) == set(range(0, NODES, 3))
    assert min(seen.values()) == 2
    assert sum(seen.values()) == 2 * (NODES // 3) + 2 * told[0]["padded"]
    # one copy: the second rank of a host has no line and no reader, and the host asks for a row once
    assert [len(one["refused"]) for one in told] == [1, 2, 1, 2]
    assert [one["received"] > 0 for one in told] == [True, False, True, False]
    assert told[0]["received"] == told[0]["remote_rows"] == told[1]["remote_rows"]
    for one in told:
        (cold, begun), (warm, first) = one["come"]
        assert begun < 0.7 * cold, "the first mini-batches want all rows"
        assert warm - first <= 0.1 * cold, "rows that were saved were asked for again"
    # all of them find room
    assert told[0]["received"] + told[2]["received"] <= NODES, "a row of another host has come twice"
