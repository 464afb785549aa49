"""What hosts do that are processes of their own: they train on two tables of nodes, each of its own dtype and
of rows of its own size, and write down every loss, to the last bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from mode_hosts import join

import featstore
from featstore.errors import FeatstoreWarning

NODES = {"paper": 200, "author": 170}
CLASSES = 5
MEMORY = "16MiB"  # where rows of 40 kB do not all stay
#: Dtypes and shapes of the rows of papers and authors, from 8 B to 40 kB.
CASES: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "short": {"paper": ("float32", (17,)), "author": ("float16", (4,))},
    "float16": {"paper": ("float16", (20_000,)), "author": ("uint8", (8,))},
    "bfloat16": {"paper": ("bfloat16", (20_000,)), "author": ("float32", (3, 700))},
    "bytes": {"paper": ("uint8", (3, 500)), "author": ("bfloat16", (4,))},
}
WRITES, CITES, BY = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author"),
)  # fmt: skip

Feed = Iterable[tuple[dict[str, Any], dict[str, Any], Any]]


def rows_of(case: str) -> dict[str, np.ndarray[Any, Any]]:
    """The source: rows of both tables."""
    rng, made = np.random.default_rng([11, len(case)]), {}
    for name, (dtype, shape) in CASES[case].items():
        wide = (NODES[name], *shape)
        values = rng.integers(0, 256, wide) if dtype == "uint8" else rng.standard_normal(wide, np.float32)
        made[name] = values.astype(getattr(ml_dtypes, dtype, dtype))
    return made


def pack_and_split(folder: Path, case: str, pack: Callable[..., featstore.Store], *hosts: int) -> None:
    """A store of two communities of papers and authors, split by so many hosts."""
    rng, edges = np.random.default_rng(3), {}
    for of, count in {WRITES: 500, CITES: 500, BY: 400}.items():
        targets = rng.integers(0, NODES[of[2]], count)
        near = (rng.random(count) + 2 * targets // NODES[of[2]]) / 2 * NODES[of[0]]
        far = rng.integers(0, NODES[of[0]], count)
        edges[of] = np.stack([np.where(rng.random(count) < 0.7, near, far).astype(int), targets])
    with pack(folder / case, rows_of(case), graph=edges, order="ldg", partitions=16) as store:
        for count in hosts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FeatstoreWarning)  # so few nodes cannot always be even
                featstore.split(store, count, folder / f"{case}.parts{count}")


def fixed_batches() -> list[tuple[dict[str, Any], Any]]:
    """Node ids of both tables, some twice, and edges among their positions, from authors to papers."""
    made = []
    for step in range(6):
        rng = np.random.default_rng([5, step])
        ids = {"paper": rng.integers(0, NODES["paper"], 40), "author": rng.integers(0, NODES["author"], 60)}
        made.append((ids, np.stack([rng.integers(0, 60, 200), rng.integers(0, 40, 200)])))
    return made


def tensor_of(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    if rows.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def plain(rows: dict[str, np.ndarray[Any, Any]]) -> Feed:
    """The mini-batches as NumPy reads them from the source."""
    for _ in range(2):
        for ids, edges in fixed_batches():
            yield {name: tensor_of(one[ids[name]]) for name, one in rows.items()}, ids, edges


def loaded(loader: Any, rows: dict[str, np.ndarray[Any, Any]]) -> Feed:
    """The mini-batches of a loader; rows and ids are those of the source, to the last bit."""
    for _ in range(2):
        for (ids, edges), batch in zip(fixed_batches(), loader, strict=True):
            assert (np.asarray(batch.sample) == edges).all()
            for name, one in rows.items():
                wanted, found = one[ids[name]], batch.x[name]
                assert np.array_equal(batch.n_id[name], ids[name])
                assert found.dtype == tensor_of(wanted).dtype
                assert found.shape == wanted.shape
                assert found.contiguous().view(torch.uint8).numpy().tobytes() == wanted.tobytes(), name
            yield batch.x, ids, edges


def losses_of(feed: Feed, case: str) -> list[str]:
    """Of a small model of both tables, to the last bit."""
    torch.manual_seed(0)
    own, other = (torch.nn.Linear(int(np.prod(CASES[case][name][1])), CLASSES) for name in NODES)
    optimiser = torch.optim.Adam([*own.parameters(), *other.parameters()], lr=0.0003)
    losses = []
    for rows, ids, edges in feed:
        # copies lie where torch puts them: how sums are added up may depend on it
        x = {name: one.to(torch.float32, copy=True).flatten(1) for name, one in rows.items()}
        row, col = torch.as_tensor(np.asarray(edges))
        near = torch.zeros(len(x["paper"]), CLASSES).index_add(0, col, other(x["author"])[row])
        near = near / torch.bincount(col, minlength=len(near)).clamp(min=1)[:, None]
        label = torch.as_tensor(ids["paper"] % CLASSES)
        loss = torch.nn.functional.cross_entropy(own(x["paper"]) + near, label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()).hex())
    return losses


def be_alone(rank: int, folder: str) -> None:
    """Train in one process: on what NumPy reads, and on the whole store."""
    torch.set_num_threads(1)
    told = {}
    for case in CASES:
        rows = rows_of(case)
        told[case] = losses_of(plain(rows), case)
        given: dict[str, Any] = {"memory": MEMORY, "tensors": True}
        with (
            featstore.open(Path(folder) / case) as store,
            store.loader(fixed_batches(), **given) as loader,
        ):
            assert losses_of(loaded(loader, rows), case) == told[case], case
    (Path(folder) / f"alone.{rank}").write_text(json.dumps(told))


def ways(rows: dict[str, np.ndarray[Any, Any]]) -> dict[str, dict[str, Any]]:
    """How the loader keeps rows of other hosts: by default, those wanted soonest, and as MassiveGNN."""
    room = sum(one.nbytes for one in rows.values()) // 3 + 60_000
    return {
        "default": {},
        "ahead": {"halo": room, "policy": "fifo"},
        "massivegnn": {"halo": featstore.MassiveGNN(0.25, delta=2)},
    }


def be_equal(rank: int, hosts: int, folder: str) -> None:
    """Train as one of so many hosts on all cases, in every way; write down what came."""
    join(rank, hosts, folder, f"equal{hosts}")
    told: dict[str, Any] = {}
    for case in CASES:
        rows = rows_of(case)
        with featstore.open_split(f"{case}.parts{hosts}", memory="24MiB", timeout_seconds=30) as store:
            own = {name: int((one.hosts == store.place.host).sum()) for name, one in store.owners.items()}
            assert all(0 < own[name] <= NODES[name] - hosts + 1 for name in NODES), own
            for way, options in ways(rows).items():
                before = store.received()[0]
                given = {"memory": MEMORY, "tensors": True, "rank": 0, "world_size": 1} | options
                with store.loader(fixed_batches(), **given) as loader:
                    losses = losses_of(loaded(loader, rows), case)
                told[f"{case} {way}"] = {"losses": losses, "received": store.received()[0] - before}
    Path(f"equal{hosts}.told.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()
