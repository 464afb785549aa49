"""``featstore split``: a store for each of several hosts, and the topology for all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SIZE, by_table, check_tables, json_option, settings, shared_options
from featstore_cli.output import facts, print_json, progress, seconds_text, show, table


@click.command("split")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--hosts", type=int, required=True, help="How many parts.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory of the parts; made if need be."
)
@click.option(
    "--train",
    multiple=True,
    metavar="[TABLE=]ARRAY",
    help="The store's array of training nodes, which are dealt out evenly, too.",
)
@click.option(
    "--halo-disk",
    metavar="SIZE|Nx",
    help="Copies of other hosts' rows in each part, at most: a size, or a multiple of the part's own rows.",
)
@click.option(
    "--split-topology",
    is_flag=True,
    help="Split graphs, too: each part has the lists of its own nodes, and the topology none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the partitioners.")
@click.option(
    "--memory", type=SIZE, default="1GiB", show_default=True, help="What the split may hold in memory."
)
@click.option("--resume", is_flag=True, help="Go on with a split that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace the split in --out.")
@json_option
@shared_options
def command(
    store: Path, hosts: int, out: Path, train: tuple[str, ...], halo_disk: str | None,
    split_topology: bool, seed: int, memory: int, resume: bool, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Split STORE by hosts, for training on several of them.

    OUT/topology has all graphs, unless they are split, small arrays, and for each node the number of its
    host; OUT/host-0 and so on have the rows of one host each, and the edges among them.
    """
    import featstore

    begin = time.perf_counter()
    with featstore.open(store) as opened:
        given: Any = by_table(train, "--train")
        check_tables(given, opened.tables, "--train")
        settings().packing, settings().what = out, "the split"
        with progress("splitting") as tell:
            featstore.split(
                opened, hosts, out, train=given.get(None, given or None), seed=seed, halo_disk=halo_disk,
                split_topology=split_topology, memory=memory, resume=resume, overwrite=overwrite,
                progress=lambda p: tell(f"{p.table}: {p.stage}", p.done_bytes, p.total_bytes),
            )  # fmt: skip
        settings().packing = None
    seconds = time.perf_counter() - begin
    data = describe_split(out, hosts) | {"seconds": seconds}
    if as_json:
        print_json("featstore.split/1", data)
    elif not settings().quiet:
        _show(data)


def describe_split(out: Path, hosts: int) -> dict[str, Any]:
    """A split as plain data, from its manifests alone."""
    import featstore

    with featstore.open(out / "topology") as topology:
        family, uuid = topology.manifest.family, topology.uuid
        assert family is not None
        whole = family.split_graphs or topology.graphs
        edges = {name: graph.edges for name, graph in whole.items()}
        topology_bytes = sum(f.bytes for f in topology.manifest.files)
    parts = []
    for host in range(hosts):
        with featstore.open(out / f"host-{host}") as part:
            parts.append(
                {
                    "host": host,
                    "uuid": part.uuid,
                    "bytes": sum(f.bytes for f in part.manifest.files),
                    "rows": {name: t.rows for name, t in part.tables.items()},
                    "edges": {name: g.edges for name, g in part.graphs.items()},
                    "halo": {name: part.manifest.arrays[f"{name}.halo_ids"].shape[0] for name in part.graphs},
                }
            )
    remote = {name: sum(counts) for name, counts in family.remote_edges.items()}
    return {
        "out": str(out),
        "uuid": uuid,
        "base_uuid": family.base_uuid,
        "hosts": hosts,
        "topology_bytes": topology_bytes,
        "split_topology": bool(family.split_graphs),
        "graphs": {name: {"edges": edges[name], "remote_edges": remote[name]} for name in edges},
        "parts": parts,
    }


def _show(data: dict[str, Any]) -> None:
    from featstore.units import format_bytes

    cut = []
    for name, g in data["graphs"].items():
        share = g["remote_edges"] / max(1, g["edges"])
        text = f"{g['remote_edges']:,} of {g['edges']:,} edges ({share:.1%}) join two hosts"
        cut.append((f"graph {name!r}", text))
    lines = [
        [f"host-{part['host']}", name, f"{rows:,}", *_of_graph(part, name), format_bytes(part["bytes"])]
        for part in data["parts"]
        for name, rows in part["rows"].items()
    ]
    show(
        table(["part", "table", "rows", "edges", "halo nodes", "part's files"], lines, left=2),
        facts(
            [
                ("split", f"{data['uuid']}, of {data['hosts']} hosts, in {seconds_text(data['seconds'])}"),
                *cut,
                ("topology", f"{format_bytes(data['topology_bytes'])}, for each host"),
            ]
        ),
    )


def _of_graph(part: dict[str, Any], name: str) -> list[str]:
    return [f"{part[what][name]:,}" if name in part[what] else "" for what in ("edges", "halo")]
