"""The family among the golden stores: made anew to the byte, and read by featstore and by the reader that was
written from the specification alone."""

from __future__ import annotations

import json
import re
import shutil
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


def sealed(manifest: dict[str, Any]) -> bytes:
    """The text of a manifest, with the uuid that fits it."""
    text, uuid = json.dumps(manifest).encode(), manifest["uuid"]
    return text.replace(f'"uuid": "{uuid}"'.encode(), f'"uuid": "{uuid_of(text, uuid)}"'.encode(), 1)


def text_of(member: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SPLIT / member / "featstore.json").read_text())
    return found


def test_made_anew_to_the_byte(tmp_path: Path) -> None:
    made, kept = file_bytes(make_golden.make("split", tmp_path)), file_bytes(SPLIT)
    assert made.keys() == kept.keys()
    for path in kept:
        assert made[path] == kept[path], path


@pytest.mark.parametrize("member", MEMBERS)
def test_manifests_are_what_the_schema_says(member: str) -> None:
    VALIDATOR.validate(text_of(member))


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


@pytest.mark.parametrize(("member", "field", "value"), CHANGES)
def test_what_contradicts_itself_is_refused(member: str, field: str, value: Any, tmp_path: Path) -> None:
    shutil.copytree(SPLIT / member, tmp_path / "s")
    changed = text_of(member)
    if value is None:
        del changed["family"][field]
    else:
        changed["family"][field] = value
    (tmp_path / "s/featstore.json").write_bytes(sealed(changed))
    with pytest.raises(FeatstoreError):
        featstore.open(tmp_path / "s")
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        independent.Store(tmp_path / "s")


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
