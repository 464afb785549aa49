"""The wheel and the source distribution: built, installed where nothing else of the repository is, used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import featstore
from featstore.engine import ENGINES, choose
from featstore.errors import EngineError

ROOT = Path(__file__).parents[1]

USE = """
import sys, numpy as np, featstore, featstore_cli
assert featstore.__file__.startswith(sys.argv[1]) and featstore_cli.__file__.startswith(sys.argv[1])
rows = np.arange(3000, dtype=np.float32).reshape(100, 30)
with featstore.pack(sys.argv[1] + "/store", rows) as store, store.reader(memory="16MiB") as reader:
    assert (reader.read([7, 3]) == rows[[7, 3]]).all()
"""


ENGINE_BY_ENGINE = """
import sys, numpy as np, featstore
rows = np.arange(60, dtype=np.float32).reshape(20, 3)
with featstore.pack("store", rows) as store:
    for engine in sys.argv[1:]:
        with store.reader(memory="16MiB", engine=engine) as reader:
            assert (reader.read([7, 3]) == rows[[7, 3]]).all()
            assert reader.stats().engine == engine
print(sys.version_info[1])
"""


def pythons() -> dict[int, Path]:
    """Pythons 3.12 and newer of this machine by their minor version, the newest first."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"), reverse=True)
    folders = [*kept, *(Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)]
    found: dict[int, Path] = {}
    for folder in folders:
        for path in folder.glob("python3.*"):
            name = re.fullmatch(r"python3\.(\d+)", path.name)
            if name and int(name[1]) >= 12 and folder.name != "shims" and os.access(path, os.X_OK):
                found.setdefault(int(name[1]), path)
    return dict(sorted(found.items(), reverse=True))


PYTHONS = pythons()


def run(words: list[str], cwd: Path, path: Path | None = None) -> str:
    paths = [ROOT / "tests" / "children", *([] if path is None else [path])]  # and nothing else of here
    # (what is tried is whether all is there, for which kernels need not be fast)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "NUMBA_OPT": "0"}
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


def attempt(words: list[str], cwd: Path) -> None:
    """Run what needs more of the machine than the repository can bring; skip, and say why, where it fails."""
    try:
        run(words, cwd)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{' '.join(map(str, words[:5]))}: {str(error).strip()[-400:]}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("minor", list(PYTHONS) or [None])
def test_newer_pythons_install_and_use_the_wheel(
    built: dict[str, Path], tmp_path: Path, minor: int | None
) -> None:
    if minor is None:
        pytest.skip("no Python 3.12 or newer on PATH or in ~/.pyenv/versions")
    asked = os.environ.get("TEST_PYTHONS")
    if asked != "all" and (asked != "newest" or minor != max(PYTHONS)):
        pytest.skip("other Pythons are tried with TEST_PYTHONS=newest, or all")
    attempt([str(PYTHONS[minor]), "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "-q", "--no-compile", "--disable-pip-version-check"]
    known = ["-c", str(ROOT / "constraints.txt"), "--only-binary", ":all:", "--retries", "1"]
    attempt([*install, *known, *needs], tmp_path)
    run([*install, "--no-index", str(built[".whl"])], tmp_path)  # nothing more is needed
    working = []
    for engine in ENGINES:
        try:
            working.append(choose(engine).name)
        except EngineError:
            assert engine == "uring"  # the others work anywhere
    assert run([python, "-c", ENGINE_BY_ENGINE, *working], tmp_path).strip() == str(minor)
    assert f"Python :: 3.{minor}" in (ROOT / "pyproject.toml").read_text(), "it works: say so"
    assert "20" in run([str(tmp_path / "venv" / "bin" / "featstore"), "inspect", "store"], tmp_path)


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
        # Pythons older than 3.11.4 know no filters.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "formats/v1/spec.md", "tests/conftest.py", "docs/quickstart.md"):
        assert (folder / name).is_file(), name
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")], folder)
    (again,) = (tmp_path / "again").iterdir()
    with zipfile.ZipFile(built[".whl"]) as one, zipfile.ZipFile(again) as other:
        digests = [{info.filename: info.CRC for info in wheel.infolist()} for wheel in (one, other)]
    assert digests[0] == digests[1]
