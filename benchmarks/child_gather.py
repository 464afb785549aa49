"""One cold gather by featstore in a process of its own, for a memory cgroup; given and prints a JSON
object."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from harness import ROOT  # noqa: F401  (makes featstore importable)
from system import status_bytes

import featstore

MEMORY = "64MiB"


def main() -> None:
    """Read all ids once, after a first small request."""
    given = json.loads(sys.argv[1])
    ids = np.load(given["ids"])
    with featstore.open(given["path"]) as store, store.reader(memory=MEMORY, static=None) as reader:
        out = np.zeros((len(ids), given["columns"]), np.float32)
        reader.read(ids[:100])
        begin = time.perf_counter()
        reader.read(ids, out=out)
        seconds = time.perf_counter() - begin
    np.save(given["out"], out)
    print(
        json.dumps(
            {"rows": len(ids), "seconds": seconds, "peak_bytes": status_bytes("VmHWM"), "memory": MEMORY}
        )
    )


if __name__ == "__main__":
    main()
