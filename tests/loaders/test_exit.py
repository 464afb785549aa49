"""A program that ends in the middle of an epoch, with its loader open, ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import featstore

_PROGRAM = """
import sys, numpy as np, featstore
store = featstore.open(sys.argv[1])
more = {"name": "left"} if sys.argv[2] == "rolling" else {}
loader = store.loader(
    seeds=np.arange(300), fanouts=(4, 4), batch_size=16, memory="64MiB", mode=sys.argv[2], **more
)
iterator = iter(loader)
next(iterator)
print("one")
"""


@pytest.mark.parametrize("mode", ["online", "rolling", "partitions"])
def test_program_ends_with_a_loader_open(tmp_path: Path, mode: str) -> None:
    edges = np.random.default_rng(0).integers(0, 300, (2, 2000))
    featstore.pack(
        tmp_path / "s", np.zeros((300, 4), np.float32), graph=edges, order="ldg", partitions=4
    ).close()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(tmp_path / "s"), mode],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"TEST_HOW_IT_ENDS": "1"},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, "one"), ran.stderr
    assert "Error" not in ran.stderr, ran.stderr
