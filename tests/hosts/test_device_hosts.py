"""Hosts that train on an accelerator (CUDA), where there is one, with nccl as the group of the run."""

from __future__ import annotations

import json
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no accelerator here", allow_module_level=True)

from device_hosts import be_device_host  # noqa: E402
from fault_hosts import all_of  # noqa: E402
from mode_hosts import NODES  # noqa: E402
from test_split_training import graph_and_rows  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("devices")
    graph_and_rows(made, pack, 1, 2)
    return made


@pytest.mark.parametrize(("hosts", "backend"), [(1, "nccl"), (2, "nccl"), (2, "gloo")])
def test_every_mode_over_hosts_with_a_device(folder: Path, hosts: int, backend: str) -> None:
    """Of one host gradients go over nccl; of two that share a device, over gloo."""
    context, name = mp.get_context("spawn"), f"{backend}{hosts}"
    given = hosts, hosts, str(folder), name, backend, "cuda"
    assert all_of(context, be_device_host, *given) == [0] * hosts
    told = [json.loads((folder / f"{name}.told.{rank}").read_text()) for rank in range(hosts)]
    for key in told[0]:
        of = [one[key] for one in told]
        assert {node for one in of for node in one["seeds"]} == set(range(0, NODES, 3)), key
        assert len({len(one["losses"]) for one in of}) == 1, key
        assert all(one["weights"] == of[0]["weights"] for one in of), key
        if hosts > 1 and "partitions" not in key:
            assert all(one["remote"] > 0 for one in of), key
