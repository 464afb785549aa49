"""The examples and the README's code run as they stand, and give what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import featstore

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"

#: What the README's reader is assumed to have.
PRELUDE = """\
import numpy as np

rng = np.random.default_rng(0)
ids = rng.integers(0, 300, 50)
buffer = np.empty((50, 16), np.float32)
train_ids, epochs = np.arange(0, 300, 3), 1
sampler = [rng.integers(0, 300, 40) for _ in range(5)]
"""
#: What must hold after its code has run.
CHECKS = """
features = np.load("features.npy")
assert (x == features[ids]).all()
assert store.tables["features"].rows_by_degree() is not None
assert (batch.x == features[batch.n_id]).all()
assert batch.edge_index.shape[0] == 2 and batch.batch_size == len(train_ids)
with loader:
    for other in loader:
        assert (other.x == features[sampler[other.index]]).all()
assert (store.arrays["labels"] == np.load("labels.npy")).all()
"""


def run(arguments: list[str], folder: Path) -> str:
    """Run Python in ``folder`` with this very featstore; returns what it printed."""
    package = str(Path(featstore.__file__).resolve().parent.parent)
    code = (
        f"import runpy, sys; sys.path.insert(0, {package!r}); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, folder: Path) -> str:
    return run([str(EXAMPLES / name)], folder)


def test_every_example_is_tested_and_short() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == {
        "gather_numpy.py",
        "train_compiled_pyg.py",
        "train_mega_pyg.py",
        "train_mega_torch.py",
        "train_modes_torch.py",
        "train_online_pyg.py",
        "train_pyg.py",
        "train_ranks_torch.py",
        "train_torch.py",
    }
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 100, path


def test_gather_numpy(tmp_path: Path) -> None:
    out = example("gather_numpy.py", tmp_path)
    counted = re.search(r"([\d,]+) of 2,000 rows are in memory, the rest takes ([\d,]+) reads", out)
    assert counted is not None
    held, reads = (int(number.replace(",", "")) for number in counted.groups())
    assert 0 < held < 2000
    assert reads > 0
    assert "table 'papers': 2,000 ids" in out
    assert re.search(r"years of the first papers: \[\d{4} \d{4} \d{4} \d{4} \d{4}\]", out)


@pytest.mark.parametrize("name", ["train_torch.py", "train_pyg.py"])
def test_training_loops_learn_from_rows_on_disk(tmp_path: Path, name: str) -> None:
    epochs = re.findall(
        r"epoch (\d): loss [\d.]+, accuracy ([\d.]+), ([\d,]+) reads so far", example(name, tmp_path)
    )
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > 0.98  # with rows of other nodes it would be 0.25
    reads = [int(count.replace(",", "")) for _, _, count in epochs]
    assert 0 < reads[0] < reads[1]


@pytest.mark.parametrize(("name", "least"), [("train_mega_torch.py", 0.9), ("train_mega_pyg.py", 0.95)])
def test_mega_batches_learn_from_partitions_on_disk(tmp_path: Path, name: str, least: float) -> None:
    line = r"epoch (\d): loss [\d.]+, accuracy ([\d.]+), ([\d,]+) bytes read so far, (\d+)% of the neighbours"
    epochs = re.findall(line, example(name, tmp_path))
    assert [int(epoch) for epoch, *_ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > least  # with rows of other nodes it would be 0.25
    for epoch, _, read, kept in epochs:
        assert 2_560_000 < int(read.replace(",", "")) / (int(epoch) + 1) < 5 * 2_560_000, (
            "all rows and lists, in whole pages; those of hubs, and of partitions that stay, more than once"
        )
        assert 50 < int(kept) < 100


def test_a_compiled_trace_learns_from_packed_rows(tmp_path: Path) -> None:
    out = example("train_compiled_pyg.py", tmp_path)
    accuracy = re.search(r"second epoch: accuracy ([\d.]+)", out)
    sources = re.search(r"rows from memory ([\d,]+) bytes, packed ([\d,]+) bytes", out)
    assert accuracy is not None and sources is not None  # noqa: PT018
    assert float(accuracy.group(1)) > 0.98  # with rows of other nodes it would be 0.25
    assert all(int(count.replace(",", "")) > 0 for count in sources.groups())


def test_an_online_loader_learns_through_its_buffer(tmp_path: Path) -> None:
    out = example("train_online_pyg.py", tmp_path)
    accuracy = re.search(r"second epoch: accuracy ([\d.]+)", out)
    buffered = re.search(r"(\d+)% of the rows were in the buffer; ([\d,]+) bytes read", out)
    assert accuracy is not None and buffered is not None  # noqa: PT018
    assert float(accuracy.group(1)) > 0.95  # with rows of other nodes it would be 0.25
    assert 50 < int(buffered.group(1)) < 100
    assert int(buffered.group(2).replace(",", "")) >= 10_000 * 32 * 4, "every row at least once"


def test_every_mode_learns_by_the_same_loop(tmp_path: Path) -> None:
    found = re.findall(
        r"(\w+): accuracy ([\d.]+), ([\d,]+) bytes read", example("train_modes_torch.py", tmp_path)
    )
    assert [mode for mode, _, _ in found] == ["online", "compiled", "rolling", "partitions"]
    for mode, accuracy, read in found:
        assert float(accuracy) > 0.9, mode  # with rows of other nodes it would be 0.25
        assert int(read.replace(",", "")) > 0, mode


def test_ranks_learn_through_one_buffer(tmp_path: Path) -> None:
    epochs = re.findall(
        r"epoch (\d): accuracy ([\d.]+), ([\d,]+) rows read", example("train_ranks_torch.py", tmp_path)
    )
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > 0.98  # with rows of other nodes it would be 0.25
    assert [read for _, _, read in epochs] == ["10,000", "10,000"], "each row once, whichever rank asks first"


def test_readme_code_runs(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Use it")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks
    rng = np.random.default_rng(0)
    np.save(tmp_path / "features.npy", rng.standard_normal((300, 16), np.float32))
    np.save(tmp_path / "labels.npy", np.arange(300) % 5)
    np.savez(tmp_path / "graph.npz", indptr=np.arange(0, 1201, 4), indices=rng.integers(0, 300, 1200))
    (tmp_path / "readme.py").write_text(PRELUDE + "".join(blocks) + CHECKS)
    out = run(["readme.py"], tmp_path)
    assert "table 'features': 50 ids" in out
    assert "ReaderStats(" in out
