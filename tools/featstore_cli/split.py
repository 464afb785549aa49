"""``featstore split``: a store for each of several hosts, and the topology for all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SIZE, by_table, check_tables, json_option, settings, shared_options
from featstore_cli.output import facts, print_json, progress, seconds_text, show, table
from featstore_cli.pack import array_at, array_paths
from featstore_cli.pack_request import PackRequest


@click.command("split")
@click.argument("store", type=click.Path(path_type=Path), required=False)
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
@click.option(
    "--features", metavar="[TABLE=]PATH", multiple=True, help="In place of STORE: rows, as of pack."
)
@click.option(
    "--nodes", metavar="TABLE=N", multiple=True, help="With --features: a type of N nodes without features."
)
@click.option(
    "--graph",
    metavar="[TABLE=]PATH",
    multiple=True,
    help="With --features: the table's graph. Of an edge type A__RELATION__B=PATH.",
)
@click.option(
    "--array", metavar="NAME=PATH[:KEY]", multiple=True, help="With --features: a small array to keep."
)
@click.option("--order", metavar="[TABLE=]METHOD", multiple=True, help="With --features: order of rows.")
@click.option("--partitions", metavar="[TABLE=]N", multiple=True, help="With --features: parts of the order.")
@click.option("--graph-key", metavar="[TABLE=]KEY", multiple=True, help="With --graph: as of pack.")
@click.option(
    "--edge-ids/--no-edge-ids", default=None, help="With --graph: keep the number of each edge, as of pack."
)
@click.option(
    "--edge-weights", metavar="[GRAPH=]PATH[:COLUMN]", multiple=True, help="With --graph: as of pack."
)
@click.option(
    "--edge-times", metavar="[GRAPH=]PATH[:COLUMN]", multiple=True, help="With --graph: as of pack."
)
@click.option("--raw-dtype", metavar="[TABLE=]DTYPE", multiple=True, help="With --features: as of pack.")
@click.option("--shape", metavar="[TABLE=]SHAPE", multiple=True, help="With --features: as of pack.")
@click.option("--offset", metavar="[TABLE=]BYTES", multiple=True, help="With --features: as of pack.")
@click.option("--key", metavar="[TABLE=]KEY", multiple=True, help="With --features: as of pack.")
@click.option("--columns", metavar="[TABLE=]A,B,...", multiple=True, help="With --features: as of pack.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the partitioners.")
@click.option(
    "--memory", type=SIZE, default="1GiB", show_default=True, help="What the split may hold in memory."
)
@click.option("--resume", is_flag=True, help="Go on with a split that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace the split in --out.")
@json_option
@shared_options
def command(
    store: Path | None, hosts: int, out: Path, train: tuple[str, ...], as_json: bool,
    halo_disk: str | None, split_topology: bool, seed: int, memory: int, resume: bool, overwrite: bool,
    edge_ids: bool | None, **given: tuple[str, ...],
) -> None:  # fmt: skip
    """Split STORE by hosts, for training on several of them; or, without a store, --features and --graph.

    OUT/topology has all graphs, unless they are split, small arrays, and for each node the number of its
    host; OUT/host-0 and so on have the rows of one host each, and the edges among them.
    """
    if (store is None) != bool(given["features"]):
        raise click.UsageError("give a STORE to split, or --features, and not both")
    begin = time.perf_counter()
    options: dict[str, Any] = {
        "seed": seed, "halo_disk": halo_disk, "split_topology": split_topology, "memory": memory,
        "resume": resume, "overwrite": overwrite,
    }  # fmt: skip
    names = by_table(train, "--train")
    if None in names and len(names) > 1:
        raise click.UsageError(
            "--train NAME says the nodes of all, --train TYPE=NAME of one type: give one form"
        )
    with progress("splitting") as tell:
        options["progress"] = lambda p: tell(f"{p.table}: {p.stage}", p.done_bytes, p.total_bytes)
        if store is None:
            options["edge_ids"] = edge_ids
            _split_features(given, names, hosts, out, options)
        else:
            for name in (name for name, values in given.items() if values):
                raise click.UsageError(f"--{name.replace('_', '-')} is of --features, and STORE is given")
            if edge_ids is not None:
                raise click.UsageError("--edge-ids and --no-edge-ids are of --features, and STORE is given")
            _split_store(store, names, hosts, out, options)
    settings().packing = None
    seconds = time.perf_counter() - begin
    data = describe_split(out, hosts) | {"seconds": seconds}
    if as_json:
        print_json("featstore.split/1", data)
    elif not settings().quiet:
        _show(data)


def _split_store(
    store: Path, train: dict[str | None, Any], hosts: int, out: Path, options: dict[str, Any]
) -> None:
    import featstore

    with featstore.open(store) as opened:
        check_tables(train, opened.tables, "--train")
        settings().packing, settings().what = out, "the split"
        featstore.split(opened, hosts, out, train=train.get(None, train or None), **options)


def _split_features(
    given: dict[str, tuple[str, ...]], train: dict[str | None, Any], hosts: int, out: Path,
    options: dict[str, Any],
) -> None:  # fmt: skip
    import featstore

    paths = ("features", "graph", "edge_weights", "edge_times")
    names = (*given, "permutation", "dtype", "cast", "id", "train", "node_keys")  # those of a pack alone, too
    asked = PackRequest(
        {n: by_table(given.get(n, ()), f"--{n.replace('_', '-')}", is_path=n in paths) for n in names}
    )
    asked.check()
    if asked.data_set is None:
        check_tables(train, asked.features, "--train")
    arrays = {name: array_at(name, path) for name, path in array_paths(asked.values["array"]).items()}
    settings().packing, settings().what = out, "the split"
    featstore.split_features(
        asked.features if asked.data_set is None else asked.data_set,
        hosts,
        out,
        arrays=arrays,
        train=train.get(None, train or None),
        **asked.options(),
        **options,
    )


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
        [f"host-{part['host']}", name, *_numbers(part, name), format_bytes(part["bytes"])]
        for part in data["parts"]
        for name in dict.fromkeys([*part["rows"], *part["edges"]])
    ]
    show(
        table(["part", "table or graph", "rows", "edges", "halo nodes", "part's files"], lines, left=2),
        facts(
            [
                ("split", f"{data['uuid']}, of {data['hosts']} hosts, in {seconds_text(data['seconds'])}"),
                *cut,
                ("topology", f"{format_bytes(data['topology_bytes'])}, for each host"),
            ]
        ),
    )


def _numbers(part: dict[str, Any], name: str) -> list[str]:
    return [f"{part[what][name]:,}" if name in part[what] else "" for what in ("rows", "edges", "halo")]
