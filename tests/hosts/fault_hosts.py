"""What hosts do that are processes of their own, until one of them is killed, stopped or cut off."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing as mp
import os
import random
import signal
import socket
import stat
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import featstore
from featstore.errors import PeerError
from featstore.hosts import messages as ms
from featstore.hosts.beside import Beside
from featstore.hosts.owners import Owners
from featstore.loaders.host import mode as host_mode
from featstore.loaders.host.service import HostService

SECONDS = 40.0  # after which a host says that nothing has happened
ALL_SECONDS = 90.0  # after which processes that should end have failed
WRONG_ROWS = 77  # exit code


def sockets() -> set[int]:
    """File descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
        except OSError:
            continue
    return found


def cut(lines: set[int], begun: list[Path], after: float) -> None:
    """Shut these connections down, as a network does, so many seconds after these files are there."""
    while not all(path.exists() for path in begun):
        time.sleep(0.01)
    time.sleep(after)
    for number in lines:
        with socket.socket(fileno=os.dup(number)) as one:
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with suppress(OSError):  # it is closed already
                    one.shutdown(socket.SHUT_RDWR)


def check(rows: Any, ids: Any, features: Any) -> None:
    if not (np.asarray(rows) == features[ids]).all():
        os._exit(WRONG_ROWS)


def be_host(
    rank: int, hosts: int, folder: str, name: str, train: bool, cut_after: float | None, ranks: int = 1,
    slowly: bool = False, stays: bool = False,
) -> None:  # fmt: skip
    """Read or train until something goes wrong. ``cut_after``: seconds until this host's lines are cut.
    ``ranks``: of each host, which share a loader. ``slowly``: it takes a second to make that loader, once all
    ranks of the host have met. ``stays``: it opens the store, and does not make its loader."""
    faulthandler.register(signal.SIGUSR1)  # says where one is that should have ended
    if slowly:
        host_mode.HostService = partial(slow_service, name, rank)  # type: ignore[misc, assignment]
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {"LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    features = np.load("features.npy")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.meeting", rank=rank, world_size=hosts * ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    Path(f"{name}.begun.{rank}").touch()
    try:
        shared = f"{folder}/{name}" if ranks > 1 else False
        work(rank, hosts, name, train, cut_after, features, shared, stays)
    except PeerError as error:
        said = {"host": error.host, "rank": error.rank, "what": error.what, "at": time.time()}
        Path(f"{name}.told.{rank}").write_text(json.dumps(said))
        raise


def be_beside(store: str) -> None:
    """Say where this process is, as rank 1, and stay."""
    said = Beside(dist.FileStore(store, 2), 1, [0], 300.0)
    time.sleep(ALL_SECONDS)
    del said


def slow_service(name: str, rank: int, *arguments: Any) -> HostService:
    *others, make = arguments

    def make_slowly(ranks: tuple[int, ...], memory_bytes: int) -> Any:
        for one in ranks:
            Path(f"{name}.making.{one}").touch()
        time.sleep(1)
        return make(ranks, memory_bytes)

    return HostService(*others, make_slowly)


def work(
    rank: int, hosts: int, name: str, train: bool, cut_after: float | None, features: Any,
    shared: str | bool = False, stays: bool = False,
) -> None:  # fmt: skip
    before, end = sockets(), time.monotonic() + SECONDS  # before: those of the run
    rng = np.random.default_rng(rank)
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=3) as store:
        Path(f"{name}.opened.{rank}").touch()
        time.sleep(SECONDS if stays else 0)
        if cut_after is not None:
            lines, begun = sockets() - before, [Path(f"{name}.open.{rank}") for rank in range(hosts)]
            threading.Thread(target=cut, args=(lines, begun, cut_after), daemon=True).start()
        if not train:
            with store.reader(memory="16MiB") as reader:
                while time.monotonic() < end:
                    ids = rng.integers(0, len(features), 300)
                    check(reader.read(ids), ids, features)
                    Path(f"{name}.open.{rank}").touch()
            return
        with loader_of(store, name, shared=shared) as loader, open(f"{name}.log.{rank}", "w") as log:
            while time.monotonic() < end:
                for number, batch in enumerate(loader):
                    check(batch.x, batch.n_id, features)
                    Path(f"{name}.open.{rank}").touch()
                    log.write(json.dumps(batch.n_id.tolist()) + "\n")
                    if number % 4 == 0:
                        log.flush()
                        made = json.dumps(loader.state_dict())
                        Path(f"{name}.state.{rank}.new").write_text(made)
                        os.replace(f"{name}.state.{rank}.new", f"{name}.state.{rank}")


KEPT = "8KiB", featstore.Buffer("lru", "160KiB"), featstore.MassiveGNN(0.25, delta=2), None


def kept_by(name: str) -> int:
    """The number of what is kept of other hosts' rows where this is the name."""
    return random.Random(f"halo of {name}").choice(range(len(KEPT)))


def loader_of(store: Any, name: str = "", **options: Any) -> Any:
    """With a ``name`` it keeps rows of other hosts in a way that follows from it."""
    options |= {"halo": KEPT[kept_by(name)]} if name and KEPT[kept_by(name)] is not None else {}
    return store.loader(seeds="train", fanouts=(4, 3), batch_size=10, memory="48MiB", **options)


def go_on(rank: int, hosts: int, folder: str, name: str, steps: int) -> None:
    """From the state that was saved, and from the beginning: that many mini-batches each."""
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}.again", rank=rank, world_size=hosts,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    features = np.load("features.npy")
    with featstore.open_split(f"parts{hosts}", memory="16MiB", timeout_seconds=20) as store:
        for what in ("rest", "whole"):
            made: list[list[int]] = []
            with loader_of(store, name if what == "rest" else "") as loader:
                if what == "rest":
                    loader.load_state_dict(json.loads(Path(f"{name}.state.{rank}").read_text()))
                while len(made) < steps:
                    for batch in loader:
                        check(batch.x, batch.n_id, features)
                        made.append(batch.n_id.tolist())
                        if len(made) == steps:
                            break
            Path(f"{name}.{what}.{rank}").write_text(json.dumps(made))
    dist.destroy_process_group()


def open_again(rank: int, folder: str) -> None:
    """Host 0 fails, which host 1 is told; it comes too late, and host 1 gives it up; then both try again."""
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/again.meeting", rank=rank, world_size=2)
    gave_up = Path("gave-up")
    try:
        featstore.open_split("parts2", memory=1 if rank == 0 else "16MiB", timeout_seconds=20)
    except featstore.errors.BudgetError:
        assert rank == 0
    except PeerError as error:
        assert rank == 1
        assert "host 0 (rank 0) could not open its store (BudgetError: " in str(error), error
    if rank == 0:
        while not gave_up.exists():
            time.sleep(0.05)
    else:
        try:
            featstore.open_split("parts2", memory="16MiB", timeout_seconds=0.4)
        except PeerError as error:
            assert "host 0 (rank 0) has not come within 1.2 seconds" in str(error), error
            gave_up.write_text("")
    for _ in range(2):  # one that was opened is over, too
        with (
            featstore.open_split("parts2", memory="16MiB", timeout_seconds=20) as store,
            store.reader(memory="16MiB") as reader,
        ):
            reader.read(np.arange(1200))
    dist.destroy_process_group()


def forked_from(folder: Path) -> Any:
    """A context of processes that begin with all imported, and kernels loaded: as what is in ``folder`` needs
    them, where it is the first that asks."""
    os.environ["FAULT_HOSTS_WARM"] = str(folder)
    # the server that forks them does not have sys.path, and passes over what it cannot import
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["fault_hosts", "mode_hosts"])
    return made


def all_of(context: Any, target: Any, count: int, *arguments: Any) -> list[int]:
    """The exit codes of so many processes."""
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(ALL_SECONDS)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def warm(folder: str) -> None:
    """Have all kernels, in the process that others are forked from."""
    os.chdir(folder)
    torch.set_num_threads(1)
    with featstore.open_split("parts1", memory="16MiB") as store:
        with store.reader(memory="16MiB") as reader:
            reader.read(np.arange(9))
        for mode in ("online", "compiled", "rolling", "partitions"):
            with loader_of(store, mode=mode) as loader:
                for _ in loader:
                    pass
    whole = np.zeros(3, np.uint8)
    Owners("t", whole, 0, 2)
    ms.seal(ms.message(9), ms.Kind.PING)


if "FAULT_HOSTS_WARM" in os.environ:
    warm(os.environ["FAULT_HOSTS_WARM"])
