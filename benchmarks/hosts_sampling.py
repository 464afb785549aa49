"""What mini-batches of split topology cost beside those of the whole one, by what samplers are told.

    python benchmarks/hosts_sampling.py --dir /a/directory

A store is split by 2 hosts, processes of this machine over loopback: with the whole topology on each host,
and with that split, too. Both sample the same mini-batches, with all lists in memory, in turns of several
with either; that they are the same is checked. Beside the time: nodes whose neighbours other hosts were asked
for, times that these were waited for, and bytes that came.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Claim, Report, Settings, note, shared_options
from tables import remove

import featstore

NODES, QUICK_NODES, DEGREE, NEAR = 300_000, 30_000, 10, 3000
HOSTS, SEEDS, FANOUTS, BATCHES = 2, 1024, (5, 5), 10
#: What is said to the sampler; times of seeds with the last but one.
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {"edge_ids": False},
    "numbers of edges": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "weights"},
    "times": {"time_attr": "times"},
    "times, the last": {"time_attr": "times", "temporal_strategy": "last"},
}

PROGRAM = """
import hashlib, json, sys, time
from contextlib import ExitStack
import numpy as np
import torch.distributed as dist
import featstore

whole, split, told, options, rounds, batches, seeds, fanouts = json.loads(sys.argv[1])
dist.init_process_group("gloo")
found = {}
with ExitStack() as stack:
    stores = [stack.enter_context(featstore.open_split(p, memory="512MiB")) for p in (whole, split)]
    nodes, host = stores[0].tables["features"].rows, stores[0].place.host
    for name, said in options.items():
        timed = {"seed_times": np.full(seeds, 500)} if "time_attr" in said else {}
        samplers = [one.sampler(fanouts, memory="256MiB", seed=1, **said) for one in stores]
        seconds, cores, digests = [[], []], [[], []], [hashlib.sha256(), hashlib.sha256()]
        before = stores[1].received_lists()
        for turn in range(rounds + 1):  # the first is warming up
            for which, sampler in enumerate(samplers):
                dist.barrier()
                drawn = [
                    np.random.default_rng([turn, n, host]).permutation(nodes)[:seeds] for n in range(batches)
                ]
                begin, cpu = time.perf_counter(), time.process_time()
                made = [sampler.sample(one, n, epoch=turn, **timed) for n, one in enumerate(drawn)]
                seconds[which].append((time.perf_counter() - begin) / batches)
                dist.barrier()  # what the other was served is of this turn
                cores[which].append((time.process_time() - cpu) / batches)
                for one in made:
                    for array in (one.node, one.row, one.col, one.e_id):
                        digests[which].update(b"" if array is None else array)
        assert digests[0].digest() == digests[1].digest(), name
        stats, (_, byte_count) = samplers[1].stats(), stores[1].received_lists()
        found[name] = {
            "seconds": [one[1:] for one in seconds], "cores": [one[1:] for one in cores],
            "edges": stats.edges_asked / stats.batches, "nodes": stats.nodes_remote / stats.batches,
            "exchanges": stats.exchanges / stats.batches,
            "bytes": (byte_count - before[1]) / stats.batches,
        }
        for sampler in samplers:
            sampler.close()
if dist.get_rank() == 0:
    json.dump(found, open(told, "w"))
dist.destroy_process_group()
"""


def split(workspace: Path, nodes: int, *, topology: bool) -> Path:
    """The parts of a graph whose edges lead to nodes near by."""
    out, rng = workspace / f"hosts-sampling-{'split' if topology else 'whole'}", np.random.default_rng(0)
    targets = np.repeat(np.arange(nodes), DEGREE)
    sources = (targets + rng.integers(1, NEAR, len(targets))) % nodes
    featstore.split_features(
        rng.random((nodes, 4), np.float32), HOSTS, out, graph=np.stack([sources, targets]), edge_ids=True,
        edge_weights=rng.random(len(targets), np.float32), edge_times=rng.integers(0, 1000, len(targets)),
        split_topology=topology, overwrite=True, memory="2GiB",
    )  # fmt: skip
    return out


def run(workspace: Path, parts: list[Path], rounds: int) -> dict[str, Any]:
    """Of the first host, by options."""
    script, told = workspace / "hosts_sampling.child.py", workspace / "hosts-sampling.json"
    script.write_text(PROGRAM)
    said = [str(parts[0]), str(parts[1]), str(told), OPTIONS, rounds, BATCHES, SEEDS, FANOUTS]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={HOSTS}"]
    root = str(Path(featstore.__file__).parents[1])
    subprocess.run(
        [*words, str(script), json.dumps(said)], check=True, timeout=1200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root},
    )  # fmt: skip
    return json.loads(told.read_text())  # type: ignore[no-any-return]


@click.command()
@shared_options(size="1GiB", quick_size="64MiB", rounds=7)
def main(settings: Settings) -> None:
    """Milliseconds a mini-batch, of a host, over the whole topology and over split topology."""
    nodes = QUICK_NODES if settings.quick else NODES
    report = Report("hosts_sampling", "Sampling over hosts", {
        "nodes": nodes, "edges": DEGREE * nodes, "hosts": HOSTS, "seeds": SEEDS, "fanouts": FANOUTS,
        "batches": BATCHES, "rounds": settings.rounds,
    }, settings.workspace)  # fmt: skip
    note("a store split by 2 hosts, with the whole topology and without")
    parts = [split(settings.workspace, nodes, topology=topology) for topology in (False, True)]
    rows: list[list[Any]] = []
    for name, one in run(settings.workspace, parts, settings.rounds).items():
        whole, over, _, cores = (1000 * statistics.median(some) for some in (*one["seconds"], *one["cores"]))
        report.claims.append(Claim(f"sampling of split over that of whole topology, {name}", over / whole))
        rows.append([
            name, one["edges"], whole, over, cores, over / whole, one["nodes"], one["exchanges"],
            one["bytes"] / 1024,
        ])  # fmt: skip
    report.table(
        "A mini-batch of a host (medians of turns)",
        [
            "said", "edges", "whole topology, ms", "split, ms", "of a core, ms", "split over whole",
            "nodes asked of the other", "exchanges", "KiB from the other",
        ],
        rows,
    )  # fmt: skip
    report.notes.append(
        "Both hosts share two cores; what a core takes is of one host, who samples and serves the other. All "
        "lists, and what is kept of edges, are in memory."
    )
    for path in parts:
        remove(path)
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
