"""A split that is killed, at any moment and with whatever the disk had made of it, leaves stores that are
whole or that nobody can open, the old split's until they are replaced; and going on gives the same split, to
the byte."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import IncompleteStoreError, StoreExistsError
from featstore.layout import table as table_module
from featstore.packing import permute

sys.path.insert(0, str(Path(__file__).parent))
from disks import SECTOR_BYTES, Op, RecordingDisk, loose_ops, materialise

NODES, VENUES, HOSTS = 160, 9, 2
rng = np.random.default_rng(7)
PAPERS, OTHERS = (
    rng.random((NODES, 25)).astype(np.float32),
    rng.integers(0, 255, (VENUES, 2)).astype(np.uint8),
)
SOURCES, TARGETS = rng.integers(0, NODES, (2, 900))
MEMBERS = ("topology", "host-0", "host-1")
WAYS: dict[str, dict[str, Any]] = {
    "copies": {"halo_disk": "0.3x"},
    "lists": {"halo_disk": "0.3x", "split_topology": True},
}
Tree = dict[str, bytes]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """A table with a graph, in partitions, beside one without."""
    with featstore.pack(
        tmp_path_factory.mktemp("split") / "s", {"paper": PAPERS, "venue": OTHERS},
        graph={"paper": np.stack([SOURCES, TARGETS])}, hubs=0.1, arrays={"y": np.arange(7)},
        order={"paper": "ldg", "venue": "given"}, partitions={"paper": 32},
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch, store: featstore.Store) -> None:
    """Several chunks and checkpoints in parts of 8 kB."""
    monkeypatch.setattr(table_module.TableLayout.choose.__func__, "__defaults__", (4096,))
    monkeypatch.setattr(permute, "CHECKPOINT_BYTES", 4096)
    monkeypatch.setattr(permute, "SOURCE_BLOCK_BYTES", 2048)


def tree(path: Path) -> Tree:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def rows_of(store: featstore.Store, name: str) -> np.ndarray:
    with store.reader(memory="4MiB", engine="threads", tables=[name], static=None) as reader:
        found: np.ndarray = reader.read(np.arange(store.tables[name].rows))
    return found


def check_rows(out: Path, hosts: int = HOSTS) -> None:
    """Each host has the rows of its nodes, and knows which of others its lists name."""
    with featstore.open(out / "topology") as topology:
        owner = {name: rows_of(topology, name) for name in topology.tables}
    for host in range(hosts):
        with featstore.open(out / f"host-{host}") as part:
            for name, rows in (("paper", PAPERS), ("venue", OTHERS)):
                assert np.array_equal(rows_of(part, name), rows[owner[name] == host])
            mine = owner["paper"][TARGETS] == host
            others = np.unique(SOURCES[mine & (owner["paper"][SOURCES] != host)])
            assert np.array_equal(part.arrays["paper.halo_ids"], others)
            assert len(copies := part.arrays["paper.halo_nodes"]) > 5
            assert np.array_equal(rows_of(part, "paper.halo"), PAPERS[copies])
        assert featstore.verify(out / f"host-{host}").ok


def commits(ops: list[Op]) -> dict[str, int]:
    """The operation that makes each store whole, the last of its name."""
    return {op.target.split("/")[-2]: i for i, op in enumerate(ops) if op.target.endswith("/featstore.json")}


def some_states(ops: list[Op], first: int, count: int) -> Iterator[tuple[int, str, list[Op]]]:
    """(how many operations there were, label, those that reached the disk) of crash states after ``first``
    operations or more: of the moments around each commit, and of ``count`` others, which are other ones each
    hour. Of each moment what has lost all that it may, and what has lost or torn some of it."""
    turn = random.Random(os.environ["TEST_TURN"])
    moments = {c + k for c in commits(ops).values() for k in range(4) if first <= c + k <= len(ops)}
    moments |= {*turn.sample(range(first, len(ops) + 1), count), len(ops)}
    for n in sorted(moments):
        loose = {*loose_ops(ops[:n])}
        yield n, f"{n}: none", [op for i, op in enumerate(ops[:n]) if i not in loose]
        share = turn.choice([0.1, 0.5, 0.9])
        lost = {i for i in sorted(loose) if turn.random() < share}
        torn = {i for i in sorted(loose) if len(ops[i].data) > SECTOR_BYTES and turn.random() < 0.3}
        kept = [torn_half(op) if i in torn else op for i, op in enumerate(ops[:n]) if i not in lost]
        yield n, f"{n}: without {sorted(lost)}, torn {sorted(torn - lost)}", kept


def torn_half(op: Op) -> Op:
    return replace(op, data=op.data[: -(-len(op.data) // 2 // SECTOR_BYTES) * SECTOR_BYTES])


def whole(path: Path) -> Tree | None:
    """The files of a store that opens; None of one that says that there is none."""
    try:
        with featstore.open(path) as store:
            named = {file.path for file in store.manifest.files}
    except IncompleteStoreError:
        return None
    found = tree(path)
    return {name: data for name, data in found.items() if name in named or name == "featstore.json"}


def without_journals(found: Tree) -> Tree:
    """What is left of a split that was stopped right after it had made a store whole is not looked at."""
    return {name: data for name, data in found.items() if ".journal" not in name}


@pytest.mark.parametrize("way", WAYS)
def test_every_crash_state_has_whole_stores_or_none_and_can_go_on(tmp_path, store, way):
    disk = RecordingDisk(tmp_path)
    featstore.split(store, HOSTS, tmp_path / "out", disk=disk, **WAYS[way])
    check_rows(tmp_path / "out")
    wanted, made = tree(tmp_path / "out"), commits(disk.ops)
    assert tuple(made) == MEMBERS
    of = {name: whole(tmp_path / "out" / name) for name in MEMBERS}
    out, ends = tmp_path / "state/out", set()
    for turn, (n, label, kept) in enumerate(some_states(disk.ops, 0, 9)):
        materialise(kept, tmp_path / "state")
        there = 0
        for name in MEMBERS:
            found = whole(out / name)
            assert found in (None, of[name]), (label, name)
            assert n <= made[name] + 1 or found, (label, name)
            assert n > made[name] or not found, (label, name)
            there += found is not None
        if turn % 3:
            continue
        try:
            featstore.split(store, HOSTS, out, resume=True, **WAYS[way])
            ends.add(f"gone on with after {there}")
        except IncompleteStoreError as error:
            assert "nothing to resume" in str(error), label
            assert there == 0, label
            featstore.split(store, HOSTS, out, **WAYS[way])
        except StoreExistsError as error:
            assert "was completed" in str(error), label
            assert there == len(MEMBERS), label
            ends.add("completed")
        assert without_journals(tree(out)) == wanted, label
    assert ends > {"gone on with after 1", "gone on with after 2"}


def by_content(path: Path) -> Tree:
    """The files of a split, whatever the numbers of the generations, and the uuids that follow from them."""
    number, uuid = rb"\bg[0-9]{6}\b", rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    found = {}
    for name, data in without_journals(tree(path)).items():
        if name.endswith("featstore.json"):
            data = re.sub(uuid, b"", re.sub(number, b"g", data))
        found[re.sub(r"/g[0-9]{6}/", "/g/", name)] = data
    return found


def test_what_replaces_another_split_leaves_each_store_of_it_or_the_new_one(tmp_path, store):
    """One of three hosts by one of two: until a store of it is replaced it is whole, to the byte."""
    out, disk = tmp_path / "out", RecordingDisk(tmp_path)
    featstore.split(store, 3, out, disk=disk, **WAYS["copies"])
    check_rows(out, 3)
    first = len(disk.ops)
    before = {name: whole(out / name) for name in (*MEMBERS, "host-2")}
    featstore.split(store, HOSTS, out, seed=1, overwrite=True, disk=disk, **WAYS["copies"])
    check_rows(out)
    wanted, made = by_content(out), commits(disk.ops)
    after = {name: whole(out / name) for name in MEMBERS}
    assert all(before.values())
    out, again, replaced = tmp_path / "state/out", 0, set()
    for turn, (n, label, kept) in enumerate(some_states(disk.ops, first, 7)):
        materialise(kept, tmp_path / "state")
        for name in MEMBERS:
            found = whole(out / name)
            assert found in (before[name], after[name]), (label, name)
            assert n > made[name] or found == before[name], (label, name)
            assert n <= made[name] + 1 or found == after[name], (label, name)
            replaced.add((name, found == after[name]))
        gone = whole(out / "host-2")
        assert gone in (None, before["host-2"]), label
        assert gone or n > made["host-1"] + 1, label
        if turn % 5:
            continue
        there = tree(out)
        with pytest.raises(StoreExistsError, match=r"was completed|start anew with --overwrite"):
            featstore.split(store, HOSTS, out, seed=1, resume=True, **WAYS["copies"])
        assert tree(out) == there, label
        featstore.split(store, HOSTS, out, seed=1, overwrite=True, **WAYS["copies"])
        assert by_content(out) == wanted, label
        again += 1
    assert again > 5
    assert len(replaced) == 2 * len(MEMBERS)
