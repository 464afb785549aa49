"""What a program leaves open when it ends: loaders are closed after what the program has registered itself,
and one that cannot be closed keeps no other from it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = """
import atexit, sys
import numpy as np
import featstore

store = featstore.open(sys.argv[1])
loader = store.loader(seeds=np.arange(400), fanouts=(3,), batch_size=40, memory="32MiB", mode=sys.argv[2])
batches = iter(loader)
next(batches), next(batches)
atexit.register(lambda: print("state", loader.state_dict()["next"]))
"""


def run(path: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), str(path), *arguments]
    environment = os.environ | {"TEST_HOW_IT_ENDS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


@pytest.fixture
def path(tmp_path: Path, pack: Any) -> Path:
    edges = np.random.default_rng(1).integers(0, 500, (2, 3000))
    pack(tmp_path / "s", np.random.default_rng(0).standard_normal((500, 4)), graph=edges).close()
    return tmp_path / "s"


@pytest.mark.parametrize("mode", ["online", "rolling"])
def test_a_program_may_ask_for_the_state_when_it_ends(path: Path, mode: str) -> None:
    """And nothing of a rolling loader is left."""
    ended = run(path, PROGRAM, mode)
    assert (ended.returncode, ended.stdout.split()) == (0, ["state", "2"]), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (path / "packs").exists() or not list((path / "packs").iterdir())


def test_one_that_cannot_be_closed_keeps_no_other_from_it(path: Path) -> None:
    """Nor the interpreter from waiting for the program's own threads."""
    program = """
        import threading, time
        def fails():
            raise OSError("cannot be closed")
        def late():
            time.sleep(1)
            print("thread", flush=True)
        others = [store.loader(seeds=np.arange(40), fanouts=(3,), memory="32MiB") for _ in range(3)]
        from featstore.loaders.loader import Loader
        close = Loader.close
        def counted(self):
            close(self)
            print("closed", flush=True)
            if self in others[:2]:
                fails()
        Loader.close = counted
        threading.Thread(target=late).start()
    """
    ended = run(path, PROGRAM + textwrap.dedent(program), "online")
    assert ended.stdout.split().count("closed") == 4, ended.stderr
    assert "thread" in ended.stdout
    assert ended.stderr.count("cannot be closed") == 2
