"""Demo of mega-batches: the same graph and model as in :mod:`featstore.demo.runner`, trained by random collections of
partitions from the store, and by ordinary neighbour sampling from memory.

The two cannot give the same losses: a mega-batch draws its mini-batches from the partitions in memory, and neighbours in
other partitions are not there, but for the hubs. What is compared is where that leads: the accuracy on the same test nodes,
with neighbours sampled from the whole graph in both. See :data:`featstore.demo.mega_report.TOLERANCE` for what counts as equal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from featstore.demo import runner
from featstore.demo.graph import DemoGraph, GraphRecipe
from featstore.demo.mega_report import MegaReport, MegaRunReport
from featstore.demo.worker import Job
from featstore.units import parse_bytes

__all__ = ["run_mega"]

#: Partitions are so small that about this many would fill the budget (of which half is for those that are loading). Most
#: partitions are of few classes: it takes many for a mega-batch to have its share of each, without which training suffers.
_PARTITIONS_PER_BUDGET = 512
_PARTITIONS_MIN = 16
_PARTITION_NODES_MIN = 50
#: The made-up graph is random within its classes, so that no order keeps most neighbours together; hubs make up for it.
_HUB_SHARE = 0.05
_VAL_COUNT_MAX, _TEST_COUNT_MAX = 1000, 4000


def run_mega(
    *,
    memory: str | int = "96MiB",
    data: str | os.PathLike[str] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    fanouts: Sequence[int] | None = None,
    hidden: int = 64,
    seed: int = 0,
    engine: str | None = None,
    recipe: GraphRecipe | None = None,
    resident: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> MegaReport:
    """Pack a graph with its topology, train by mega-batches and from memory, and compare.

    ``memory``: the loader's budget, and then that of the reader that evaluates. ``resident``: partitions in a mega-batch, by
    default as many as fit. The other arguments are those of :func:`featstore.demo.run`, and so are the errors.
    """
    runner._need_packages()
    memory_bytes = parse_bytes(memory)
    tell = progress if progress is not None else runner._no_progress
    began = time.perf_counter()
    with ExitStack() as stack:
        parent = runner._parent(workdir)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="featstore-demo-", dir=parent)))
        store_path = scratch / "store" if workdir is None else Path(workdir) / "store"
        graph, generate_seconds = runner._prepare(data, recipe, seed, scratch, tell)
        plan, counts = runner._training_plan(graph, epochs, batch_size, fanouts, hidden, seed)
        counts["val_count"] = min(counts["val_count"], _VAL_COUNT_MAX)
        counts["test_count"] = min(counts["test_count"], _TEST_COUNT_MAX)
        plan = replace(plan, val_count=counts["val_count"], test_count=counts["test_count"])
        pack_seconds = runner._pack(
            graph,
            store_path,
            tell,
            topology=True,
            partitions=_partitions(graph, memory_bytes),
            hubs=_HUB_SHARE,
            seed=seed,
        )
        options = {} if resident is None else {"resident": resident}
        method, edge_cut = _probe(store_path, memory_bytes, engine, options)
        job = Job(
            plan, str(scratch), str(graph.features.absolute()), str(store_path), memory_bytes, engine, mega=options
        )
        by_mega = runner._in_own_process(job, scratch, "mega", tell)
        from_memory = runner._in_own_process(replace(job, store=None, mega=None), scratch, "memory", tell)
        return MegaReport(
            graph=graph.name,
            node_count=graph.node_count,
            edge_count=len(graph.indices),
            class_count=graph.class_count,
            row_bytes=graph.row_bytes,
            table_bytes=graph.row_bytes * graph.node_count,
            memory_bytes=memory_bytes,
            epochs=plan.epochs,
            batch_size=plan.batch_size,
            fanouts=plan.fanouts,
            hidden=plan.hidden,
            seed=seed,
            generate_seconds=generate_seconds,
            pack_seconds=pack_seconds,
            order=method,
            edge_cut=edge_cut,
            store_bytes=sum(path.stat().st_size for path in store_path.rglob("*") if path.is_file()),
            store_path=None if workdir is None else str(store_path),
            mega=_mega_report(by_mega),
            memory=runner._run_report(from_memory),
            mlp_test_accuracy=from_memory["mlp_test_accuracy"],
            seconds=time.perf_counter() - began,
            **counts,
        )


def _partitions(graph: DemoGraph, memory_bytes: int) -> int:
    wanted = _PARTITIONS_PER_BUDGET * graph.row_bytes * graph.node_count // memory_bytes
    return max(min(_PARTITIONS_MIN, graph.node_count), min(wanted, graph.node_count // _PARTITION_NODES_MIN))


def _probe(path: Path, memory_bytes: int, engine: str | None, options: dict[str, Any]) -> tuple[str, float | None]:
    """Open a loader and a reader here first, for the errors' sake; returns the order of the rows and its edge cut."""
    import featstore

    chosen: dict[str, Any] = {} if engine is None else {"engine": engine}
    with featstore.open(path) as store:
        store.mega_batches(memory=memory_bytes, train="train_idx", **chosen, **options).close()
        store.reader(memory=memory_bytes, static="degree", **chosen).close()
        order = store.tables["features"].entry.order
        cut = order.parameters.get("edge_cut")
        return order.method, float(cut) if isinstance(cut, int | float) else None


def _mega_report(results: dict[str, Any]) -> MegaRunReport:
    given: dict[str, Any] = {field.name: results[field.name] for field in fields(MegaRunReport)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return MegaRunReport(**given)
