"""The family among the golden stores: made anew to the byte, and read by featstore and by the reader that was
written from the specification alone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_golden import GOLDEN, V1, VALIDATOR, file_bytes, independent, little, make_golden, same

import featstore
from featstore.errors import FeatstoreError, FormatError
from featstore.storage.manifest import uuid_of

SPLIT = GOLDEN / "split"
MEMBERS = ("topology", "host-0", "host-1")


TOPOLOGY = GOLDEN / "split-topology"
VALUES = GOLDEN / "split-values"


def sealed(manifest: dict[str, Any]) -> bytes:
    """The text of a manifest, with the uuid that fits it."""
    text, uuid = json.dumps(manifest).encode(), manifest["uuid"]
    return text.replace(f'"uuid": "{uuid}"'.encode(), f'"uuid": "{uuid_of(text, uuid)}"'.encode(), 1)


def text_of(member: str, split: Path = SPLIT) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((split / member / "featstore.json").read_text())
    return found


@pytest.mark.parametrize("name", ["split", "split-topology", "split-values"])
def test_made_anew_to_the_byte(name: str, tmp_path: Path) -> None:
    made, kept = file_bytes(make_golden.make(name, tmp_path)), file_bytes(GOLDEN / name)
    assert made.keys() == kept.keys()
    for path in kept:
        assert made[path] == kept[path], path


@pytest.mark.parametrize("member", MEMBERS)
def test_manifests_are_what_the_schema_says(member: str) -> None:
    VALIDATOR.validate(text_of(member))
    VALIDATOR.validate(text_of(member, TOPOLOGY))
    VALIDATOR.validate(text_of(member, VALUES))


@pytest.mark.parametrize("member", MEMBERS)
def test_the_independent_reader_agrees(member: str) -> None:
    found = independent.Store(SPLIT / member)
    with featstore.open(SPLIT / member) as store:
        assert found.family == text_of(member)["family"]
        assert set(found.tables) == set(store.tables)
        for name, rows in found.tables.items():
            with store.reader(tables=[name], static=None, memory="16MiB", engine="threads") as reader:
                same(little(reader.read(np.arange(len(rows)))), rows)
        for name in store.arrays:
            same(store.arrays[name], found.arrays[name])
        offsets, sources = found.graphs["paper"]
        assert np.array_equal(store.graphs["paper"].offsets(), offsets)
        assert store.graphs["paper"].hubs > 0
        assert len(sources) == store.graphs["paper"].edges
    assert featstore.verify(SPLIT / member).ok
    ran = subprocess.run(
        [sys.executable, str(V1 / "reader.py"), str(SPLIT / member)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "of a split of 2 hosts" in ran.stdout


def test_the_parts_are_the_formulas() -> None:
    """By the specification's words alone: owners, local ids, lists and halos."""
    golden = make_golden.FAMILIES["split"]()
    topology = independent.Store(SPLIT / "topology")
    family = topology.family
    sources, targets = golden.options["graph"]["paper"]
    owner = topology.tables["paper"]
    assert len(np.unique(owner)) == 2
    for host in (0, 1):
        part = independent.Store(SPLIT / f"host-{host}")
        for name, rows in golden.tables.items():
            owned = topology.tables[name] == host
            same(part.tables[name], little(rows[owned]))
            first = family["first_rows"][name]
            assert first[host + 1] - first[host] == owned.sum()
        nodes = np.flatnonzero(owner == host)
        order = part.manifest["tables"]["paper"]["order"]
        own_order = part.array(order["node_of_row"])
        offsets, lists = part.graphs["paper"]
        for row, node in enumerate(nodes[own_order]):
            wanted = np.sort(sources[targets == node])
            found = nodes[own_order[lists[offsets[row] : offsets[row + 1]]]]
            assert found.tolist() == wanted[owner[wanted] == host].tolist()
        named = sources[(owner[targets] == host) & (owner[sources] != host)]
        ids, uses = np.unique(named, return_counts=True)
        assert part.arrays["paper.halo_ids"].tolist() == ids.tolist()
        assert part.arrays["paper.halo_uses"].tolist() == uses.tolist()
        assert family["remote_edges"]["paper"][host] == len(named)
        assert part.family["uuid"] == topology.manifest["uuid"]


CHANGES: list[tuple[str, str, Any]] = [
    ("host-1", "hosts", 1),
    ("host-1", "hosts", 2**16 + 1),
    ("host-1", "host", 0),
    ("host-1", "host", -1),
    ("host-1", "host", None),
    ("host-1", "uuid", "x"),
    ("topology", "base_uuid", ""),
    ("topology", "hosts", 300),
    ("topology", "first_rows", {}),
    ("topology", "first_rows", {"paper": [0, 1, 599], "note": [0, 0, 1]}),
    ("topology", "remote_edges", {"paper": [1]}),
    ("topology", "remote_edges", {"paper": [-1, 1]}),
    ("topology", "later", 1),
]


def check_refused(store: Path, changed: Any) -> None:
    """By featstore and by the independent reader, with such a manifest."""
    (store / "featstore.json").write_bytes(sealed(changed))
    with pytest.raises(FeatstoreError):
        featstore.open(store)
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        independent.Store(store)


@pytest.mark.parametrize(("member", "field", "value"), CHANGES)
def test_what_contradicts_itself_is_refused(member: str, field: str, value: Any, tmp_path: Path) -> None:
    shutil.copytree(SPLIT / member, tmp_path / "s")
    changed = text_of(member)
    if value is None:
        del changed["family"][field]
    else:
        changed["family"][field] = value
    check_refused(tmp_path / "s", changed)


def test_a_topology_that_counts_otherwise_is_refused(tmp_path: Path) -> None:
    """featstore looks at it where it follows it: when a split is gone on with."""
    shutil.copytree(SPLIT / "topology", tmp_path / "s")
    changed = text_of("topology")
    changed["family"]["first_rows"]["paper"][1] += 1
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    with pytest.raises(independent.Refused, match="hosts of paper"):
        independent.Store(tmp_path / "s")


def test_a_family_needs_its_feature(tmp_path: Path) -> None:
    shutil.copytree(SPLIT / "host-0", tmp_path / "s")
    changed = text_of("host-0")
    changed["reader_features"] = ["graphs"]
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    with pytest.raises(FormatError, match="family"):
        featstore.open(tmp_path / "s")
    with pytest.raises(independent.Refused, match="family"):
        independent.Store(tmp_path / "s")
    assert [e for e in VALIDATOR.iter_errors(changed) if re.search("contain", e.message)]


# Topology that is split, too.


def test_whole_lists_are_the_formulas() -> None:
    """By the specification's words alone: the lists of a host's nodes, by node id, and the numbers of their
    edges in the base store, whose lists stand in the order of its rows."""
    golden = make_golden.FAMILIES["split-topology"]()
    sources, targets = golden.options["graph"]["paper"]
    whole, topology = independent.Store(SPLIT / "topology"), independent.Store(TOPOLOGY / "topology")
    assert not topology.graphs
    assert topology.lists == {"paper": None}
    owner = topology.tables["paper"]
    same(owner, whole.tables["paper"])  # by node id
    same(topology.rows["paper"], owner)
    same(topology.arrays["labels"], whole.arrays["labels"])
    base = whole.array(whole.manifest["tables"]["paper"]["order"]["row_of_node"])
    begins = whole.graphs["paper"][0][base]
    for host in (0, 1):
        part, before = independent.Store(TOPOLOGY / f"host-{host}"), independent.Store(SPLIT / f"host-{host}")
        same(part.rows["paper"], before.rows["paper"])
        for one, two in zip(part.graphs["paper"], before.graphs["paper"], strict=True):
            same(one, two)
        nodes = np.flatnonzero(owner == host)[
            part.array(part.manifest["tables"]["paper"]["order"]["node_of_row"])
        ]
        offsets, lists, numbers = part.lists["paper"]
        for row, node in enumerate(nodes):
            assert (
                lists[offsets[row] : offsets[row + 1]].tolist() == np.sort(sources[targets == node]).tolist()
            )
            assert numbers[row] == begins[node]
        degrees = np.bincount(targets, minlength=len(owner))
        assert part.arrays["paper.halo_degrees"].tolist() == degrees[part.arrays["paper.halo_ids"]].tolist()
        assert featstore.verify(TOPOLOGY / f"host-{host}").ok


def test_what_is_kept_of_edges_is_what_was_given() -> None:
    """By the specification's words alone: beside each source of a list, as the user numbered the edges."""
    golden = make_golden.FAMILIES["split-values"]()
    sources, targets = golden.options["graph"]["paper"]
    owner = independent.Store(VALUES / "topology").tables["paper"]
    seen = []
    for host in (0, 1):
        part = independent.Store(VALUES / f"host-{host}")
        order = part.array(part.manifest["tables"]["paper"]["order"]["node_of_row"])
        nodes = np.flatnonzero(owner == host)[order]
        offsets, lists, _ = part.lists["paper"]
        of = part.list_parts["paper"]
        ids = of["edge_ids"]
        seen += ids.tolist()
        assert np.array_equal(sources[ids], lists)
        assert np.array_equal(targets[ids], np.repeat(nodes, np.diff(offsets)))
        same(golden.options["edge_weights"][ids], of["weights"])
        same(golden.options["edge_times"][ids], of["times"])
        assert part.graphs.keys() == {"paper"}
        assert part.edge_ids["paper"] is None
        assert part.weights["paper"] is not None
        assert featstore.verify(VALUES / f"host-{host}").ok
    assert sorted(seen) == list(range(len(sources)))


VALUE_CHANGES: list[tuple[tuple[str, ...], Any]] = [
    (("edge_ids", "rows"), 5), (("weights", "dtype"), "int32"), (("times", "dtype"), "float64"),
    (("weights", "row_shape"), [2]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), VALUE_CHANGES)
def test_values_that_contradict_themselves_are_refused(
    path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    shutil.copytree(VALUES / "host-1", tmp_path / "s")
    changed = text_of("host-1", VALUES)
    changed["family"]["split_graphs"]["paper"]["lists"][path[0]][path[1]] = value
    check_refused(tmp_path / "s", changed)


def test_values_need_their_feature(tmp_path: Path) -> None:
    shutil.copytree(VALUES / "host-0", tmp_path / "s")
    changed = text_of("host-0", VALUES)
    changed["reader_features"].remove("split-values")
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    with pytest.raises(FormatError, match="split-values"):
        featstore.open(tmp_path / "s")
    with pytest.raises(independent.Refused, match="needs the feature"):
        independent.Store(tmp_path / "s")


LIST_CHANGES: list[tuple[str, tuple[str, ...], Any]] = [
    ("topology", ("split_graphs", "paper", "table"), "other"),
    ("topology", ("split_graphs", "paper", "edges"), -1),
    ("host-1", ("split_graphs", "paper", "lists"), None),
    ("host-1", ("split_graphs", "paper", "edges"), 3),
    ("host-1", ("split_graphs", "paper", "lists", "run_rows", "dtype"), "int32"),
    ("host-1", ("split_graphs", "paper", "lists", "offsets", "rows"), 5),
    ("topology", ("remote_edges",), {}),
]


@pytest.mark.parametrize(("member", "path", "value"), LIST_CHANGES)
def test_split_graphs_that_contradict_themselves_are_refused(
    member: str, path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    shutil.copytree(TOPOLOGY / member, tmp_path / "s")
    changed = text_of(member, TOPOLOGY)
    inner = changed["family"]
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    check_refused(tmp_path / "s", changed)


def test_split_graphs_need_their_feature(tmp_path: Path) -> None:
    """By which a reader that knows nothing of them refuses the store."""
    shutil.copytree(TOPOLOGY / "host-0", tmp_path / "s")
    changed = text_of("host-0", TOPOLOGY)
    changed["reader_features"] = ["graphs", "family"]
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    with pytest.raises(FormatError, match="split-graphs"):
        featstore.open(tmp_path / "s")
    with pytest.raises(independent.Refused, match="split graphs"):
        independent.Store(tmp_path / "s")
    assert [e for e in VALIDATOR.iter_errors(changed) if re.search("contain", e.message)]


@pytest.mark.parametrize(("what", "value"), [("run_rows", -1), ("run_edges", 10**6)])
def test_runs_that_cannot_be_are_found_by_a_scrub(what: str, value: int, tmp_path: Path) -> None:
    """Though every page and digest is as it should be."""
    shutil.copytree(TOPOLOGY / "host-0", tmp_path / "s")
    changed = text_of("host-0", TOPOLOGY)
    path = changed["family"]["split_graphs"]["paper"]["lists"][what]["path"] + "/c.0"
    data = np.fromfile(tmp_path / "s" / path, "<i8")
    data[1] = value
    data.tofile(tmp_path / "s" / path)
    entry = next(file for file in changed["files"] if file["path"] == path)
    entry["digest"] = digest_of(data.tobytes())
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    report = featstore.verify(tmp_path / "s")
    assert [problem.path for problem in report.problems] == [path]
    with pytest.raises(independent.Refused, match="runs"):
        independent.Store(tmp_path / "s")


def digest_of(data: bytes) -> str:
    sums = list(independent.page_checksums(data))
    return hashlib.sha256(struct.pack(f"<{len(sums)}I", *sums)).hexdigest()
