"""``featstore sample``: mini-batches sampled from a store's graph into a trace; and what ``inspect`` and
``verify`` say of traces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from featstore.base.environment import MEMORY
from featstore_cli.options import SIZE, json_option, read_ids, settings, shared_options
from featstore_cli.output import facts, print_json, progress, rate_text, seconds_text, show, table


class Fanouts(click.ParamType):  # type: ignore[type-arg]
    """Neighbours per node and hop: ``10,5``."""

    name = "fanouts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} are no fan-outs; write for example 10,5", param, ctx)
        if any(fanout < -1 for fanout in found):
            self.fail("a fan-out is a number of neighbours, or -1 for all", param, ctx)
        return found


@click.command("sample", context_settings={"show_default": True})
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="TRACE", type=click.Path(path_type=Path), required=True, help="Where the trace goes."
)
@click.option(
    "--fanouts",
    metavar="N,N...",
    type=Fanouts(),
    required=True,
    help="Neighbours per node, hop by hop; -1 takes all.",
)
@click.option("--batch-size", type=click.IntRange(1), default=1024, help="Training nodes of a mini-batch.")
@click.option(
    "--train",
    metavar="NAME|FILE",
    required=True,
    help="Training nodes: an array of the store, a .npy file, or text.",
)
@click.option(
    "--epochs", type=click.IntRange(1), default=1, help="Times that all training nodes are gone through."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of their order and of the neighbours."
)
@click.option(
    "--graph", metavar="NAME", help="The graph, where the store has several, or tables of several types."
)
@click.option(
    "--memory", type=SIZE, default=MEMORY, help="Memory for the graph, or for reading it from disk."
)
@click.option(
    "--in-memory/--from-disk",
    default=None,
    help="Where the graph is while it is sampled.  [default: in memory if it fits]",
)
@click.option("--resume", is_flag=True, help="Go on with the unfinished recording in TRACE.")
@click.option("--overwrite", is_flag=True, help="Replace the trace in TRACE.")
@json_option
@shared_options
def command(
    store: Path, out: Path, fanouts: tuple[int, ...], batch_size: int, train: str, epochs: int, seed: int,
    graph: str | None, memory: int, in_memory: bool | None, resume: bool, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Sample mini-batches from the graph in STORE, and record them as a trace.

    \b
    featstore sample store --out store.trace --fanouts 10,5 --batch-size 1024 --train train
    featstore pack store --trace store.trace

    The same seed gives the same trace, to the byte, wherever the graph is. A recording that was stopped goes
    on with --resume.
    """
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite contradict each other")
    import featstore
    from featstore.sampling.batches import fingerprint_of, open_sampler
    from featstore.sampling.recorded_epochs import RecordedEpochs
    from featstore.sampling.stored import StoredSampler
    from featstore.trace.trace import Trace

    begin = time.perf_counter()
    with featstore.open(store) as opened, progress("reading the graph", unit="steps") as tell:
        nodes, chosen = train_nodes(opened, train), chosen_graph(opened, graph)
        sampler = open_sampler(
            opened, fanouts, seed=seed, graph=chosen.name, memory=memory, in_memory=in_memory
        )
        try:
            settings().packing, settings().what = out, "the recording"
            trace = Trace.record(
                RecordedEpochs(sampler, nodes, batch_size, epochs),
                out,
                drop=(),
                resume=resume,
                overwrite=overwrite,
                fingerprint=fingerprint_of(opened, chosen, sampler, nodes, batch_size, epochs),
                progress=lambda p: tell("sampling", p.done_batches, p.total_batches),
            )
            settings().packing = None
        finally:
            if isinstance(sampler, StoredSampler):
                sampler.close()
    seconds = time.perf_counter() - begin
    with trace:
        data = describe_trace(trace)
    if as_json:
        where = {"in_memory": not isinstance(sampler, StoredSampler), "seconds": seconds}
        print_json("featstore.sample/1", data | where)
    elif not settings().quiet:
        show(render_trace(data), f"sampled in {seconds_text(seconds)} ({rate_text(data['bytes'] / seconds)})")


def train_nodes(store: Any, text: str) -> Any:
    if text in store.arrays:
        return store.arrays[text]
    if Path(text).is_file():
        return read_ids(Path(text))
    known = ", ".join(store.arrays) or "none"
    raise click.BadParameter(
        f"the store has no array {text!r}, and there is no such file; it has {known}", param_hint="--train"
    )


def chosen_graph(store: Any, name: str | None) -> Any:
    known = ", ".join(map(repr, store.graphs)) or "none"
    if name is not None and name not in store.graphs:
        raise click.BadParameter(f"the store has no graph {name!r}; it has {known}", param_hint="--graph")
    if name is None and len(store.graphs) > 1:
        raise click.UsageError(f"the store has {len(store.graphs)} graphs; say which with --graph: {known}")
    from featstore.storage.relations import graph_of

    return graph_of(store, name)


# Looking at traces.


def describe_trace(trace: Any) -> dict[str, Any]:
    """A finished trace as plain data."""
    return {
        "trace": str(trace.path),
        "complete": True,
        "uuid": trace.uuid,
        "batches": len(trace),
        "node_types": {
            name: _counts(trace.counts[name]) | {"id_max": trace.id_max[name]} for name in trace.node_types
        },
        "sample_bytes": sum(trace.sample_sizes),
        "bytes": trace.bytes,
        "drop": list(trace.drop),
        "fingerprint": trace.fingerprint,
    }


def _counts(counts: Any) -> dict[str, Any]:
    import numpy as np

    return {
        "ids": int(counts.sum()),
        "ids_per_batch": {
            "min": int(counts.min()),
            "median": int(np.median(counts)),
            "max": int(counts.max()),
        },
    }


def render_trace(data: dict[str, Any]) -> Any:
    """A described trace, for people."""
    from featstore.units import format_bytes

    rows = [
        (
            "trace",
            data["trace"]
            + (f" ({data['uuid']})" if data["complete"] else ": unfinished; go on with --resume"),
        )
    ]
    rows.append(("  mini-batches", f"{data['batches']:,}, {format_bytes(data['bytes'])}"))
    if data["complete"]:
        rows.append(("  samples", format_bytes(data["sample_bytes"])))
    for name, seen in data.get("node_types", {}).items():
        low, middle, high = (f"{seen['ids_per_batch'][k]:,}" for k in ("min", "median", "max"))
        what = f"node ids of {name!r}" if name else "node ids"
        rows.append(
            (
                f"  {what}",
                f"{seen['ids']:,}; in a mini-batch {low} to {high}, median {middle}; largest id "
                f"{seen['id_max']:,}",
            )
        )
    if data.get("drop"):
        rows.append(("  left out", ", ".join(data["drop"])))
    rows += [(f"  {key}", str(value)) for key, value in data["fingerprint"].items()]
    return facts(rows)


def inspect_trace(path: Path, as_json: bool) -> None:
    """What ``inspect`` shows of a trace, finished or not."""
    from featstore.trace.log_file import TRACE_NAME, how_far
    from featstore.trace.trace import Trace

    if (path / TRACE_NAME).exists():
        with Trace(path) as trace:
            data = describe_trace(trace)
    else:
        far = how_far(path)
        data = {
            "trace": str(path.absolute()),
            "complete": False,
            "uuid": None,
            "batches": far.batches,
            "bytes": far.bytes,
            "fingerprint": far.fingerprint,
        }
    if as_json:
        print_json("featstore.inspect-trace/1", data)
    else:
        show(render_trace(data))


def verify_trace_at(path: Path, buffered: bool, as_json: bool) -> bool:
    """What ``verify`` does with a trace; returns whether it is sound."""
    from featstore.scrub.trace import verify_trace

    begin = time.perf_counter()
    with progress("verifying") as tell:
        report = verify_trace(
            path,
            progress=lambda p: tell("verifying", p.done_bytes, p.total_bytes),
            access="buffered" if buffered else "direct",
        )
    seconds = time.perf_counter() - begin
    if as_json:
        print_json("featstore.verify-trace/1", report.to_dict() | {"seconds": seconds})
        return report.ok
    if report.problems:
        rows = [
            [
                "" if p.batch is None else f"{p.batch:,}",
                "" if p.offset is None else f"{p.offset:,}",
                p.expected,
                p.actual,
            ]
            for p in report.problems
        ]
        show(table(["mini-batch", "byte", "expected", "found"], rows, left=4))
    if not (settings().quiet and report.ok):
        summary = str(report).splitlines()[0]
        show(
            summary, f"in {seconds_text(seconds)}, {rate_text(report.bytes / seconds)}, {report.access} reads"
        )
    return report.ok
