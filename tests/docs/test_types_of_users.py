"""What type checkers see: of all that is here, as ``pyproject.toml`` says, and of the library in a user's
program. For that they check this file, where ``assert_type`` fails unless a type is what it says. A test runs
the same lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import numpy as np
import pytest

import featstore

ROOT = Path(__file__).resolve().parents[2]


def program(folder: Path) -> int:
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    edges = np.stack([np.arange(100), (np.arange(100) + 1) % 100])
    assert_type(featstore.__version__, str)
    store = featstore.pack(folder / "s", rows, graph=edges, arrays={"train": np.arange(100)})
    assert_type(store, featstore.Store)
    with featstore.open(folder / "s") as opened:
        assert_type(opened, featstore.Store)
        assert_type(opened.table("features").rows, int)
        with opened.reader(memory="16MiB") as reader:
            request = reader.submit([1, 2])
            assert_type(request.done(), bool)
            assert_type(reader.memory(), dict[str, int])
            assert_type(reader.plan([1]).forecast_seconds, float)
            assert request.result().shape == (2, 4)
        steps = 0
        with opened.loader(seeds="train", fanouts=(3,), batch_size=10, memory="64MiB") as loader:
            assert_type(len(loader), int)
            for batch in loader:
                steps += batch.batch_size
        try:
            opened.reader(memory=1)
        except featstore.errors.BudgetError as error:
            assert_type(error.needed_bytes, int)
    store.close()
    return steps


def test_it_runs(tmp_path: Path) -> None:
    assert program(tmp_path) == 100


@pytest.mark.timeout(400)
def test_types_fit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)  # where mypy has not looked at the library before
def test_mypy_sees_these_types(tmp_path: Path) -> None:
    """And no others: of two programs, it finds the one wrong type that the second asserts."""
    text = Path(__file__).read_text()
    (tmp_path / "right.py").write_text(text)
    (tmp_path / "wrong.py").write_text(text.replace("done(), bool)", "done(), str)", 1))
    words = [sys.executable, "-m", "mypy", "--no-warn-unused-configs", "--no-error-summary"]
    words += [str(tmp_path / f"{name}.py") for name in ("right", "wrong")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    (error,) = (line for line in done.stdout.splitlines() if " error: " in line)
    assert Path(error.partition(":")[0]).name == "wrong.py"  # of what is kept, the folder may be another
    assert 'Expression is of type "bool", not "str"' in error


PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")


@pytest.mark.timeout(300)
@pytest.mark.skipif(PYRIGHT is None, reason="neither pyright nor basedpyright is installed")
def test_pyright_sees_these_types(tmp_path: Path) -> None:
    """From elsewhere than the repository: what is installed is looked at."""
    words = [str(PYRIGHT), "--level", "error", "--pythonpath", sys.executable, __file__]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
