"""Importing the package is quick and loads none of the heavy libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import featstore

HEAVY = [
    "numba",
    "llvmlite",
    "torch",
    "zarr",
    "pyarrow",
    "rich",
    "scipy",
    "torch_geometric",
    "pymetis",
    "click",
    "ml_dtypes",
]


def run(code: str) -> str:
    """What a fresh interpreter prints. Site packages that import things at start-up are no fault of ours,
    hence the comparison."""
    environment = os.environ | {"PYTHONPATH": str(Path(featstore.__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=30
    ).stdout


def test_importing_loads_nothing_heavy() -> None:
    loaded = json.loads(
        run(f"import sys, json, featstore; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))")
    )
    assert loaded == []


def test_opening_a_store_loads_no_frameworks(packed: Path) -> None:
    # scipy is not in the list: numba looks for it itself.
    code = (
        f"import sys, json, featstore; s = featstore.open({str(packed)!r}); r = "
        "s.reader(memory='4MiB'); r.read([1]); r.close(); print(json.dumps([m for m in ('torch', "
        "'zarr', 'pyarrow', 'rich', 'pymetis', 'click') if m in sys.modules]))"
    )
    assert json.loads(run(code)) == []


def test_importing_takes_less_than_a_second() -> None:
    best = min(
        float(run("import time; t = time.perf_counter(); import featstore; print(time.perf_counter() - t)"))
        for _ in range(3)
    )
    assert best < 1.0


def test_starting_and_ending_a_process_is_quick(packed: Path) -> None:
    run(f"import featstore; featstore.open({str(packed)!r}).reader(memory='4MiB')")  # kernels compiled
    begin = time.perf_counter()
    # nothing closed
    run(f"import featstore; r = featstore.open({str(packed)!r}).reader(memory='4MiB'); r.read([1])")
    assert time.perf_counter() - begin < 15


@pytest.mark.parametrize("name", featstore.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(featstore, name) is not None
    assert name in dir(featstore)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        featstore.nothing  # noqa: B018
