"""Every mode of the loader over hosts that are processes: rows are the source's, ranks have as many steps as
any other, states are gone on with, and a host that is gone is told to all others, whatever they do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fault_hosts import ALL_SECONDS, all_of, forked_from
from mode_hosts import MODES, NODES, be_host, be_victim_or_not, reuse_unlike
from test_gathered import two_tables
from test_split_training import graph_and_rows

import featstore

TIMEOUT_SECONDS, GRACE_SECONDS = 3, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("modes")
    graph_and_rows(made, pack)
    two_tables(made, pack, 1, 2, 3)
    return made


@pytest.fixture(scope="module")
def context(folder: Path) -> Any:
    return forked_from(folder)


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_every_mode_over_hosts(folder: Path, context: Any, hosts: int, ranks: int) -> None:
    """Every seed comes in every epoch, as many steps on every rank; rows of other hosts come when
    mini-batches are compiled, and a part's own partitions need none."""
    name = f"all{hosts}x{ranks}"
    assert all_of(context, be_host, hosts * ranks, hosts, ranks, str(folder), name) == [0] * hosts * ranks
    told = [json.loads((folder / f"{name}.told.{rank}").read_text()) for rank in range(hosts * ranks)]
    for mode in MODES:
        of = [one[mode] for one in told]
        steps = {len(one["seen"]) for one in of}
        assert len(steps) == 1, (mode, steps)
        seen = Counter(node for one in of for seeds in one["seen"] for node in seeds)
        assert set(seen) == set(range(0, NODES, 3)), mode
        assert min(seen.values()) == 2, mode  # epochs
        padded = of[0]["padded"] if mode != "partitions" else sum(one["padded"] for one in of[::ranks])
        # Those of mode partitions are of the second epoch alone: in the first there may be others.
        if mode != "partitions":
            assert sum(seen.values()) == 2 * (NODES // 3 + padded)
        elif hosts > 1:
            assert padded > 0 or hosts == 2, "hosts have as many mini-batches as any other by themselves"
            last = [len(one["seen"]) // 2 for one in of]
            second = sum(len(seeds) for one, at in zip(of, last, strict=True) for seeds in one["seen"][at:])
            assert second == NODES // 3 + padded
            assert all(0 < one["kept"] < 1 for one in of)
        assert all((one["remote"] > 0) == (hosts > 1 and mode != "partitions") for one in of), mode
    if ranks == 1:
        left = [one["left out"] for one in told]
        assert len({len(one["seen"]) for one in left}) == 1
        seen = Counter(node for one in left for seeds in one["seen"] for node in seeds)
        assert set(seen.values()) == {1}
        assert len(seen) + sum(one["dropped"] for one in left) == NODES // 3


@pytest.mark.parametrize(
    ("mode", "when", "kind"),
    [
        ("compiled", "gather", "SIGKILL"), ("rolling", "gather", "SIGSTOP"), ("compiled", "train", "SIGKILL"),
        ("rolling", "train", "SIGKILL"), ("partitions", "train", "SIGSTOP"),
    ],
)  # fmt: skip
def test_a_host_that_is_gone_is_told_in_every_mode(
    folder: Path, context: Any, mode: str, when: str, kind: str
) -> None:
    """While rows are gathered no compiled trace is left that is not whole."""
    name = f"gone-{mode}-{when}"
    hosts = 3 if when == "gather" else 2
    processes = [
        context.Process(target=be_victim_or_not, args=(rank, hosts, str(folder), name, mode, when, kind))
        for rank in range(hosts)
    ]
    try:
        for process in processes:
            process.start()
        others = [process for rank, process in enumerate(processes) if rank != 1]
        for process in others:
            process.join(ALL_SECONDS)
        assert [process.exitcode for process in others] == [1] * (hosts - 1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    at = float((folder / f"{name}.at").read_text())
    for rank in (rank for rank in range(hosts) if rank != 1):
        said = json.loads((folder / f"{name}.told.{rank}").read_text())
        assert said["host"] == 1
        assert said["at"] - at < TIMEOUT_SECONDS + GRACE_SECONDS, said["at"] - at
        if (mode, when) == ("compiled", "gather"):  # whoever had gathered all before has a whole one
            assert set(said["left"]) <= {name}
            for one in said["left"]:
                assert featstore.verify(folder / f"parts{hosts}/host-{rank}/packs/{one}").ok
        else:
            assert said["left"] == ([name] if mode == "compiled" else [])


def test_what_one_host_finds_again_and_another_does_not(folder: Path, context: Any) -> None:
    """Nor what all find, where it is of mini-batches of another size: it says so. Of one that finds none the
    steps would not be equal."""
    assert all_of(context, reuse_unlike, 2, 2, str(folder), "unlike") == [1, 1]
    told = [json.loads((folder / f"unlike.told.{rank}").read_text()) for rank in range(2)]
    assert all("reuse= finds epochs of 7 mini-batches" in one[0] for one in told)
    assert told[0][1].startswith("ArgumentError: reuse= finds epochs of 7 mini-batches")
    assert told[1][1].startswith("PeerError: host 0")
