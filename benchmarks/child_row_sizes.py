"""Epochs through an online loader in a process of its own, for rows of any size; given and prints a JSON
object.

What the loader asks its reader for is noted, so that the bytes it read can be held against those of the twin
in ``row_sizes.py``. A first loader loads all machine code; memory counts from then on, above what the process
has by then.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT  # noqa: F401  (makes featstore importable)
from numpy.typing import NDArray
from row_sizes import twin_of
from system import status_bytes
from tables import check_rows

import featstore
from featstore.loaders.online.loader import OnlineLoader
from featstore.plan.cost import DeviceModel
from featstore.reader.reader import Reader

SCATTER = 2_654_435_761  # a prime
SKEW = 3  # of a tenth of the rows come 46 % of those asked for


def mini_batches(rows: int, count: int, batch_rows: int, epoch: int) -> list[NDArray[np.int64]]:
    """Ids, some wanted often and others hardly ever, all over the table."""
    rng = np.random.default_rng(epoch)
    return [
        (rng.random(batch_rows) ** SKEW * rows).astype(np.int64) * (SCATTER % rows or 1) % rows
        for _ in range(count)
    ]


def main() -> None:
    """One epoch that fills the buffer, one that is measured, one of which every value is checked."""
    given = json.loads(sys.argv[1])
    model = DeviceModel(**given["model"])
    noted_ids = np.ones(
        given["batches"] * given["batch_rows"], np.int64
    )  # touched, so that noting takes no memory later
    noted_ends = [0]
    submit = Reader.submit

    def noted(reader: Reader, ids: Any, **options: Any) -> Any:
        if noting:
            (missed,) = ids.values()
            noted_ends.append(noted_ends[-1] + len(missed))
            noted_ids[noted_ends[-2] : noted_ends[-1]] = missed
        return submit(reader, ids, **options)

    noting, Reader.submit = False, noted  # type: ignore[method-assign]
    with featstore.open(given["path"]) as store:
        rows = store.tables["features"].rows
        epochs = [mini_batches(rows, given["batches"], given["batch_rows"], epoch) for epoch in range(3)]
        with OnlineLoader(store, epochs[0][:3], memory=given["memory_bytes"], model=model) as loader:
            for _ in loader:
                pass
        del loader
        gc.collect()
        bare = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        with OnlineLoader(store, lambda k: epochs[k], memory=given["memory_bytes"], model=model) as loader:
            for _ in loader:
                pass
            before, noting = loader.report(), True
            begin = time.perf_counter()
            for _ in loader:
                pass
            seconds = time.perf_counter() - begin
            after, noting = loader.report(), False
            peak = status_bytes("VmHWM") - bare
            for batch in loader:
                check_rows(batch.n_id, batch.x, len(batch.n_id))
            buffer = loader.extraction.buffers["features"]
            extent_bytes_max = buffer._reader.budget.extent_bytes_max
            slots, memory = buffer.slots, loader.memory()
        twins = [
            twin_of(
                noted_ids[begin:end], store.tables["features"].layout, model.gap_pages_max, extent_bytes_max
            )
            for begin, end in pairwise(noted_ends)
            if end > begin
        ]
    then, now = before.buffers["features"], after.buffers["features"]
    print(json.dumps({
        "rows": given["batches"] * given["batch_rows"], "seconds": seconds, "hits": now.hits - then.hits,
        "misses": now.misses - then.misses, "bytes_read": after.bytes_read - before.bytes_read,
        "reads": after.reads - before.reads, "page_bytes": sum(twin.page_bytes for twin in twins),
        "twin_bytes": sum(twin.read_bytes for twin in twins), "peak_bytes": peak, "slots": slots,
        "memory": memory,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
