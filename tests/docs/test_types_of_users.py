"""What type checkers see: of all that is here, as ``pyproject.toml`` says, and of the library in a user's
program. For that they check this file, where ``assert_type`` fails unless a type is what it says. A test runs
the same lines."""

from __future__ import annotations

import inspect
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


def checked(folder: Path, of_torch: bool) -> list[str]:
    """What mypy finds, as ``pyproject.toml`` says, in all that is here and in two users' programs in the
    folder. ``of_torch``: with PyTorch's types, to look at which takes three quarters of the time."""
    head = (
        "from __future__ import annotations\nfrom pathlib import Path\nfrom typing import assert_type\n"
        "import numpy as np\nimport featstore\n\n"
    )
    right = head + inspect.getsource(program)
    (folder / "right.py").write_text(right)
    wrong = right.replace("done(), bool)", "done(), str)", 1)
    assert wrong != right
    (folder / "wrong.py").write_text(wrong)
    config = (ROOT / "pyproject.toml").read_text()
    without = config.replace('module = ["numba.*"', 'module = ["torch", "torch.*", "numba.*"', 1)
    assert without != config
    allowed = "strict = true\ndisallow_subclassing_any = false\nwarn_return_any = false\n"
    without = without.replace("strict = true\n", allowed, 1)
    (folder / "pyproject.toml").write_text(config if of_torch else without)
    words = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-warn-unused-configs"]
    words += ["--config-file", str(folder / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    words += ["featstore", "tools/featstore_cli", "tools/featstore_demo"]
    words += [str(folder / f"{name}.py") for name in ("right", "wrong")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if " error: " in line]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("of_torch", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_types_fit(tmp_path: Path, of_torch: bool) -> None:
    """Of two programs, mypy finds the one wrong type that the second asserts; and nothing else anywhere."""
    found = checked(tmp_path, of_torch)
    assert len(found) == 1, "\n".join(found)
    assert Path(found[0].partition(":")[0]).name == "wrong.py"
    assert 'Expression is of type "bool", not "str"' in found[0]


PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")


@pytest.mark.timeout(300)
@pytest.mark.skipif(PYRIGHT is None, reason="neither pyright nor basedpyright is installed")
def test_pyright_sees_these_types(tmp_path: Path) -> None:
    """From elsewhere than the repository: what is installed is looked at."""
    words = [str(PYRIGHT), "--level", "error", "--pythonpath", sys.executable, __file__]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
