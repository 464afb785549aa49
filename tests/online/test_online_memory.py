"""The online loader stays within its budget: peak memory of a process of its own, large mini-batches,
changes of policy and the smallest budget included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import featstore
from featstore.loaders.online.loader import OnlineLoader

ROWS, COLUMNS = 3000, 10_000  # 120 MB
MEMORY_MIB = 64

PROGRAM = """
import gc, json, sys
import numpy as np
import featstore
from featstore.errors import BudgetError
from featstore.loaders.online.loader import OnlineLoader
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots.choose import PolicyChoice

def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) << 10

def batches(epoch):
    rng = np.random.default_rng(epoch)
    for number in range(20):
        yield rng.integers(0, rows, int(150 * (1.8 if number % 2 and number > 4 else 1)))

def through(loader):
    for _ in range(2):
        for batch in loader:
            del batch

policies = iter(["lru", "static", "sieve", "clock"] * 9)

def decide(self):
    self.hit_rates = {"made up": 1.0}
    self.policy = next(policies)
    return self.policy

def static_ids(self):
    yield np.arange(200)

PolicyChoice.decide, PolicyChoice.static_ids = decide, static_ids
rows = 3000
store = featstore.open(sys.argv[1])
for policy in ("fifo", "auto"):  # what loads code and compiles is no matter of the budget
    few = lambda epoch: [np.arange(9)] * 4
    with OnlineLoader(store, few, memory="80MiB", policy=policy) as loader:
        through(loader)
del loader
def smallest():
    memory = 1
    while True:
        try:
            with OnlineLoader(store, batches, memory=memory, policy="fifo") as loader:
                through(loader)
            return memory
        except BudgetError as error:
            memory = error.needed_bytes

found = {}
for policy, memory in (("fifo", int(sys.argv[2]) << 20), ("auto", 80 << 20), ("the least", smallest())):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    how = {"memory": memory, "policy": "auto" if policy == "auto" else "fifo"}
    with OnlineLoader(store, batches, **how) as loader:
        through(loader)
        assert sum(loader.memory().values()) <= memory
        assert policy != "auto" or loader.policy != {"features": "s3-fifo"}, "it was to change"
    del loader
    found[policy] = (peak() - before) / memory
print(json.dumps(found))
"""


def test_peak_memory_stays_within_the_budget(tmp_path: Path) -> None:
    source = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (ROWS, COLUMNS))
    source[:] = np.arange(ROWS, dtype=np.float32)[:, None]
    source.flush()
    with (  # what compiling takes of memory it takes here, so that the process finds it done
        featstore.pack(tmp_path / "s", tmp_path / "x.npy") as store,
        OnlineLoader(store, [np.arange(9)] * 4, memory="80MiB") as loader,
    ):
        list(loader)
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "s"), str(MEMORY_MIB)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    for policy in ("fifo", "auto", "the least"):
        assert 0.3 < found[policy] <= 1.0, found
