"""Scrubbing what a part has of graphs that are split: whole lists of its own nodes."""

from __future__ import annotations

import numpy as np

from featstore.scrub.graph import scrub_graph
from featstore.scrub.numbers import Numbers
from featstore.scrub.report import Findings
from featstore.scrub.tables import scrub_metadata
from featstore.storage.manifest import FamilyEntry, FileEntry, SplitGraphEntry


def scrub_whole_lists(findings: Findings, entries: dict[str, FileEntry], family: FamilyEntry) -> None:
    """Report what is wrong with the lists of a part: as of a graph whose sources are all nodes, and where the
    runs of rows begin."""
    for graph in family.split_graphs.values():
        if graph.lists is None:
            continue
        rows, sources = (family.first_rows[n][-1] for n in (graph.table, graph.as_graph.table_of_sources))
        scrub_graph(findings, graph.as_graph, rows, sources, graph.edges)
        for array in (graph.lists.run_rows, graph.lists.run_edges):
            scrub_metadata(findings, entries, array.path, array.shape, array.shape, array.dtype)
        _scrub_runs(findings, graph)


def _scrub_runs(findings: Findings, graph: SplitGraphEntry) -> None:
    assert graph.lists is not None
    rows, edges = (Numbers(findings.store, one) for one in (graph.lists.run_rows, graph.lists.run_edges))
    if not all(map(findings.intact, [*rows.paths, *edges.paths])):
        return
    last = -1
    for first, values in rows.pieces():
        falls = np.flatnonzero(np.diff(values, prepend=last) <= 0)
        if first == 0 and len(values) and values[0] != 0:
            falls = np.zeros(1, np.int64)
        for at in [*falls[:1].tolist(), *np.flatnonzero(values >= graph.lists.offsets.rows - 1)[:1].tolist()]:
            path, offset = rows.place(first + at)
            expected = "rows that begin with 0, ascend and are there"
            findings.problem("graph", path, expected, values[at], offset)
            return
        last = int(values[-1])
    for first, values in edges.pieces():
        for at in np.flatnonzero((values < 0) | (values > graph.edges))[:1].tolist():
            path, offset = edges.place(first + at)
            findings.problem("graph", path, f"edges from 0 to {graph.edges:,}", values[at], offset)
            return
