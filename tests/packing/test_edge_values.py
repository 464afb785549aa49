"""Values of edges that are none are found before anything is packed: the next try needs no overwrite=."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreError, FeatstoreWarning, SourceError

NODES, EDGES = 300, 2000
GRAPHS = ("alone", "typed", "split", "split, typed")


def way(kind: str, out: Path, values: dict[str, Any], rows: Any) -> Callable[[], Any]:
    """One of the ways in which features, a graph, and values of its edges come in."""
    edges = np.random.default_rng(1).integers(0, NODES, (2, EDGES))
    given: dict[str, Any] = {"edge_ids": True, "order": "ldg", "partitions": 4}
    if "typed" in kind:
        relation = ("a", "r", "a")
        given |= {"features": {"a": rows}, "graph": {relation: edges}}
        given |= {name: {relation: value} for name, value in values.items()}
    else:
        given |= {"features": rows, "graph": edges, **values}
    if "split" in kind:
        return lambda: featstore.split_features(hosts=2, out=out, split_topology=True, **given)
    return lambda: featstore.pack(out, given.pop("features"), **given).close()


@pytest.mark.filterwarnings("ignore::featstore.errors.FeatstoreWarning")  # a graph of no communities
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize(
    ("name", "wrong", "right", "message"),
    [
        ("edge_weights", np.full(EDGES, -1.0), np.ones(EDGES), "weight of edge 0 is -1"),
        ("edge_weights", np.append(np.ones(EDGES - 1), np.inf), np.ones(EDGES), "edge 1,999 is inf"),
        ("edge_times", np.arange(EDGES - 1), np.arange(EDGES), "1,999 values for a graph of 2,000 edges"),
    ],
)
def test_nothing_is_left_of_wrong_values(
    tmp_path: Path, kind: str, name: str, wrong: np.ndarray[Any, Any], right: np.ndarray[Any, Any],
    message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = np.random.default_rng(0).random((NODES, 7), np.float32)
    with monkeypatch.context() as patch:
        for module in ("ordering", "typed"):

            def none(*_: Any, **__: Any) -> Any:
                raise AssertionError("an order was made before the values were looked at")

            patch.setattr(f"featstore.packing.{module}.make_order", none)
        with pytest.raises(SourceError, match=message):
            way(kind, tmp_path / "out", {name: wrong}, rows)()
    assert not list(tmp_path.iterdir())
    way(kind, tmp_path / "out", {name: right}, rows)()
    assert (tmp_path / "out").is_dir()


def test_values_that_can_be_read_once_are_found_when_they_are(tmp_path: Path) -> None:
    """They cannot be looked at beforehand; the pack says so then, and commits nothing."""
    wrong = iter([np.ones((EDGES - 1, 1))])
    with pytest.raises(SourceError, match="1,999 values"):
        way("alone", tmp_path / "out", {"edge_weights": wrong}, np.ones((NODES, 1), np.float32))()
    with pytest.raises(FeatstoreError):
        featstore.open(tmp_path / "out")


@pytest.mark.parametrize("end", ["csv", "csv.gz"])
def test_times_come_from_a_column_of_text(tmp_path: Path, end: str) -> None:
    """As the warning of a pack without them says."""
    when = 2**53 + 1 + np.arange(EDGES)  # which no float64 holds
    edges = np.random.default_rng(1).integers(0, NODES, (2, EDGES))
    lines = ["source,target,time", *(f"{a},{b},{t}" for a, b, t in zip(*edges, when, strict=True))]
    path = tmp_path / f"e.{end}"
    with gzip.open(path, "wt") if end == "csv.gz" else path.open("w") as file:
        file.write("\n".join(lines) + "\n")
    x, options = np.ones((NODES, 1), np.float32), {"edge_ids": True, "order": "given"}
    if end == "csv":
        with pytest.warns(FeatstoreWarning, match=f"edge_times= \\('{path}:time'\\)"):
            featstore.pack(tmp_path / "w", x, graph=path, **options).close()  # type: ignore[arg-type]
    given = {"graph": path if end == "csv" else edges, "edge_times": f"{path}:time"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = featstore.pack(tmp_path / "s", x, **given, **options)  # type: ignore[arg-type]
    with store, featstore.pack(tmp_path / "t", x, graph=edges, edge_times=when, **options) as right:  # type: ignore[arg-type]
        both = [one.path / one.table("features/times").entry.chunk_path(0) for one in (store, right)]
        assert both[0].read_bytes() == both[1].read_bytes()
