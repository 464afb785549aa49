"""Demo of mega-batches: the same graph and model as in :mod:`featstore_demo.runner`, trained by random
collections of partitions from the store, and by ordinary neighbour sampling from memory.

The two cannot give the same losses: a mega-batch draws its mini-batches from the partitions in memory, and
neighbours in other partitions are not there, but for the hubs. What is compared is where that leads: the
accuracy on the same test nodes, with neighbours sampled from the whole graph in both. See
:data:`featstore_demo.mega_report.TOLERANCE` for what counts as equal.
"""

from __future__ import annotations

from typing import Any

from featstore_demo.graph import DemoGraph
from featstore_demo.mega_report import MegaReport, MegaRunReport
from featstore_demo.runner import Comparison, prepared

__all__ = ["run_mega"]

#: Partitions are so small that about this many would fill the budget (of which half is for those that are
#: loading). Most partitions are of few classes: it takes many for a mega-batch to have its share of each,
#: without which training suffers.
_PARTITIONS_PER_BUDGET = 512
_PARTITIONS_MIN = 16
_PARTITION_NODES_MIN = 50
#: The made-up graph is random within its classes, so that no order keeps most neighbours together; hubs make
#: up for it.
_HUB_SHARE = 0.05
_EVALUATED_MAX = (1000, 4000)


def run_mega(
    *, memory: str | int = "96MiB", seed: int = 0, resident: int | None = None, **options: Any
) -> MegaReport:
    """Pack a graph with its topology, train by mega-batches and from memory, and compare.

    ``memory``: the loader's budget, and then that of the reader that evaluates. ``resident``: partitions in a
    mega-batch, by default as many as fit. The other options are those of
    :func:`featstore_demo.runner.prepared`, and the errors those of :func:`featstore_demo.run`.
    """
    of_loader = {} if resident is None else {"resident": resident}
    with prepared(memory, _EVALUATED_MAX, seed=seed, **options) as demo:
        partitions = _partitions(demo.graph, demo.memory_bytes)
        pack_seconds = demo.pack(topology=True, partitions=partitions, hubs=_HUB_SHARE, seed=seed)
        method, edge_cut = _probe(demo, of_loader)
        by_mega, from_memory = demo.train("mega", of_loader)
        facts = demo.facts(pack_seconds, from_memory)
        return MegaReport(order=method, edge_cut=edge_cut, mega=MegaRunReport.of(by_mega), **facts)


def _partitions(graph: DemoGraph, memory_bytes: int) -> int:
    wanted = _PARTITIONS_PER_BUDGET * graph.row_bytes * graph.node_count // memory_bytes
    return max(min(_PARTITIONS_MIN, graph.node_count), min(wanted, graph.node_count // _PARTITION_NODES_MIN))


def _probe(demo: Comparison, options: dict[str, Any]) -> tuple[str, float | None]:
    """Open a loader and a reader here first, for the errors' sake; returns the order of the rows and its edge
    cut."""
    import featstore
    from featstore.loaders.mega.loader import PartitionsLoader

    with featstore.open(demo.store_path) as store:
        fanouts, batch_size = demo.plan.fanouts, demo.plan.batch_size
        PartitionsLoader(
            store, fanouts, batch_size=batch_size, train="train_idx", **demo.budget(), **options
        ).close()
        store.reader(static="degree", **demo.budget()).close()
        order = store.tables["features"].entry.order
        cut = order.parameters.get("edge_cut")
        return order.method, float(cut) if isinstance(cut, int | float) else None
