"""The wheel and the source distribution: built, installed where nothing else of the repository is, used."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import featstore

ROOT = Path(__file__).parents[1]

USE = """
import sys, numpy as np, featstore, featstore_cli
assert featstore.__file__.startswith(sys.argv[1]) and featstore_cli.__file__.startswith(sys.argv[1])
rows = np.arange(3000, dtype=np.float32).reshape(100, 30)
with featstore.pack(sys.argv[1] + "/store", rows) as store, store.reader(memory="16MiB") as reader:
    assert (reader.read([7, 3]) == rows[[7, 3]]).all()
"""


def run(words: list[str], cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both distributions, by suffix."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], ROOT)
    found = {path.suffix: path for path in out.iterdir()}
    assert set(found) == {".whl", ".gz"}
    return found


def test_the_wheel_is_all_that_is_needed(built: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = wheel.namelist()
    assert "featstore/py.typed" in names
    assert not [name for name in names if name.endswith((".nbi", ".nbc", ".pyc")) or "tests" in name]
    home = tmp_path / "home"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "-t"]
    run([*install, str(home), str(built[".whl"])], tmp_path)
    run([sys.executable, "-c", USE, str(home)], tmp_path, home)
    command = [sys.executable, str(home / "bin" / "featstore"), "inspect", str(home / "store")]
    assert "100" in run(command, tmp_path, home)


def test_the_citation_is_of_this_version() -> None:
    """And the first page leads to it, as it does not stand at the root."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "docs" / "CITATION.cff").read_text())
    assert cited["version"] == featstore.__version__
    assert cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert "(docs/CITATION.cff)" in (ROOT / "README.md").read_text()


def test_the_source_distribution_makes_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "formats/v1/spec.md", "tests/conftest.py", "docs/quickstart.md"):
        assert (folder / name).is_file(), name
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")], folder)
    (again,) = (tmp_path / "again").iterdir()
    with zipfile.ZipFile(built[".whl"]) as one, zipfile.ZipFile(again) as other:
        digests = [{info.filename: info.CRC for info in wheel.infolist()} for wheel in (one, other)]
    assert digests[0] == digests[1]
