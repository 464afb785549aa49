"""``featstore pack``: files in, a store out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore_cli.compiled import check_alone, compile_command, trace_options
from featstore_cli.options import (
    SIZE,
    by_table,
    json_option,
    settings,
    shared_options,
)
from featstore_cli.output import facts, print_json, progress, rate_text, seconds_text, show
from featstore_cli.pack_request import CASTS, ORDERS, PackRequest, flag_of

_HUB_RANKS = ("degree", "external")
_PATHS = ("features", "graph", "permutation", "node_keys", "edge_weights", "edge_times")


@click.command("pack", context_settings={"show_default": True, "allow_extra_args": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--features",
    metavar="[TABLE=]PATH",
    multiple=True,
    help="Rows: .npy .npz .zarr .parquet .pt .csv, OGB, raw.",
)
@click.option(
    "--nodes", metavar="TABLE=N", multiple=True, help="A type of N nodes without features, of a typed graph."
)
@click.option(
    "--graph",
    metavar="[TABLE=]PATH",
    multiple=True,
    help="The table's graph: .npz .npy .csv .parquet .pt, OGB. Of an edge type A__RELATION__B=PATH.",
)
@click.option(
    "--array",
    "--arrays",
    "array",
    metavar="NAME=PATH[:KEY]",
    multiple=True,
    help="A small array to keep: .npy, or a member of .npz or .pt.",
)
@click.option(
    "--order",
    metavar="[TABLE=]METHOD",
    multiple=True,
    default=["auto"],
    help=f"Order of rows: {', '.join(ORDERS)}.",
)
@click.option("--permutation", metavar="[TABLE=]FILE.npy", multiple=True, help="Node ids in row order.")
@click.option(
    "--partitions",
    metavar="[TABLE=]N",
    multiple=True,
    help="Parts that partitioners make.  [default: by size]",
)
@click.option(
    "--train",
    metavar="[TABLE=]NAME",
    multiple=True,
    help="The --array of training nodes, which order bfs spreads evenly.",
)
@click.option(
    "--dtype",
    metavar="[TABLE=]DTYPE",
    multiple=True,
    help="Cast to this; with --shape and a headless file, the file's own.",
)
@click.option("--cast", metavar="[TABLE=]DTYPE", multiple=True, help=f"Cast to {', '.join(CASTS)}.")
@click.option(
    "--raw-dtype",
    metavar="[TABLE=]DTYPE",
    multiple=True,
    help="A headless file's own dtype, such as float32 or '>f8'.",
)
@click.option(
    "--shape",
    metavar="[TABLE=]SHAPE",
    multiple=True,
    help="The table's shape, such as -1,128; a headless file needs it.",
)
@click.option("--offset", metavar="[TABLE=]BYTES", multiple=True, help="Where a headless file's rows begin.")
@click.option("--key", metavar="[TABLE=]KEY", multiple=True, help="The member of an .npz, zarr or .pt.")
@click.option(
    "--columns",
    metavar="[TABLE=]A,B,...",
    multiple=True,
    help="The columns of Parquet, Arrow or .csv that are features; * for all.",
)
@click.option(
    "--id",
    metavar="[TABLE=]COLUMN",
    multiple=True,
    help="Their column of node ids, by which rows are placed.",
)
@click.option(
    "--node-keys",
    metavar="[TABLE=]id|PATH",
    multiple=True,
    help="What nodes are known by: the column of --id, or .npy .parquet .txt.",
)
@click.option(
    "--graph-key", metavar="[TABLE=]KEY", multiple=True, help="The member or columns with the edges."
)
@click.option(
    "--edge-weights", metavar="[GRAPH=]PATH[:COLUMN]", multiple=True, help="A weight for each edge."
)
@click.option(
    "--edge-times",
    metavar="[GRAPH=]PATH[:COLUMN]",
    multiple=True,
    help="A time for each edge, by which lists ascend.",
)
@click.option(
    "--topology/--no-topology",
    default=True,
    help="Store the graphs too: 4 or 8 bytes an edge. Without --graph: nothing.",
)
@click.option(
    "--edge-ids/--no-edge-ids",
    default=None,
    help="Keep the number of each edge, too: 4 or 8 bytes.  [default: where there is a table of edges]",
)
@click.option(
    "--hubs",
    type=click.FloatRange(0, 1),
    default=0.01,
    help="Share of the nodes whose lists of neighbours are stored twice, side by side.",
)
@click.option("--hub-rank", type=click.Choice(_HUB_RANKS), default="degree", help="Which nodes those are.")
@click.option("--memory", type=SIZE, default="1GiB", help="Memory that the pack may use.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the partitioners.")
@click.option("--resume", is_flag=True, help="Go on with the unfinished pack in OUT.")
@click.option("--overwrite", is_flag=True, help="Replace the store in OUT.")
@trace_options
@json_option
@shared_options
def command(
    out: Path, topology: bool, edge_ids: bool | None, hubs: float, hub_rank: str, memory: int, seed: int,
    resume: bool, overwrite: bool, as_json: bool, trace: Path | None, name: str | None, disk: str | None,
    train_memory: int | None, cache: int | None, device_memory: int | None, residency: str | None,
    dry_run: bool, **given: tuple[str, ...],
) -> None:  # fmt: skip
    """Pack features into the store OUT, or with --trace, lay out its rows for the mini-batches of a trace.

    \b
    featstore pack store --features feat.npy --graph edges.npy --array y=labels.npy
    featstore pack store --features paper=p.npy --features author=a.npz --key author=x
    featstore pack store --features feat.bin --raw-dtype float32 --shape -1,128 --cast float16
    featstore pack store --features papers.parquet --id paper_id
    featstore pack store --features paper=p.npy --nodes author=5000 --graph author__writes__paper=w.npy
    featstore pack store --features papers.parquet --id doi --node-keys id --graph cites.csv
    featstore pack store --trace mini-batches.trace --memory 1GiB --disk 3x

    Paths may hold a '='; a path that exists as it is written is taken as such. A pack that was stopped goes
    on with --resume.
    """
    _check_one_argument(out, click.get_current_context().args)
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite contradict each other")
    own = {
        "name": name,
        "disk": disk,
        "train_memory": train_memory,
        "cache": cache,
        "device_memory": device_memory,
        "residency": residency,
        "dry_run": dry_run,
    }
    check_alone(trace, own, given)
    if trace is not None:
        compile_command(
            out, trace, own, memory=memory, seed=seed, resume=resume, overwrite=overwrite, as_json=as_json
        )
        return
    values = {name: by_table(texts, flag_of(name), is_path=name in _PATHS) for name, texts in given.items()}
    begin = time.perf_counter()
    plan = PackRequest(values)
    plan.check()
    import featstore

    arrays = {name: array_at(name, path) for name, path in array_paths(values["array"]).items()}
    train = plan.train(arrays)
    with progress("starting") as tell:
        settings().packing = out
        store = featstore.pack(
            out,
            plan.features if plan.data_set is None else plan.data_set,
            arrays=arrays,
            **plan.options(),
            memory=memory,
            seed=seed,
            train=train,
            topology=topology,
            edge_ids=edge_ids,
            hubs=hubs,
            hub_rank=hub_rank,
            resume=resume,
            overwrite=overwrite,
            progress=lambda p: tell(f"{p.table}: {p.stage}", p.done_bytes, p.total_bytes),
        )
    settings().packing = None
    with store:
        _report(store, time.perf_counter() - begin, as_json)


def _check_one_argument(out: Path, others: list[str]) -> None:
    """Who gives the files as arguments, as other commands take them, is told by which option they go."""
    if not others:
        return
    given = [str(out), *others]
    files = [path for path in given if Path(path).is_file()]
    made = next((path for path in given if path not in files), "OUT")
    raise click.UsageError(
        f"the one argument is the store to make, but there are {', '.join(map(repr, given))}; files go by "
        f"options, as in: featstore pack {made} --features {files[0] if files else 'x.npy'}"
    )


def array_paths(given: dict[str | None, str]) -> dict[str, str]:
    if None in given:
        raise click.BadParameter(
            f"{given[None]!r} has no name; write for example --array y=labels.npy", param_hint="--array"
        )
    return {str(name): path for name, path in given.items()}


def array_at(name: str, text: str) -> Any:
    """The array that ``PATH`` or ``PATH:KEY`` names."""
    import numpy as np

    from featstore.base.files import load_given
    from featstore.errors import SourceError

    path, key = Path(text), None
    if not path.exists() and ":" in text:
        path, key = Path(text.rpartition(":")[0]), text.rpartition(":")[2]
    if path.suffix.lower() in (".pt", ".pth"):
        from featstore.packing.sources.arrays import tensor_to_numpy
        from featstore.packing.sources.foreign import load_tensor

        return tensor_to_numpy(load_tensor(path, key)[0], str(path))
    try:
        loaded = load_given(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SourceError(f"cannot read array {name!r} from {path}: {reason}") from None
    if isinstance(loaded, np.ndarray):
        if key is not None:
            raise SourceError(f"{path} holds one array, no {key!r}; leave the key out")
        return loaded
    with loaded:
        if key is None and len(loaded.files) == 1:
            key = loaded.files[0]
        if key not in loaded.files:
            raise SourceError(
                f"array {name!r}: {path} holds {', '.join(loaded.files)}; name one: --array "
                f"{name}={path}:{loaded.files[0]}"
            )
        try:
            return loaded[key]
        except ValueError as error:
            raise SourceError(f"cannot read array {name!r} from {path}: {error}") from None


def _report(store: Any, seconds: float, as_json: bool) -> None:
    from featstore_cli.describe import describe_store, render_arrays, render_graph, render_keys, render_table

    data = describe_store(store)
    packed = sum(t["bytes"] for t in data["tables"].values())
    if as_json:
        print_json("featstore.pack/1", data | {"seconds": seconds, "bytes_per_second": packed / seconds})
        return
    if settings().quiet:
        return
    sources = data["provenance"]["sources"]
    show(*(render_table(name, t, sources.get(name)) for name, t in data["tables"].items()))
    show(*(render_keys(name, keys) for name, keys in data["keys"].items()))
    show(*(render_graph(name, g) for name, g in data["graphs"].items()))
    if data["arrays"]:
        show(render_arrays(data["arrays"]))
    show(
        facts(
            [
                (
                    "store",
                    f"{data['store']} ({data['uuid']}), packed in {seconds_text(seconds)} "
                    f"({rate_text(packed / seconds)})",
                )
            ]
        )
    )
