"""Typed graphs whose ends are keys: of each edge type those of its source type and of its target type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import SourceError

RNG = np.random.default_rng(7)
PAPERS, AUTHORS, VENUES = 90, 40, 9
X = RNG.standard_normal((PAPERS, 3)).astype(np.float32)
NAMES = np.array([f"10.1/é{n * n % 1009}-{n}" for n in range(PAPERS)], object)
NUMBERS = RNG.permutation(AUTHORS).astype(np.int64) * 10**15 - 10**16
WRITES, CITES, KNOWS = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("author", "knows", "author"),
)
PRINTS = ("venue", "prints", "paper")
NODES = {"paper": PAPERS, "author": AUTHORS, "venue": VENUES}
KEYS: dict[str, Any] = {"paper": NAMES, "author": NUMBERS}
ENDS = {
    kind: np.stack([RNG.integers(0, NODES[kind[0]], 300), RNG.integers(0, NODES[kind[2]], 300)])
    for kind in (WRITES, CITES, KNOWS, PRINTS)
}
TABLES: dict[str, Any] = {"paper": X, "author": AUTHORS, "venue": VENUES}


def in_keys(folder: Path) -> dict[tuple[str, str, str], Any]:
    """The edges, each type in another form: columns, texts, numbers, and a file with node ids and keys."""
    authors, papers = ENDS[WRITES]
    lines = [f"{venue},{NAMES[paper]}" for venue, paper in ENDS[PRINTS].T.tolist()]
    (folder / "prints.csv").write_text("\n".join(["source,target", *lines, ""]))
    return {
        WRITES: {"source": NUMBERS[authors], "target": NAMES[papers]},
        CITES: NAMES[ENDS[CITES]],
        KNOWS: NUMBERS[ENDS[KNOWS]],
        PRINTS: folder / "prints.csv",
    }


@pytest.mark.parametrize("order", ["given", "ldg"])
def test_ends_are_keys_of_either_type(tmp_path: Path, order: str) -> None:
    weights = RNG.random(300, np.float32)
    options: dict[str, Any] = {"edge_ids": True, "edge_weights": {WRITES: weights}, "order": order}
    featstore.pack(tmp_path / "s", TABLES, graph=in_keys(tmp_path), node_keys=KEYS, **options)
    assert featstore.verify(tmp_path / "s").ok
    with featstore.open(tmp_path / "s") as store:
        assert set(store.manifest.reader_features) == {
            "graphs",
            "edge_ids",
            "relations",
            "edge_values",
            "keys",
        }
        assert store.edge_types == list(ENDS)
        for graph in store.graphs.values():
            indptr, sources = graph.csc()
            targets, ids = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), graph.edge_ids()
            assert graph.edge_type is not None
            assert (np.stack([sources, targets]) == ENDS[graph.edge_type][:, ids]).all()
            assert sorted(ids.tolist()) == list(range(300))
        writes = store.graphs["author__writes__paper"]
        assert (writes.weights() == weights[writes.edge_ids()]).all()
        for name, keys in KEYS.items():
            with store.ids(name) as found:
                assert (found.lookup(keys) == np.arange(NODES[name])).all()


@pytest.mark.parametrize(
    ("kind", "edges", "says"),
    [
        (WRITES, {"source": [1], "target": [NAMES[0]]}, r"1 \(source of edge 0\)"),
        (WRITES, {"source": NUMBERS[:1], "target": ["x"]}, r"'x' \(target of edge 0\)"),
        (WRITES, np.stack([NUMBERS[:1], NUMBERS[:1]]), "whole numbers, and the keys of 'paper' are strings"),
        (KNOWS, np.array([[1], [2]]), "no key of 'author'"),
        (PRINTS, {"source": [VENUES], "target": [NAMES[0]]}, "node ids"),
        (PRINTS, {"source": ["v"], "target": [NAMES[0]]}, "node_keys="),
    ],
)
def test_ends_that_are_no_keys_are_refused(tmp_path: Path, kind: Any, edges: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        featstore.pack(tmp_path / "s", TABLES, graph=in_keys(tmp_path) | {kind: edges}, node_keys=KEYS)


def test_there_is_a_key_for_each_node_of_a_type(tmp_path: Path) -> None:
    keys = KEYS | {"author": NUMBERS[1:]}
    with pytest.raises(SourceError, match=r"'author' has 40 rows, and .* 39 keys"):
        featstore.pack(tmp_path / "s", TABLES, graph=in_keys(tmp_path), node_keys=keys)
