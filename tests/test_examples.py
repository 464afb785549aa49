"""The examples run as they stand, and give what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import featstore

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"

#: What examples import of others takes longer than they do. This imports it, and nothing of featstore, and
#: has each program run in a process of its own, which begins with that. So do the hosts of an example, which
#: are forked instead of spawned: what they are given could be sent to a new process, where ranks of one host
#: go (``train_ranks_torch.py``).
LAUNCHER = """
import json, os, pickle, runpy, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import numba, numpy, torch, torch._dynamo, torch.multiprocessing, torch_geometric
def fork(function, args=(), **how):
    pickle.dumps((function, args))
    torch.multiprocessing.start_processes(function, args, start_method="fork", **how)
spawn = torch.multiprocessing.spawn
for line in sys.stdin:
    folder, package, *arguments = json.loads(line)
    torch.multiprocessing.spawn = fork if "train_hosts" in arguments[0] else spawn
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.path.insert(0, package)
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Run = Callable[[list[str], Path], str]
Example = Callable[[str], str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run Python in ``folder`` with this very featstore; returns what it printed."""
    package = str(Path(featstore.__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # which forks cannot use
    ) as launcher:  # fmt: skip
        assert launcher.stdin is not None
        assert launcher.stdout is not None

        def run(arguments: list[str], folder: Path) -> str:
            program = str((folder / arguments[0]).resolve())
            print(
                json.dumps([str(folder), package, program, *arguments[1:]]), file=launcher.stdin, flush=True
            )
            assert int(launcher.stdout.readline()) == 0, (folder / "stderr").read_text()
            return (folder / "stdout").read_text()

        try:
            yield run
            launcher.stdin.close()
            assert launcher.wait(20) == 0
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)


@pytest.fixture
def example(run: Run, tmp_path: Path) -> Example:
    """Run an example; returns what it printed."""
    return lambda name: run([str(EXAMPLES / name)], tmp_path)


def test_every_example_is_tested_and_short() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == {
        "gather_numpy.py",
        "rows_as_tensors.py",
        "train_hosts_pyg.py",
        "train_hosts_torch.py",
        "train_compiled_pyg.py",
        "train_mega_pyg.py",
        "train_mega_torch.py",
        "train_modes_torch.py",
        "train_online_pyg.py",
        "train_pyg.py",
        "train_pyg_loader.py",
        "train_ranks_torch.py",
        "train_torch.py",
        "train_typed_debian.py",
    }
    for path in EXAMPLES.glob("*.py"):
        most = 270 if path.name == "train_typed_debian.py" else 100  # that one makes its data, too
        assert len(path.read_text().splitlines()) <= most, path


def test_gather_numpy(example: Example) -> None:
    out = example("gather_numpy.py")
    counted = re.search(r"([\d,]+) of 2,000 rows are in memory, the rest takes ([\d,]+) reads", out)
    assert counted is not None
    held, reads = (int(number.replace(",", "")) for number in counted.groups())
    assert 0 < held < 2000
    assert reads > 0
    assert "table 'papers': 2,000 ids" in out
    assert re.search(r"years of the first papers: \[\d{4} \d{4} \d{4} \d{4} \d{4}\]", out)


def test_rows_are_taken_as_tensors(example: Example) -> None:
    out = example("rows_as_tensors.py")
    assert "(20000, 32) float32 1,048,576 bytes" in out
    assert "more than the 1,048,576 bytes of memory that its reader was given" in out
    assert "20 mini-batches, every row once" in out


def test_pygs_usual_loop_learns_from_a_store(example: Example) -> None:
    out = example("train_pyg_loader.py")
    assert [int(epoch) for epoch in re.findall(r"epoch (\d): loss", out)] == [0, 1]
    found = re.search(r"accuracy ([\d.]+) of ([\d,]+) nodes", out)
    assert found is not None
    assert float(found[1]) > 0.95  # with rows of other nodes it would be 0.25
    assert 4000 < int(found[2].replace(",", "")) < 6000


@pytest.mark.parametrize("name", ["train_torch.py", "train_pyg.py"])
def test_training_loops_learn_from_rows_on_disk(example: Example, name: str) -> None:
    epochs = re.findall(r"epoch (\d): loss [\d.]+, accuracy ([\d.]+), ([\d,]+) reads so far", example(name))
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > 0.98  # with rows of other nodes it would be 0.25
    reads = [int(count.replace(",", "")) for _, _, count in epochs]
    assert 0 < reads[0] < reads[1]


@pytest.mark.parametrize(("name", "least"), [("train_mega_torch.py", 0.9), ("train_mega_pyg.py", 0.95)])
def test_mega_batches_learn_from_partitions_on_disk(example: Example, name: str, least: float) -> None:
    line = r"epoch (\d): loss [\d.]+, accuracy ([\d.]+), ([\d,]+) bytes read so far, (\d+)% of the neighbours"
    epochs = re.findall(line, example(name))
    assert [int(epoch) for epoch, *_ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > least  # with rows of other nodes it would be 0.25
    for epoch, _, read, kept in epochs:
        assert 2_560_000 < int(read.replace(",", "")) / (int(epoch) + 1) < 5 * 2_560_000, (
            "all rows and lists, in whole pages; those of hubs, and of partitions that stay, more than once"
        )
        assert 50 < int(kept) < 100


def test_a_compiled_trace_learns_from_packed_rows(example: Example) -> None:
    out = example("train_compiled_pyg.py")
    accuracy = re.search(r"second epoch: accuracy ([\d.]+)", out)
    sources = re.search(r"rows from memory ([\d,]+) bytes, packed ([\d,]+) bytes", out)
    assert accuracy is not None and sources is not None  # noqa: PT018
    assert float(accuracy.group(1)) > 0.98  # with rows of other nodes it would be 0.25
    assert all(int(count.replace(",", "")) > 0 for count in sources.groups())


def test_an_online_loader_learns_through_its_buffer(example: Example) -> None:
    out = example("train_online_pyg.py")
    accuracy = re.search(r"second epoch: accuracy ([\d.]+)", out)
    buffered = re.search(r"(\d+)% of the rows were in the buffer; ([\d,]+) bytes read", out)
    assert accuracy is not None and buffered is not None  # noqa: PT018
    assert float(accuracy.group(1)) > 0.95  # with rows of other nodes it would be 0.25
    assert 50 < int(buffered.group(1)) < 100
    assert int(buffered.group(2).replace(",", "")) >= 10_000 * 32 * 4, "every row at least once"


def test_every_mode_learns_by_the_same_loop(example: Example) -> None:
    found = re.findall(r"(\w+): accuracy ([\d.]+), ([\d,]+) bytes read", example("train_modes_torch.py"))
    assert [mode for mode, _, _ in found] == ["online", "compiled", "rolling", "partitions"]
    for mode, accuracy, read in found:
        assert float(accuracy) > 0.9, mode  # with rows of other nodes it would be 0.25
        assert int(read.replace(",", "")) > 0, mode


def test_ranks_learn_through_one_buffer(example: Example) -> None:
    epochs = re.findall(r"epoch (\d): accuracy ([\d.]+), ([\d,]+) rows read", example("train_ranks_torch.py"))
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1]
    assert float(epochs[-1][1]) > 0.98  # with rows of other nodes it would be 0.25
    assert [read for _, _, read in epochs] == ["10,000", "10,000"], "each row once, whichever rank asks first"


def test_hosts_learn_from_parts(example: Example) -> None:
    epochs = re.findall(
        r"epoch (\d): accuracy ([\d.]+), ([\d,]+) rows of other hosts", example("train_hosts_torch.py")
    )
    assert [int(epoch) for epoch, _, _ in epochs] == [0, 1, 2]
    assert float(epochs[-1][1]) > 0.9  # with rows of other nodes it would be 0.25
    assert 0 < int(epochs[0][2].replace(",", "")) < int(epochs[-1][2].replace(",", ""))


def test_hosts_learn_from_parts_with_pygs_loader(example: Example) -> None:
    pytest.importorskip("torch_geometric")
    epochs = re.findall(r"epoch (\d): accuracy ([\d.]+)", example("train_hosts_pyg.py"))
    assert [int(epoch) for epoch, _ in epochs] == [0, 1, 2]
    assert float(epochs[-1][1]) > 0.95  # with rows of other nodes it would be 0.25


def test_types_are_trained_on(run: Run, tmp_path: Path) -> None:
    """Over a little archive, whose sections the words of descriptions tell."""
    rng, packages = np.random.default_rng(0), []
    for number in range(400):
        section = ("python", "games", "science")[number % 3]
        needs = sorted({f"p{one}" for one in rng.integers(0, 400, 4) if one % 3 == number % 3})
        packages.append(
            f"Package: p{number}\nSource: s{number // 2} (1.0)\nMaintainer: m{number // 40}\n"
            f"Depends: {', '.join(f'{name} (>= 1)' for name in needs)}\nSection: {section}\n"
            f"Description: a {section} thing for {section} people\n more of it\n"
        )
    (tmp_path / "Packages").write_text("\n".join(packages))
    printed = run(
        [str(EXAMPLES / "train_typed_debian.py"), str(tmp_path / "Packages"), "--epochs", "24"], tmp_path
    )
    assert "'package': 400, 'source': 200, 'maintainer': 10" in printed
    found = re.search(r"sections: ([0-9.]+) of the packages kept aside are right", printed)
    assert found is not None
    assert float(found[1]) > 0.8  # a third by chance
    assert re.search(r"dependencies, test: [0-9.]+ are right", printed)
    assert "exported 400 rows, all as given: True" in printed
