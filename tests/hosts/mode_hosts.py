"""What hosts do that are processes of their own: they train in every mode, go on from states, and end."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import featstore
import featstore.compile.gather as gather
from featstore.errors import ArgumentError, FeatstoreWarning, PeerError
from featstore.tiers import saved

NODES = 1200
MODES = ("compiled", "rolling", "partitions")
SEEDED: dict[str, Any] = {"seeds": "train", "fanouts": (4, 3), "batch_size": 30, "memory": "48MiB"}
#: Of mode partitions: so many partitions at once, so that hosts have unequal numbers of mini-batches.
RESIDENT = (2, 9, 30)


def join(rank: int, ranks: int, folder: str, name: str) -> None:
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.meeting", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip


def options_of(mode: str, host: int, ranks: int) -> dict[str, Any]:
    options: dict[str, Any] = {**SEEDED, "mode": mode, "attach": "label"}
    if mode == "partitions":
        options |= {"resident": RESIDENT[host], "hubs": 0}
    return options | ({"shared": f"{os.getcwd()}/{mode}"} if ranks > 1 else {})


def check(batch: Any, features: Any) -> list[int]:
    """The rows are the source's; the seeds."""
    assert (np.asarray(batch.x) == features[batch.n_id]).all()
    assert (batch.label == batch.n_id % 5).all()
    seeds: list[int] = batch.n_id[: batch.batch_size].tolist()
    return seeds


def be_any_host(rank: int, hosts: int, folder: str) -> None:
    """Read, and train with whatever is kept of the halo; write down what came; open the store again."""
    join(rank, hosts, folder, f"any{hosts}")
    features = np.load("features.npy")
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store:
        own = store.owners["features"].hosts == store.place.host
        ids = np.random.default_rng(rank).integers(0, 1200, 700)
        with store.reader(memory="16MiB") as reader:
            assert (reader.read(ids) == features[ids]).all()
        with store.reader(tiers=[featstore.Buffer("s3-fifo", "100KiB")], memory="16MiB") as reader:
            for _ in range(3):
                assert (reader.read(ids) == features[ids]).all()
        told = []
        kept = featstore.Buffer("s3-fifo", "1MiB")
        for halo in (None, "20KiB", featstore.MassiveGNN(0.25, delta=2), kept):
            with store.loader(
                seeds="train",
                fanouts=(4, 3),
                batch_size=30,
                memory="48MiB",
                attach="label",
                halo=halo,
            ) as loader:
                steps, seen = 0, []
                for _ in range(2):
                    for batch in loader:
                        assert (batch.x == features[batch.n_id]).all()
                        assert (batch.label == batch.n_id % 5).all()
                        seeds = batch.n_id[: batch.batch_size]
                        assert own[seeds].all()
                        seen.extend(seeds.tolist())
                        dist.all_reduce(torch.ones(1))
                        steps += 1
                report = loader.report()
                assert (report.remote_rows > 0) == (hosts > 1), report
                told.append({"rank": rank, "steps": steps, "padded": report.padded, "seen": seen})
                if halo is None:
                    loader.save_cache("warm")
                elif not isinstance(halo, str):
                    loader.save_cache(type(halo).__name__)
        names = [
            "Buffer.cache",
            "Buffer.halo.cache",
            "MassiveGNN.cache",
            "MassiveGNN.halo.cache",
            "warm.cache",
        ]
        there = sorted(path.name for path in (store.part.path / "caches").iterdir())
        assert there == names, "each host has its own"
        saved.save(store, "Buffer", {})  # so that rows can only be there that were kept of the halo
        for warm, halo in (("warm", None), ("Buffer", kept), ("MassiveGNN", featstore.MassiveGNN(0.25))):
            with store.loader(
                seeds="train", fanouts=(4, 3), batch_size=30, memory="48MiB", warm=warm, halo=halo
            ) as loader:
                come = []
                for batch in loader:
                    assert (batch.x == features[batch.n_id]).all()
                    come.append(loader.report().remote_rows)
                if warm != "MassiveGNN":  # which keeps a quarter
                    assert come[-1] <= 1.2 * come[0], "what was saved is there before the first mini-batch"
        with store.loader(seeds="train", fanouts=(-1,), batch_size=30, memory="48MiB") as loader:
            for batch in loader:
                assert (batch.x == features[batch.n_id]).all()
            assert (loader.report().remote_rows > 0) == (hosts == 2)  # of 3 each has copies of its halo
        Path(f"told{rank}.json").write_text(json.dumps(told))
    for _ in range(2):  # opened again, each host when it comes to it
        time.sleep(0.3 * rank)
        with (
            featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store,
            store.reader(memory="16MiB") as reader,
        ):
            assert (reader.read(ids) == features[ids]).all()
    dist.destroy_process_group()


def fixed_batches() -> list[tuple[Any, Any]]:
    """Node ids, some twice, and edges among their positions."""
    made = []
    for step in range(9):
        rng = np.random.default_rng([5, step])
        made.append((rng.integers(0, NODES, 150), rng.integers(0, 150, (2, 600))))
    return made


def losses_of(store: Any, features: Any, **options: Any) -> list[str]:
    """Of a small GraphSAGE over mini-batches that are the same on all hosts, to the last bit."""
    torch.manual_seed(0)
    own, other = torch.nn.Linear(features.shape[1], 5), torch.nn.Linear(features.shape[1], 5, bias=False)
    optimiser = torch.optim.Adam([*own.parameters(), *other.parameters()], lr=0.01)
    losses, given = [], {"memory": "48MiB", "rank": 0, "world_size": 1} | options
    with store.loader(fixed_batches(), tensors=True, **given) as loader:
        for _ in range(2):
            for batch in loader:
                assert (batch.x.numpy() == features[batch.n_id]).all()
                row, col = torch.as_tensor(batch.sample)
                near = torch.zeros_like(batch.x).index_add_(0, col, batch.x[row])
                near /= torch.bincount(col, minlength=len(near)).clamp(min=1)[:, None]
                label = torch.as_tensor(batch.n_id % 5)
                loss = torch.nn.functional.cross_entropy(own(batch.x) + other(near), label)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(float(loss.detach()).hex())
        assert (loader.report().remote_rows > 0) == (store.place.hosts > 1)
    return losses


def be_learner(rank: int, hosts: int, folder: str, name: str) -> None:
    """Write down every loss, with and without rows of others that stay, in memory that looks ahead too, and
    how many rows were asked for."""
    join(rank, hosts, folder, name)
    features = np.load("features.npy")
    told = {}
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store:
        for kept in (None, "100KiB"):
            before = store.received()[0]
            losses = losses_of(store, features, halo=kept, policy="fifo")
            told[str(kept)[:5]] = {"losses": losses, "rows": store.received()[0] - before}
    Path(f"{name}.told.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


def be_host(rank: int, hosts: int, ranks: int, folder: str, name: str) -> None:
    """Train in every mode, from the beginning and from the middle of an epoch on; write down what came."""
    join(rank, hosts * ranks, folder, name)
    features = np.load("features.npy")
    if ranks > 1:  # ranks of a host give one another up by these
        with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30 + rank % 2) as store:
            try:
                store.loader(**options_of("online", 0, ranks))
            except ArgumentError as error:
                assert "timeout_seconds= of local rank 1 differ" in str(error), error
            else:
                raise AssertionError("other time-outs were not refused")
    warnings.simplefilter("error", FeatstoreWarning)  # all hosts begin alike
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store:
        host = store.place.host
        own = store.owners["features"].hosts == host
        told: dict[str, Any] = {"host": host}
        for mode in MODES:
            options = options_of(mode, host, ranks)
            with store.loader(**options) as loader:
                seen, state = [], None
                for _ in range(2):
                    batches = []
                    for batch in loader:
                        seeds = check(batch, features)
                        assert own[seeds].all()
                        batches.append(batch.n_id.tolist())
                        if mode == "partitions":
                            assert own[batch.n_id].all()
                        seen.append(seeds)
                        dist.all_reduce(torch.ones(1))
                        if loader.epoch == 1 and len(batches) == 3:
                            state = json.loads(json.dumps(loader.state_dict()))
                report = loader.report()
                told[mode] = {
                    "seen": seen, "padded": report.padded, "dropped": report.dropped,
                    "remote": report.remote_rows, "kept": report.kept_share,
                }  # fmt: skip
            with store.loader(**options) as loader:
                loader.load_state_dict(state)
                rest = [batch.n_id.tolist() for batch in loader]
            assert rest == batches[3:], mode
            packs = store.part.path / "packs"
            if mode == "rolling" and ranks == 1:
                assert not list(packs.glob("loader-*")), "episodes are left"
        if ranks == 1:
            more(store, hosts, features, told)
    Path(f"{name}.told.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


def more(store: Any, hosts: int, features: Any, told: dict[str, Any]) -> None:
    """What is left out, and mini-batches over two tables that are the same whatever the hosts."""
    options = {**options_of("partitions", told["host"], 1), "batch_size": 5, "drop_last": True}
    with store.loader(**options) as loader:
        length = len(loader)
        seen = [check(batch, features) for batch in loader]
        assert len(seen) == length
        told["left out"] = {"seen": seen, "dropped": loader.report().dropped}
    options = {**options_of("partitions", told["host"], 1), "replace": True, "fanouts": (200,)}
    with store.loader(**options, disjoint=True, subgraph_type="bidirectional") as loader:
        told["options"] = {"steps": len(loader)}
        for batch in loader:
            check(batch, features)
            row, col = np.asarray(batch.edge_index)
            edges = set(zip(row.tolist(), col.tolist(), strict=True))
            assert edges == {(target, source) for source, target in edges}
            assert (batch.sample.batch[row] == batch.sample.batch[col]).all()
    with featstore.open_split(f"two{hosts}", memory="16MiB", timeout_seconds=30) as store:
        rows = {name: np.load(f"{name}.npy") for name in ("paper", "author")}
        batches = [
            {
                name: np.random.default_rng([step, len(own)]).integers(0, len(own), 90)
                for name, own in rows.items()
            }
            for step in range(6)
        ]
        for mode in ("online", "compiled", "rolling"):
            given = {"mode": mode, "memory": "48MiB", "rank": 0, "world_size": 1}
            with store.loader(batches, **given) as loader:
                for ids, batch in zip(batches, loader, strict=True):
                    for name, values in rows.items():
                        assert (batch.n_id[name] == ids[name]).all()
                        assert batch.x[name].dtype == values.dtype
                        assert batch.x[name].tobytes() == values[ids[name]].tobytes()
                assert (loader.report().remote_rows > 0) == (hosts > 1)


def be_victim_or_not(rank: int, hosts: int, folder: str, name: str, mode: str, when: str, kind: str) -> None:
    """Train in a mode; host 1 ends in the middle of gathering, or after some mini-batches."""
    join(rank, hosts, folder, name)
    features = np.load("features.npy")
    victim = rank == 1

    def end(*_: Any) -> Any:
        Path(f"{name}.at").write_text(str(time.time()))
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(60)

    if victim and when == "gather":
        gather._blocks = end
    try:
        with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=3) as store:
            options = options_of(mode, store.place.host, 1) | {"name": name.replace("/", "-")}
            if mode == "partitions":
                del options["name"]
            with store.loader(**options) as loader:
                for step in range(10**6):
                    for batch in loader:
                        check(batch, features)
                        if step == 1 and victim:
                            end()
                        time.sleep(0.01)
    except PeerError as error:
        packs = store.part.path / "packs"
        left = sorted(p.parent.name for p in packs.glob(f"{name}*/featstore.json"))
        said = {"host": error.host, "at": time.time(), "left": left}
        Path(f"{name}.told.{rank}").write_text(json.dumps(said))
        os._exit(1)


def reuse_unlike(rank: int, hosts: int, folder: str, name: str) -> None:
    """What was compiled of mini-batches of another size: found by all hosts, and then by one of them."""
    join(rank, hosts, folder, name)
    given = {**options_of("compiled", rank, 1), "name": "unlike"}
    told = []
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store:
        store.loader(**given).close()
        try:
            store.loader(**{**given, "batch_size": 20}, reuse=True)
        except ArgumentError as error:
            told.append(str(error))
        dist.barrier()
        if rank:
            shutil.rmtree(store.part.path / "packs/unlike")
    try:
        with (
            featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=30) as store,
            store.loader(**{**given, "batch_size": 20}, reuse=True) as loader,
        ):
            while True:
                for _ in loader:
                    time.sleep(0.01)
    except (ArgumentError, PeerError) as error:
        told.append(f"{type(error).__name__}: {error}")
        Path(f"{name}.told.{rank}").write_text(json.dumps(told))
        os._exit(1)


def taken(batch: Any) -> dict[str, Any]:
    """All that a mini-batch of PyG's has, as arrays, by type and name."""
    found = {}
    for part in batch.stores:
        of = getattr(part, "_key", None)
        found |= {
            f"{of} {name}": np.asarray(value) for name, value in part.items() if not isinstance(value, list)
        }
    return found


def be_linked(rank: int, hosts: int, ranks: int, folder: str, name: str) -> None:
    """Train around links of each case twice, and from the middle of an epoch on; write down what came."""
    from featstore.adapters.pyg_links import LinkNeighborLoader

    join(rank, hosts * ranks, folder, name)
    told = []
    for number, (parts, said) in enumerate(pickle.loads(Path(f"{name}.cases").read_bytes())):
        made: list[list[Any]] = []
        given = {**said, "shared": f"{folder}/{name}{number}", "memory": "96MiB"}
        with featstore.open_split(parts, memory="24MiB", timeout_seconds=30) as store:
            with LinkNeighborLoader(store, **given) as loader:
                state = None
                for epoch in range(2):
                    made.append([])
                    for batch in loader:
                        made[-1].append(taken(batch))
                        if epoch and len(made[-1]) == 2:
                            state = json.loads(json.dumps(loader.loader.state_dict()))
                report = loader.report()
            with LinkNeighborLoader(store, **given) as loader:
                assert state is not None
                loader.loader.load_state_dict(state)
                rest = [taken(batch) for batch in loader]
            assert len(rest) == len(made[1]) - 2 > 0
            for one, other in zip(rest, made[1][2:], strict=True):
                assert one.keys() == other.keys()
                assert all(np.array_equal(one[of], other[of]) for of in one)
            received = store.received()[0]
        told.append({"made": made, "padded": report.padded, "received": received})
    Path(f"{name}.told.{rank}").write_bytes(pickle.dumps(told))
    dist.destroy_process_group()
