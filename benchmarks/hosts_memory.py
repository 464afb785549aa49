"""What a host's memory grows by with the graph: the smallest budgets that work, and what is resident then.

    python benchmarks/hosts_memory.py --dir /a/directory

Stores of several sizes are split by 2 and by 4 hosts, with the whole topology on each and with split
topology. Hosts are processes of this machine, started by torchrun. Each finds the smallest ``memory=`` of
``open_split``, and then of a loader (32 MiB where topology is split), by what BudgetError says, and trains
some mini-batches within these. What is resident beyond the bare process, measured after another, small store
has loaded all code, is held against the two together. A budget is fitted as a constant, bytes for each host,
for each node of the graph, and for each node that the host owns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Claim, Report, Settings, note, shared_options
from tables import remove

import featstore

SIZES, QUICK_SIZES = (100_000, 200_000, 400_000), (20_000, 40_000, 60_000)
SMALL, HOSTS, EDGES_A_NODE, COLUMNS = 20_000, (2, 4), 4, 4
TOPOLOGIES = ("whole", "split")

PROGRAM = """
import gc, json, sys
from datetime import timedelta
import torch.distributed as dist
import featstore

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
HOW = {"seeds": "train", "fanouts": (3, 3), "batch_size": 64}

def resident():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) << 10

def agreed(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

def smallest(make):
    # What every host can have: the most that any of them needs, asked for again until none refuses.
    given = 1
    while True:
        made, needed = None, 0
        try:
            made = make(given)
        except featstore.errors.BudgetError as error:
            needed = error.needed_bytes
        most = max(agreed(needed))
        if most == 0:
            return given, made
        if made is not None:
            made.close()
        given = max(most, given + 1)

def go(parts):
    begin = resident()
    opening, store = smallest(lambda m: featstore.open_split(parts, memory=m, timeout_seconds=60))
    if store.splits_topology:  # whose loaders say what they need when a mini-batch needs it
        loading = 32 << 20
        loader = store.loader(memory=loading, **HOW)
    else:
        loading, loader = smallest(lambda m: store.loader(memory=m, **HOW))
    after, peak = resident(), 0
    for number, batch in enumerate(loader):
        assert (batch.x[:, 0] == batch.n_id).all()
        peak = max(peak, resident())
        del batch
        if number == 5:
            break
    own = int((store.owners["features"].hosts == store.place.host).sum())
    loader.close()
    store.close()
    return {"open": opening, "loader": loading, "resident": peak - begin, "own": own}

go(sys.argv[1])
gc.collect()
found = [go(parts) for parts in sys.argv[3:]]
told = agreed(found)
if dist.get_rank() == 0:
    json.dump(told, open(sys.argv[2], "w"))
dist.destroy_process_group()
"""


def split(workspace: Path, nodes: int, hosts: int, topology: str) -> Path:
    """A store's parts; row i is i."""
    out = workspace / f"hosts-memory-{nodes}-{hosts}-{topology}"
    rng = np.random.default_rng(nodes)
    rows = np.repeat(np.arange(nodes, dtype=np.float32)[:, None], COLUMNS, 1)
    edges = rng.integers(0, nodes, (2, EDGES_A_NODE * nodes), np.int32)
    featstore.split_features(
        rows, hosts, out, graph=edges, arrays={"train": np.arange(0, nodes, nodes // 2000)}, train="train",
        order="ldg", partitions=64, split_topology=topology == "split", overwrite=True, memory="2GiB",
    )  # fmt: skip
    return out


def run(workspace: Path, hosts: int, small: Path, parts: list[Path]) -> list[list[dict[str, int]]]:
    """Of each host, of each of the parts, what it found."""
    script, told = workspace / "hosts_memory.child.py", workspace / "hosts-memory.json"
    script.write_text(PROGRAM)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={hosts}"]
    root = str(Path(featstore.__file__).parents[1])
    subprocess.run(
        [*words, str(script), str(small), str(told), *map(str, parts)], check=True, timeout=1200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root},
    )  # fmt: skip
    return json.loads(told.read_text())  # type: ignore[no-any-return]


def fitted(found: list[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """(constant on four hosts, bytes a node, bytes an own node) of a budget."""
    given = np.array([[1, one["hosts"], one["nodes"], one["own"]] for one in found], np.float64)
    constant, host, node, own = np.linalg.lstsq(given, np.array([one[what] for one in found]), rcond=None)[0]
    return float(constant + 4 * host), float(node), float(own)


@click.command()
@shared_options(size="1GiB", quick_size="64MiB", rounds=1)
def main(settings: Settings) -> None:
    """The smallest memory of a host, by nodes of the graph and nodes of its own."""
    sizes = QUICK_SIZES if settings.quick else SIZES
    report = Report("hosts_memory", "Memory of a host", {
        "nodes": sizes, "hosts": HOSTS, "edges_a_node": EDGES_A_NODE, "row_bytes": 4 * COLUMNS,
    }, settings.workspace)  # fmt: skip
    rows: list[list[Any]] = []
    slopes: list[list[Any]] = []
    for topology in TOPOLOGIES:
        found: list[dict[str, Any]] = []
        for hosts in HOSTS:
            note(f"{topology} topology, {hosts} hosts")
            small = split(settings.workspace, SMALL, hosts, topology)
            parts = [split(settings.workspace, nodes, hosts, topology) for nodes in sizes]
            for host in run(settings.workspace, hosts, small, parts):
                found += [{"nodes": n, "hosts": hosts, **one} for n, one in zip(sizes, host, strict=True)]
            for path in (small, *parts):
                remove(path)
        for one in found:
            budget = one["open"] + one["loader"]
            one["share"] = one["resident"] / budget
            mib = [round(one[name] / 2**20, 1) for name in ("open", "loader", "resident")]
            rows.append([topology, one["hosts"], one["nodes"], one["own"], *mib, round(one["share"], 2)])
        for what, call in (("open", "open_split"), ("loader", "loader")):
            constant, node, own = fitted(found, what)
            at = constant + node * 1e9 + own * 1e9 / 4
            slopes.append([topology, call, constant / 2**20, node, own, at / 1e9])
            report.claims.append(Claim(f"{topology} topology, {call}: bytes of each node", node, unit="B"))
            report.claims.append(Claim(f"{topology} topology, {call}: of each own node", own, unit="B"))
            of_billion = f"{topology} topology, {call}: of 10⁹ nodes on 4 hosts, extrapolated"
            report.claims.append(Claim(of_billion, at / 1e9, unit="GB"))
        worst = max(one["share"] for one in found)
        report.claims.append(
            Claim(f"{topology} topology: resident over the two budgets, worst host", worst, 1.0, "<=")
        )
    report.table(
        "The smallest budgets, and what was resident within them",
        ["topology", "hosts", "nodes", "own nodes", "open_split, MiB", "loader, MiB", "resident, MiB",
         "of both"],
        rows,
    )  # fmt: skip
    report.table(
        "Slopes",
        ["topology", "budget", "constant, MiB", "B a node", "B an own node", "10⁹ nodes, 4 hosts, GB"],
        slopes,
    )
    report.notes = [
        f"Random graphs of {EDGES_A_NODE} stored edges a node, rows of {4 * COLUMNS} B, an array of ids of "
        "training nodes. The last column is extrapolated.",
        "Resident is anonymous memory beyond that of the process before, the most after each of six "
        "mini-batches.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
