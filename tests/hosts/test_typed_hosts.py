"""Stores with edge types over hosts: mini-batches are those of the whole store, whatever the mode and the
number of hosts."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fault_hosts import all_of, forked_from
from test_split_training import graph_and_rows
from typed_hosts import SEEDS, Source, be_typed_host

import featstore
from featstore.errors import FeatstoreWarning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("typed-hosts")
    graph_and_rows(made, pack, 1)  # by which processes have their kernels
    made = made / "typed"
    made.mkdir()
    with Source().pack(made / "s") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatstoreWarning)  # so few nodes cannot always be even
        for hosts in (1, 2, 3):
            copies = "1x" if hosts == 3 else None
            featstore.split(store, hosts, made / f"parts{hosts}", train="paper.train", halo_disk=copies)
    return made


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_mini_batches_are_those_of_the_whole_store(folder: Path, hosts: int) -> None:
    """Rows, edges, numbers of edges and arrays, with every host's own seeds, each of which comes in every
    epoch, in as many steps on each host."""
    if hosts == 1:
        be_typed_host(0, 1, str(folder))
    else:
        assert all_of(forked_from(folder.parent), be_typed_host, hosts, hosts, str(folder)) == [0] * hosts
    told = [json.loads((folder / f"told{hosts}.{rank}.json").read_text()) for rank in range(hosts)]
    assert len(told[0]) == (6 if hosts == 2 else 3)
    for what in told[0]:
        of = [one[what] for one in told]
        assert len({one["steps"] for one in of}) == 1, what
        seen = Counter(node for one in of for node in one["seen"])
        assert set(seen) == set(SEEDS.tolist()), what
        assert min(seen.values()) == (2 if what in ("online", "rolling") else 1)
        assert all((one["remote"] > 0) == (hosts > 1) for one in of), what
