"""``featstore pack --node-keys``, and what inspect and export say of keys; shards by a pattern."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from cli_support import Call, parsed

import featstore


def test_keys(call: Call, tmp_path: Path) -> None:
    names = [f"doi/{n}" for n in range(20)]
    lines = [f"{name},{n}.5,{-n}" for n, name in enumerate(names)]
    (tmp_path / "x.csv").write_text("\n".join(["name,a,b", *lines]) + "\n")
    edges = [f"{names[n]},{names[n * n % 20]}" for n in range(20)]
    (tmp_path / "e.csv").write_text("\n".join(["cites,paper", *edges]) + "\n")
    options = ["--features", f"paper={tmp_path / 'x.csv'}", "--id", "name", "--node-keys", "paper=id"]
    options += ["--graph", str(tmp_path / "e.csv"), "--graph-key", "cites,paper"]
    data = parsed(call("pack", tmp_path / "s", *options, "--json"))
    size = sum(map(len, names))
    assert data["keys"] == {
        "paper": {"kind": "utf8", "count": 20, "key_bytes": size, "bytes": size + 16 + 12 * 20 + 8 * 21}
    }
    assert f"keys of 'paper'  20 strings, {size} B" in call("inspect", tmp_path / "s").stdout
    with featstore.open(tmp_path / "s") as store, store.ids("paper") as ids:
        assert ids.lookup(names[::-1]).tolist() == list(range(20))[::-1]
        assert store.graphs["paper"].csc()[1][0] == 0
    call("export", tmp_path / "s", "paper", "--to", tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet")["key"].to_pylist() == names


def test_a_file_of_keys_and_shards(call: Call, tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float32).reshape(30, 2)
    for number, part in enumerate(np.array_split(x, 12)):
        np.save(tmp_path / f"x-{number}.npy", part)
    np.save(tmp_path / "keys.npy", np.arange(30) * 10**12)
    call(
        "pack",
        tmp_path / "s",
        "--features",
        str(tmp_path / "x-*.npy"),
        "--node-keys",
        str(tmp_path / "keys.npy"),
    )
    with featstore.open(tmp_path / "s") as store, store.ids("features") as ids, store.reader() as reader:
        assert np.array_equal(reader.read(ids.lookup([3 * 10**12, 29 * 10**12])), x[[3, 29]])
