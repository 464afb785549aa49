"""DGL's mini-batches and graphs, looked at from outside; DGL is imported by whoever made one.

A data loader of DGL gives ``(input nodes, output nodes, blocks)``, or graphs of edges in place of the output
nodes. A block is the message flow graph of one layer; those of a mini-batch share their nodes: the targets of
one are the sources of the next, and the first of its own sources, so that the seeds are the first input
nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from featstore.errors import ArgumentError

_NAMES = {
    3: ("input_nodes", "output_nodes", "blocks"),
    4: ("input_nodes", "pair_graph", "neg_pair_graph", "blocks"),
}


def is_graph(value: Any) -> bool:
    """Whether a value is one of DGL's graphs or blocks."""
    dgl = sys.modules.get("dgl")
    return dgl is not None and isinstance(value, dgl.DGLGraph)


def named(batch: Any) -> dict[str, Any] | None:
    """A mini-batch of a data loader of DGL's with its parts by name: ``input_nodes`` and ``blocks``;
    ``output_nodes``, or ``pair_graph`` and, with negative edges, ``neg_pair_graph``; and ``batch_size`` where
    the output nodes are of one type. None where it is something else."""
    if not isinstance(batch, tuple | list) or len(batch) not in _NAMES or "dgl" not in sys.modules:
        return None
    blocks = batch[-1]
    if not (isinstance(blocks, tuple | list) and blocks and all(map(is_graph, blocks))):
        return None
    names = _NAMES[len(batch)]
    if is_graph(batch[1]):
        names = ("input_nodes", "pair_graph", *names[2:])
    found: dict[str, Any] = dict(zip(names, batch, strict=True))
    if not isinstance(found.get("output_nodes", {}), Mapping):
        found["batch_size"] = len(found["output_nodes"])
    return found


def is_named(sample: Any) -> bool:
    """Whether a sample is what :func:`named` made, here or before it was recorded."""
    return isinstance(sample, Mapping) and any(map(is_graph, sample.get("blocks", ())))


def on_device(sample: Any, device: Any) -> Any:
    """A sample of DGL's with its graphs, and the nodes that go with them, on a device of torch's."""
    if isinstance(sample, list):
        return [on_device(one, device) for one in sample]
    if isinstance(sample, Mapping):
        return {name: on_device(one, device) for name, one in sample.items()}
    return sample.to(device) if hasattr(sample, "to") else sample


# A graph as a tree of plain values and tensors, and back.


def problem_of(graph: Any) -> str | None:
    """Why a graph of DGL's would not come back as it is; None where it would."""
    module = sys.modules["dgl.heterograph"]
    if type(graph) not in (module.DGLGraph, module.DGLBlock):
        return f"is a {type(graph).__name__}"
    if graph.device.type != "cpu":
        return f"is a graph on {graph.device}"
    if not graph.is_block and graph.batch_size != 1:
        return f"is {graph.batch_size} graphs in one"
    # DGL 1.1 makes such blocks of graphs with ids of 32 bits, now and then
    return None if _edges_are_of_nodes(*tree_of(graph)) else "has edges of nodes that it has not"


def tree_of(graph: Any) -> list[Any]:
    """[sources or nodes by type, targets by type or None, edges by relation]; nodes are [how many, their
    data], edges [positions of sources, positions of targets, their data], in the order of the edges' ids."""
    edges = {
        relation: [*graph.edges(form="uv", order="eid", etype=relation), dict(graph.edges[relation].data)]
        for relation in graph.canonical_etypes
    }
    if not graph.is_block:
        return [{t: [graph.num_nodes(t), dict(graph.nodes[t].data)] for t in graph.ntypes}, None, edges]
    sources = {t: [graph.num_src_nodes(t), dict(graph.srcnodes[t].data)] for t in graph.srctypes}
    targets = {t: [graph.num_dst_nodes(t), dict(graph.dstnodes[t].data)] for t in graph.dsttypes}
    return [sources, targets, edges]


def built(tree: list[Any]) -> Any:
    """The graph of such a tree, which is not trusted. Raises ArgumentError, and what DGL raises; ImportError
    without DGL."""
    import dgl
    import torch

    nodes, targets, edges = tree
    for by_type in (nodes, targets or {}):
        for count, _ in by_type.values():
            if type(count) is not int or not 0 <= count <= np.iinfo(np.int64).max:
                raise ArgumentError("a number of nodes that is none")
    kinds = {one.dtype for u, v, _ in edges.values() for one in (u, v)}
    if len(kinds) > 1 or not kinds <= {torch.int32, torch.int64}:
        raise ArgumentError(f"edges of {sorted(map(str, kinds))}")
    if not _edges_are_of_nodes(nodes, targets, edges):
        raise ArgumentError("edges of nodes that there are not")
    data = {relation: (u, v) for relation, (u, v, _) in edges.items()}
    counts, end_counts = ({t: n for t, (n, _) in by_type.items()} for by_type in (nodes, targets or {}))
    idtype = kinds.pop() if kinds else torch.int64
    if targets is None:
        graph = dgl.heterograph(data, counts, idtype=idtype)
        _fill(graph.nodes, nodes)
    else:
        graph = dgl.create_block(data, counts, end_counts, idtype=idtype)
        _fill(graph.srcnodes, nodes)
        _fill(graph.dstnodes, targets)
    _fill(graph.edges, edges)
    return graph


def _edges_are_of_nodes(nodes: Any, targets: Any, edges: Any) -> bool:
    ends = nodes if targets is None else targets
    return all(
        one.dim() == 1 and len(u) == len(v) and (not len(one) or 0 <= one.min() <= one.max() < count)
        for (source, _, target), (u, v, _) in edges.items()
        for one, count in ((u, nodes[source][0]), (v, ends[target][0]))
    )


def _fill(view: Any, by_type: Mapping[Any, list[Any]]) -> None:
    for name, (*_, data) in by_type.items():
        if data:
            view[name].data.update(data)
