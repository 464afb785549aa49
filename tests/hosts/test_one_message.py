"""A mini-batch of a loader asks a host once, whatever tables its rows are of, and whatever is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gathered import asked, two_tables
from test_split_topology import each, hosts

import featstore
from featstore.hosts import messages as ms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("one-message")
    two_tables(made, pack, 3)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extracted": 1},
        {"halo": "48KiB"},
        {"halo": featstore.MassiveGNN(0.2, delta=3)},
        {"device": "cpu", "device_memory": "64KiB"},
    ],
    ids=["plain", "one at a time", "looking ahead", "MassiveGNN", "device"],
)
def test_tables_of_a_mini_batch_go_in_one_message(folder: Path, options: dict[str, Any]) -> None:
    counts: list[list[int]] = []

    def listen(source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
        header = data[: ms.HEADER_BYTES].view(np.int64)
        if int(header[1]) == ms.Kind.ASK and (source, to) == (0, 1):
            counts.append(data[ms.HEADER_BYTES :].view(np.int64)[:2].tolist())
        return data

    rows = {name: np.load(folder / f"{name}.npy") for name in ("paper", "author")}
    with hosts(folder / "two3", 3, meddle=listen, memory="24MiB") as (stores, _):

        def train(store: featstore.SplitStore) -> int:
            taken = 0
            given = {"rank": store.place.host, "world_size": 3, "memory": "48MiB", **options}
            with store.loader(asked(), **given) as loader:
                for batch in loader:
                    taken += 1
                    for name, table in rows.items():
                        assert np.asarray(batch.x[name]).tobytes() == table[batch.n_id[name]].tobytes()
            return taken

        assert each(stores, train) == [3, 3, 3]
    # what fills a buffer is a message of its own
    fills = isinstance(options.get("halo"), featstore.MassiveGNN)
    assert 1 <= len(counts) <= 3 + fills
    assert sum(all(one) for one in counts) >= 2
    assert sum(map(sum, counts)) >= 60
