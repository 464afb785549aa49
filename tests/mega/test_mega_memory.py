"""The memory of a loader is what it says: measured on a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import featstore

MEASURE = """
import json, re, sys, time
from pathlib import Path
import featstore
from featstore.loaders.mega.loader import PartitionsLoader

def held(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

def epoch(path, **options):
    with PartitionsLoader(featstore.open(path), [3, 2], batch_size=200, weights=True, **options) as loader:
        for batch in loader:
            time.sleep(0.001)  # so that there is always one made ahead
    return loader.memory() | {"steps": loader.sets.steps}

small, large, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
epoch(small, memory=memory)  # what code takes is there from here on
before = held("VmRSS")
found = epoch(large, memory=memory)
print(json.dumps(found | {"grown": held("VmHWM") - before}))
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., featstore.Store]) -> list[str]:
    folder = tmp_path_factory.mktemp("memory")
    made = []
    for rows, width in ((500, 16), (40_000, 400)):
        rng = np.random.default_rng(0)
        indices = (np.arange(rows * 8) // 800 * 100 + rng.integers(0, 100, rows * 8)) % rows
        indices[::9] = rng.integers(0, 50, len(indices[::9]))
        graph = (np.arange(0, rows * 8 + 1, 8), indices)
        path = folder / str(rows)
        pack(
            path,
            rng.standard_normal((rows, width), np.float32),
            graph=graph,
            order="ldg",
            partitions=rows // 500 + 1,
            memory="256MiB",
        ).close()
        made.append(str(path))
    return made


@pytest.mark.parametrize("memory", [24 << 20, 40 << 20])
def test_a_loader_stays_within_its_budget(stores: list[str], memory: int) -> None:
    root = str(Path(featstore.__file__).resolve().parent.parent)
    arguments = [sys.executable, "-c", MEASURE, *stores, str(memory)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["steps"] > 2, "more than fits"
    assert found["planned"] + found["unused"] == memory
    # On top comes what the allocator keeps; the mini-batches, of 2000 rows of 1600 bytes, do not.
    assert 4 << 20 < found["grown"] < found["planned"] + (4 << 20)
