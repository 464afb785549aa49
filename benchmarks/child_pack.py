"""One pack in a process of its own: seconds, bytes read and written, peak memory. Given and prints a JSON
object.

It imports nothing beyond featstore and what that needs, because all of it counts in the peak.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from system import cpu_seconds, device_io, process_io, status_bytes

import featstore


def main() -> None:
    """Pack what is given."""
    given = json.loads(sys.argv[1])
    out, permutation = Path(given["out"]), given["permutation"]
    if given.get("cores"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["cores"]])
    options = {"order": "permutation", "permutation": permutation} if permutation else {"order": "given"}
    if given.get("graph"):
        options = {"graph": given["graph"]}  # the order follows from it
    pack = featstore.pack  # imports the packing code, numpy and numba
    base_bytes = status_bytes("VmHWM")
    io, device, cpu, begin = process_io(), device_io(out.parent), cpu_seconds(), time.perf_counter()
    pack(out, given["source"], memory=given["memory_bytes"], **options).close()
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    after, device_after = process_io(), device_io(out.parent)
    result = {
        "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": status_bytes("VmHWM"), "base_bytes": base_bytes,
        **{key: after[key] - io[key] for key in io},
    }  # fmt: skip
    if device is not None and device_after is not None:
        result |= {f"device_{key}": device_after[key] - device[key] for key in device}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
