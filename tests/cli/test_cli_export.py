"""``featstore export``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cli_support import Call

import featstore


def test_rows_come_back(call: Call, store: Path, tmp_path: Path) -> None:
    call("export", store, "features", "--to", tmp_path / "all.npy", "--memory", "8MiB")
    with featstore.open(store) as opened, opened.reader(memory="8MiB") as reader:
        rows = reader.read(np.arange(opened.tables["features"].rows))
    np.testing.assert_array_equal(np.load(tmp_path / "all.npy"), rows)
    np.save(tmp_path / "edges.npy", np.arange(6).reshape(2, 3))
    wrong = ("--to", tmp_path / "wrong.npy", "--ids", tmp_path / "edges.npy")
    assert "node ids have one axis" in call("export", store, "features", *wrong, code=1).stderr
    (tmp_path / "ids.txt").write_text("7\n3\n7\n")
    some = ("--ids", tmp_path / "ids.txt", "--columns")
    said = call("export", store, "features", "--to", tmp_path / "some.npy", *some, "1:3")
    assert f"wrote {tmp_path / 'some.npy'}" in said.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "some.npy"), rows[[7, 3, 7], 1:3])
    call("export", store, "features", "--to", tmp_path / "some.npy", *some, "2,0", "--overwrite", "-q")
    np.testing.assert_array_equal(np.load(tmp_path / "some.npy"), rows[[7, 3, 7]][:, [2, 0]])


def test_wrong_usage(call: Call, store: Path, tmp_path: Path) -> None:
    call("export", store, "features", code=2)
    call("export", store, "features", "--to", tmp_path / "o.npy", "--columns", "a:b", code=2)
    said = call("export", store, "nothing", "--to", tmp_path / "o.npy", code=1).stderr
    assert "no table 'nothing'" in said
    said = call("export", store, "features", "--to", tmp_path / "o.csv", code=1).stderr
    assert "'.npy', '.zarr', '.parquet'" in said
