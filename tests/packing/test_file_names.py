"""Names of files are read in any case, and none is opened as another kind."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from featstore.errors import SourceError
from featstore.packing.graphs.opening import open_graph
from featstore.packing.sources.opening import is_headless, is_text, open_rows

X = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])
TABLE = pa.table({f"c{k}": X[:, k] for k in range(3)})
TEXT = "".join(f"{','.join(map(repr, row))}\n" for row in X.tolist()).encode()
PAIRS = "".join(f"{a},{b}\n" for a, b in EDGES.T.tolist()).encode()


def put(path: Path, work: Callable[[Any], None]) -> None:
    with path.open("wb") as file:
        work(file)


ROWS: dict[str, Callable[[Path], None]] = {
    ".npy": lambda p: put(p, lambda f: np.save(f, X)),
    ".npz": lambda p: put(p, lambda f: np.savez(f, x=X)),
    ".parquet": lambda p: put(p, lambda f: pq.write_table(TABLE, f)),
    ".feather": lambda p: put(p, lambda f: feather.write_feather(TABLE, f, compression="uncompressed")),
    ".arrow": lambda p: put(p, lambda f: feather.write_feather(TABLE, f, compression="uncompressed")),
    ".ipc": lambda p: put(p, lambda f: feather.write_feather(TABLE, f, compression="uncompressed")),
    ".pt": lambda p: put(p, lambda f: torch.save(torch.from_numpy(X), f)),
    ".pth": lambda p: put(p, lambda f: torch.save(torch.from_numpy(X), f)),
    ".csv": lambda p: put(p, lambda f: f.write(TEXT)),
    ".csv.gz": lambda p: put(p, lambda f: f.write(gzip.compress(TEXT))),
}
GRAPHS: dict[str, Callable[[Path], None]] = {
    ".npy": lambda p: put(p, lambda f: np.save(f, EDGES)),
    ".npz": lambda p: put(p, lambda f: np.savez(f, edge_index=EDGES)),
    ".parquet": lambda p: put(
        p, lambda f: pq.write_table(pa.table({"source": EDGES[0], "target": EDGES[1]}), f)
    ),
    ".pt": lambda p: put(p, lambda f: torch.save(torch.from_numpy(EDGES), f)),
    ".csv": lambda p: put(p, lambda f: f.write(PAIRS)),
    ".tsv": lambda p: put(p, lambda f: f.write(PAIRS.replace(b",", b"\t"))),
    ".el": lambda p: put(p, lambda f: f.write(PAIRS.replace(b",", b" "))),
    ".csv.gz": lambda p: put(p, lambda f: f.write(gzip.compress(PAIRS))),
    ".txt.gz": lambda p: put(p, lambda f: f.write(gzip.compress(PAIRS.replace(b",", b" ")))),
}
CASES = [str.lower, str.upper, str.title]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suffix", ROWS)
def test_rows(tmp_path: Path, suffix: str, case: Callable[[str], str]) -> None:
    path = tmp_path / f"X{case(suffix)}"
    ROWS[suffix](path)
    with_dtype = {"dtype": "float32"} if suffix.startswith(".csv") else {}
    assert not is_headless(path)
    assert is_text(path) == suffix.startswith(".csv")
    found = np.concatenate([block.copy() for block in open_rows(path, **with_dtype).blocks()])
    np.testing.assert_array_equal(found, X)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suffix", GRAPHS)
def test_graphs(tmp_path: Path, suffix: str, case: Callable[[str], str]) -> None:
    path = tmp_path / f"G{case(suffix)}"
    GRAPHS[suffix](path)
    graph = open_graph(path, nodes=3)
    assert graph.indptr.tolist() == [0, 1, 3, 4]
    assert np.asarray(graph.indices).tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("suffix", [".npy.gz", ".NPY.GZ", ".bin.gz", ".parquet.gz", ".zip", ".xz", ".ZST"])
def test_compressed_files_are_no_raw_binary(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(X.tobytes()).ljust(4096, b"0"))
    with pytest.raises(SourceError, match=r"is compressed, and of these only \.csv\.gz is read"):
        open_rows(path, dtype="uint8", shape=(-1, 4))
    for graph in (".npy.gz", ".NPY.GZ", ".PARQUET.GZ", ".npz.gz", ".pt.gz"):
        path = tmp_path / f"g{graph}"
        path.write_bytes(gzip.compress(EDGES.tobytes()))
        with pytest.raises(SourceError, match=r"compressed|g\."):
            open_graph(path)
