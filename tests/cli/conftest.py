"""What the tests of the command share: a tiny store, and a way to call the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import COLUMNS, ROWS, Call
from click.testing import CliRunner, Result
from featstore_cli.main import cli


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device models of the tests are not the user's."""
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def call() -> Call:
    """call(*arguments, code=0): runs the command; the result's stdout, stderr and (with --json) ``json``."""

    def run(*arguments: Any, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="featstore")
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def rows() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray[Any, Any]) -> Path:
    """Files as a user has them."""
    folder = tmp_path_factory.mktemp("inputs")
    random = np.random.default_rng(1)
    np.save(folder / "rows.npy", rows)
    rows.tofile(folder / "rows.bin")
    np.savez(folder / "rows.npz", x=rows, y=rows[:, 0])
    np.save(folder / "edges.npy", random.integers(0, ROWS, (2, 4 * ROWS)))
    np.savez(folder / "edges.npz", e=random.integers(0, ROWS, (2, 4 * ROWS)))
    np.save(folder / "labels.npy", np.arange(ROWS))
    np.save(folder / "permutation.npy", random.permutation(ROWS))
    np.save(folder / "ids.npy", random.integers(0, ROWS, 100))
    (folder / "ids.txt").write_text("1, 2\n3\n")
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """A store of one table with a graph; tests do not change it."""
    import featstore

    path = tmp_path_factory.mktemp("store") / "s"
    order = {"order": "ldg", "partitions": 4}
    featstore.pack(
        path, inputs / "rows.npy", graph=inputs / "edges.npy", arrays={"y": inputs / "labels.npy"}, **order
    ).close()
    return path


@pytest.fixture(scope="session")
def two_tables(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray[Any, Any]) -> Path:
    import featstore

    path = tmp_path_factory.mktemp("two") / "s"
    featstore.pack(path, {"paper": rows, "author": rows[:10]}).close()
    return path
