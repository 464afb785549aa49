"""Which columns of a file are the ends of an edge: by name, never two others, and never the wrong way
round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from featstore.errors import SourceError
from featstore.packing.graphs.opening import open_graph

ENDS = {"a": [0, 1, 1], "b": [2, 2, 0]}


@pytest.mark.parametrize(
    ("first", "second", "turned"),
    [
        ("dst", "author", True),
        ("paper", "src", True),
        ("src", "paper", False),
        ("author", "dst", False),
        ("target", "source", True),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_one_name_tells_both_ends(tmp_path: Path, kind: str, first: str, second: str, turned: bool) -> None:
    path = tmp_path / f"edges.{kind}"
    if kind == "csv":
        path.write_text("\n".join([f"{first},{second}", *(f"{a},{b}" for a, b in zip(*ENDS.values()))]))
    else:
        pq.write_table(pa.table({first: ENDS["a"], second: ENDS["b"]}), path)
    graph = open_graph(path, nodes=3)
    edge_index = np.array(list(ENDS.values())[::-1] if turned else list(ENDS.values()))
    targets = np.repeat(np.arange(3), np.diff(graph.indptr))
    assert sorted(zip(graph.indices.tolist(), targets.tolist())) == sorted(map(tuple, edge_index.T.tolist()))


@pytest.mark.parametrize("text", [("source", "target"), ("source",), ("target",)])
def test_ends_that_are_text_do_not_make_ends_of_other_columns(tmp_path: Path, text: tuple[str, ...]) -> None:
    columns = {name: ["x", "y", "z"] for name in text} | {"year": [0, 1, 2], "count": [1, 1, 1]}
    pq.write_table(pa.table(columns), tmp_path / "edges.parquet")
    with pytest.raises(SourceError, match="no two integer columns"):
        open_graph(tmp_path / "edges.parquet", nodes=3)
