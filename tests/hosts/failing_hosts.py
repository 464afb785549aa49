"""What hosts do that are processes of their own, of which one cannot open its store."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import featstore
from featstore.errors import FeatstoreError
from featstore.hosts import split_store

TIMEOUT_SECONDS = 20.0  # of which hosts wait for three, where nobody tells them


def fail(*_: Any) -> Any:
    raise OSError(5, "the disk is gone")


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def try_to_open(rank: int, hosts: int, folder: str, name: str, bad: int, how: str, ranks: int = 1) -> None:
    """All open the store, of which rank ``bad`` cannot, and say how that ended; then all open it, in the same
    store of torch.distributed."""
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.meeting", rank=rank, world_size=hosts * ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    given: dict[str, Any] = {"path": f"parts{hosts}", "memory": "16MiB", "timeout_seconds": TIMEOUT_SECONDS}
    read_hosts = split_store.read_hosts
    if how == "swapped":
        given["path"] = f"swapped-{rank}"
    if rank == bad:
        if how in ("memory", "swapped"):
            given["memory"] = 1
        elif how in ("fail", "interrupt"):  # when all have come
            split_store.read_hosts = globals()[how]  # type: ignore[assignment]
        else:
            given["path"] = how
    dist.barrier()
    begin, said = time.monotonic(), dict[str, Any]()
    try:
        featstore.open_split(**given).close()
    except (FeatstoreError, OSError, KeyboardInterrupt) as error:
        cause = error.__cause__
        said = {
            "type": type(error).__name__, "text": str(error), "cause": type(cause).__name__,
            "notes": getattr(cause, "__notes__", []), "host": getattr(error, "host", None),
            "rank": getattr(error, "rank", None),
        }  # fmt: skip
    said["seconds"] = time.monotonic() - begin
    split_store.read_hosts = read_hosts
    Path(f"{name}.said.{rank}").write_text(json.dumps(said))
    given |= {"path": f"parts{hosts}", "memory": "16MiB"}
    with featstore.open_split(**given) as store:
        if store.place.leads:
            with store.reader(memory="16MiB") as reader:
                ids = np.arange(1200)
                assert (reader.read(ids) == np.load("features.npy")).all()
    dist.barrier()
    dist.destroy_process_group()


def fail_alone(rank: int, folder: str, name: str) -> None:
    """Rank 1 cannot open the store, and rank 0 never tries."""
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.meeting", rank=rank, world_size=2)
    if rank == 1:
        begin = time.monotonic()
        try:
            featstore.open_split("parts2", memory=1, timeout_seconds=TIMEOUT_SECONDS)
        except featstore.errors.BudgetError:
            assert time.monotonic() - begin < TIMEOUT_SECONDS / 2
        else:
            raise AssertionError
    dist.barrier()
    dist.destroy_process_group()
