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


class Messages:
    """What host 0 asks of host 1: the ids of each table, a list a message."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    def listen(self, source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
        header = data[: ms.HEADER_BYTES].view(np.int64)
        if int(header[1]) == ms.Kind.ASK and (source, to) == (0, 1):
            self.counts.append(data[ms.HEADER_BYTES :].view(np.int64)[:2].tolist())
        return data


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extracted": 1},
        {"halo": "48KiB"},
        {"halo": featstore.MassiveGNN(0.2, delta=3)},
        {"halo": featstore.Buffer("lru", "512KiB")},
        {"halo": featstore.Buffer("auto", "512KiB")},
        {"device": "cpu", "device_memory": "64KiB"},
    ],
    ids=["plain", "one at a time", "looking ahead", "MassiveGNN", "halo buffer", "auto", "device"],
)
def test_tables_of_a_mini_batch_go_in_one_message(folder: Path, options: dict[str, Any]) -> None:
    messages = Messages()
    counts = messages.counts
    rows = {name: np.load(folder / f"{name}.npy") for name in ("paper", "author")}
    with hosts(folder / "two3", 3, meddle=messages.listen, memory="24MiB") as (stores, _):

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


@pytest.mark.parametrize(
    "tiers",
    [
        [],
        [featstore.Static("degree", "4KiB")],
        [featstore.Buffer("lru", "512KiB")],
        [featstore.Device("cpu", "64KiB")],
        [featstore.Device("cpu", "64KiB"), featstore.Buffer("s3-fifo", "512KiB")],
    ],
    ids=["none", "static", "buffer", "device", "device over buffer"],
)
def test_a_request_of_a_reader_goes_in_one_message(folder: Path, tiers: list[Any]) -> None:
    messages, requests = Messages(), 4
    rows = {name: np.load(folder / f"{name}.npy") for name in ("paper", "author")}
    with hosts(folder / "two3", 3, meddle=messages.listen, memory="24MiB") as (stores, _):

        def read(store: featstore.SplitStore) -> int:
            with store.reader(tables=["paper", "author"], tiers=tiers, memory="24MiB") as reader:
                for number in range(requests):  # other rows each time, so that none is there
                    ids = {name: np.arange(number, len(table), 2 * requests) for name, table in rows.items()}
                    found = reader.read(ids)
                    for name, table in rows.items():
                        assert np.asarray(found[name]).tobytes() == table[ids[name]].tobytes()
            return requests

        assert each(stores, read) == [requests] * 3
    filled = any(isinstance(tier, featstore.Static) for tier in tiers)  # beforehand
    assert requests <= len(messages.counts) <= requests + filled * 2
    assert sum(all(one) for one in messages.counts) >= requests
