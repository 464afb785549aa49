"""A short run of the fuzzer, the same each time; and that what it looks for would be seen."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from guard import guarded
from processes import child, exit_code

from featstore.base.native import address_of

RUN = Path(__file__).parent / "run.py"


def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--runs", "56", "--seconds", "200", "--seed", "3", "--guard"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["mutants"] == 56
    assert told["findings"] == 0
    changed = re.findall(r"by file: (\w+) +mutants +(\d+)", done.stdout)
    assert len(changed) == 14
    assert [name for name, count in changed if count == "0"] == []
    assert 30 < told["refused"] < told["uses"]
    assert [path.name for path in tmp_path.iterdir()] == []


SABOTAGE = """
import sys, json, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import run, mutants, uses, worker
import featstore.base.checks, featstore.reader.graphs
for name in ("check_offsets", "check_distinct", "check_inverse"):
    setattr(featstore.base.checks, name, lambda *arguments: None)
featstore.reader.graphs.check_offsets = featstore.base.checks.check_offsets  # it has its own name for it
def change(store, rng):
    at = ("graphs", "features", "offsets")
    offsets = store.rows(at).view("<i8").copy()
    offsets[100:102] = [2**62, -(2**62) - 2**61]
    store.set_rows(at, offsets)
    store.seal()
    return ["graph"], "offsets that wrap around"
mutants.mutate_store = change
worker.HANG_SECONDS = 10
uses.OF["store"] = {uses.sample: 1}
print(json.dumps(run.fuzz(Path(sys.argv[2]), runs=2, seconds=60, kinds=["store"])["found"]))
"""


def test_what_no_check_refuses_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SABOTAGE, str(RUN.parent), str(tmp_path / "fuzz")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"FEATSTORE_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout.splitlines()[-1])
    assert [finding["run"] for finding in findings] == [0, 1]
    assert all("offsets that wrap around; sample" in finding["what"] for finding in findings)


@pytest.mark.parametrize("size", [1, 64, 4000, 4096, 5000])
def test_memory_between_guards(size: int) -> None:
    places = set()
    for _ in range(2):  # in turn right after one guard, and before the other
        block = guarded(size)
        begin, end = address_of(block), address_of(block) + size
        assert block.shape == (size,)
        assert begin % 64 == 0
        block[:] = 7
        first, beyond = begin // 4096 * 4096, -(-end // 4096) * 4096
        places.add((begin == first, beyond - end < 64))
        for outside in (first - 1, beyond):

            def touch(address: int = outside) -> int:
                faulthandler.disable()
                return ctypes.c_uint8.from_address(address).value + 1

            assert exit_code(child(touch)) == -11
    assert any(at_begin for at_begin, _ in places)
    assert any(at_end for _, at_end in places)
