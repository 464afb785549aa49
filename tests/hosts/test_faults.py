"""Hosts as processes, over gloo, of which one is killed, stopped, or cut off at any moment: all others end
with PeerError, which names it, in time, and never with rows that are not the source's. A restart goes on with
the mini-batches that were left.

``FAULT_MOMENTS``: moments of each kind, 1 by default; other ones whenever ``TEST_TURN`` is another."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import fault_hosts
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from test_split_training import graph_and_rows

from featstore.errors import PeerError
from featstore.hosts.beside import Beside
from featstore.hosts.beside import _ends as beside_sockets
from featstore.hosts.meeting import Rendezvous
from featstore.hosts.opening import Opening
from featstore.hosts.places import HostPlace
from featstore.loaders.host.line import pair
from featstore.loaders.host.place import Place
from featstore.loaders.host.service import HostService

MOMENTS = int(os.environ.get("FAULT_MOMENTS", "1"))
TURN = os.environ["TEST_TURN"]
TIMEOUT_SECONDS, GRACE_SECONDS = 3, 8  # the grace is of a machine that has other things to do
START_SECONDS, COMPILE_SECONDS = 40.0, 120.0
KINDS = ["SIGKILL", "SIGSTOP", "cut"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("faults")
    graph_and_rows(made, pack)
    return made


@pytest.fixture(scope="module")
def context(folder: Path) -> Any:
    """What makes hosts. Some have read and trained once, with whatever is kept of others' rows, so that in no
    test kernels are compiled while its time runs."""
    made = fault_hosts.forked_from(folder)
    named = {fault_hosts.kept_by(name): name for name in (f"before-{n}" for n in range(100))}
    assert len(named) == len(fault_hosts.KEPT)
    for name, train in [("before", False), *((name, True) for name in named.values())]:
        processes = [
            made.Process(target=fault_hosts.be_host, args=(rank, 2, str(folder), name, train, None))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        try:
            wait_for([folder / f"{name}.open.{rank}" for rank in range(2)], COMPILE_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return made


def wait_for(paths: list[Path], seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "hosts have not begun"
        time.sleep(0.01)


def fault(
    folder: Path, context: Any, kind: str, hosts: int, name: str, *, train: bool, opening: bool = False,
    late: float = 0.0, ranks: int = 1, making: bool = False,
) -> Any:  # fmt: skip
    """One fault at a moment that follows from its name, as does what is kept of the halo, or ``late``;
    (victim, what the others were told). Of hosts with several ``ranks`` it is any of these. ``opening``,
    ``making``: from when all open the store, or make their loaders, rather than from when they read."""
    draw, world = random.Random(name), hosts * ranks
    victim = draw.randrange(world)
    moment = late + draw.uniform(0, 0.3 if opening else 0.1 if making else 0.8)
    begun = "begun" if opening else "making" if making else "open"
    cuts = [moment if kind == "cut" and rank == victim else None for rank in range(world)]
    processes = [
        context.Process(
            target=fault_hosts.be_host,
            args=(rank, hosts, str(folder), name, train, cuts[rank], ranks, making),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        wait_for([folder / f"{name}.{begun}.{rank}" for rank in range(world)])
        time.sleep(moment)
        if kind != "cut":
            os.kill(processes[victim].pid, getattr(signal, kind))
        at = time.time()
        others = [rank for rank in range(world) if rank != victim]
        patience = (3 if opening else 1) * TIMEOUT_SECONDS + GRACE_SECONDS
        for rank in others:
            processes[rank].join(max(0.0, at + patience + GRACE_SECONDS - time.time()))
        if kind == "cut":  # who is cut off has lost all others
            processes[victim].join(GRACE_SECONDS)
            assert processes[victim].exitcode == 1
        codes = [processes[rank].exitcode for rank in others]
        late = [rank for rank in others if codes[others.index(rank)] is None]
        for rank in late:
            os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(bool(late))
        assert codes == [1] * len(others), (kind, name, codes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    told = [json.loads((folder / f"{name}.told.{rank}").read_text()) for rank in others]
    assert all(one["at"] - at < patience for one in told), told
    return victim, told


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_others_are_told_of_a_host_that_is_gone(
    folder: Path, context: Any, kind: str, hosts: int, moment: int
) -> None:
    name = f"{kind}{hosts}-{moment}-{TURN}"
    victim, told = fault(folder, context, kind, hosts, name, train=hosts == 3)
    assert [(one["host"], one["rank"]) for one in told] == [(victim, victim)] * (hosts - 1), told


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("making", [False, True])
@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(
    ("kind", "what"), [("SIGSTOP", "has said nothing for 3 seconds"), ("SIGKILL", "has died")]
)
def test_ranks_of_a_host_of_which_one_is_gone_are_told(
    folder: Path, context: Any, kind: str, what: str, leads: bool, making: bool, moment: int
) -> None:
    """The one that reads for its host, and one that is read for: those beside it, and other hosts."""
    seeds = (f"beside-{kind}-{leads}-{making}-{moment}-{TURN}-{number}" for number in range(100))
    name = next(one for one in seeds if random.Random(one).randrange(4) % 2 == (not leads))
    victim, told = fault(folder, context, kind, 2, name, train=True, ranks=2, making=making)
    assert [one["host"] for one in told] == [victim // 2] * 3, told
    known = [one["rank"] == victim and what in one["what"] for one in told]
    assert any(known) if leads else all(known), told  # who leads tells of it


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_gone_before_those_of_its_host_have_met(
    folder: Path, context: Any, kind: str, leads: bool
) -> None:
    """Those beside it, who wait for it to make its loader, and other hosts do not wait for two minutes."""
    ranks = 2 if leads else 3  # those who have met the one that leads have not died with it
    name, victim, world = f"unmet-{kind}-{leads}-{TURN}", ranks if leads else 2 * ranks - 1, 2 * ranks
    processes = [
        context.Process(
            target=fault_hosts.be_host,
            args=(rank, 2, str(folder), name, True, None, ranks, False, rank == victim),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        wait_for([folder / f"{name}.opened.{rank}" for rank in range(world)])
        time.sleep(0.5)  # others wait for it
        os.kill(processes[victim].pid, getattr(signal, kind))
        end = time.monotonic() + TIMEOUT_SECONDS + 2 * GRACE_SECONDS
        others = [rank for rank in range(world) if rank != victim]
        for rank in others:
            processes[rank].join(max(0.0, end - time.monotonic()))
        assert [processes[rank].exitcode for rank in others] == [1] * len(others)
    finally:
        for process in processes:
            process.kill()
            process.join()
    told = [json.loads((folder / f"{name}.told.{rank}").read_text()) for rank in others]
    assert [one["host"] for one in told] == [1] * len(others), told
    what = "has died" if kind == "SIGKILL" else "has been stopped"
    known = [one["rank"] == victim and what in one["what"] for one in told]
    assert any(known) if leads else all(known), told


def test_who_stands_still_is_known_when_there_is_no_time_left(tmp_path: Path, context: Any) -> None:
    """However long it may; until then it is not given up, nor once it goes on."""
    beside = Beside(dist.FileStore(str(tmp_path / "store"), 2), 0, [1], 300.0)
    other = context.Process(target=fault_hosts.be_beside, args=(str(tmp_path / "store"),))
    other.start()

    def told(now: bool, what: str) -> None:
        end, found = time.monotonic() + START_SECONDS, beside.gone(now)
        while (found is None) == bool(what) or (found is not None and what not in found[1]):
            assert time.monotonic() < end, (found, what)
            time.sleep(0.05)
            found = beside.gone(now)
        assert found is None or found[0] == 1

    try:
        while not beside._names[1]:
            told(True, "")
        os.kill(other.pid, signal.SIGSTOP)
        told(True, "has been stopped (SIGSTOP)")
        time.sleep(0.3)  # until it looks again
        told(False, "")
        os.kill(other.pid, signal.SIGCONT)
        told(True, "")
        other.kill()
        told(False, "has died")
    finally:
        beside_sockets.forked()  # closes those of this process
        other.kill()
        other.join()


def test_who_has_ended_before_anybody_looked_is_known_when_there_is_no_time_left(
    tmp_path: Path, context: Any
) -> None:
    """It may have been begun again, until then."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    other = context.Process(target=fault_hosts.be_beside, args=(str(tmp_path / "store"),))
    other.start()
    end = time.monotonic() + START_SECONDS
    while not store.check(["featstore/hosts/process//1"]):
        assert time.monotonic() < end
        time.sleep(0.05)
    other.kill()
    other.join()
    try:
        beside = Beside(store, 0, [1], 300.0)
        assert beside.gone() is None
        assert beside.gone(True) == (1, "has died")
    finally:
        beside_sockets.forked()


def test_other_hosts_are_told_of_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """At once, and not when the store is closed."""

    class Gone:
        def gone(self, now: bool = False) -> tuple[int, str]:
            return 3, "has died"

    told: list[PeerError] = []
    place = Place(0, 2, str(tmp_path), HostPlace(1, 2, 0, 2, 1), 3.0, Gone(), told.append)  # type: ignore[arg-type]
    own, mine = pair()
    with pytest.raises(PeerError, match=r"host 1 \(rank 3\) has died") as error:
        HostService(place, 2, {}, 1 << 20, own, lambda *_: None)  # type: ignore[arg-type, return-value]
    assert told == [error.value]
    own.close()
    mine.close()


def test_a_host_that_has_all_rows_that_it_wants_is_told_too(folder: Path, context: Any) -> None:
    """Its loader asks for none any more, and would go on by itself."""
    victim, told = fault(folder, context, "SIGKILL", 2, f"late-{TURN}", train=True, late=3)
    assert [one["host"] for one in told] == [victim]


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_a_host_that_is_gone_while_all_open_the_store(
    folder: Path, context: Any, kind: str, moment: int
) -> None:
    name = f"opening-{kind}-{moment}-{TURN}"
    victim, told = fault(folder, context, kind, 2, name, train=False, opening=True)
    assert [one["host"] for one in told] == [victim]


def test_a_host_that_was_there_and_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it died while the others connected to it, which gloo tries five times in a row."""
    done, place = threading.Event(), HostPlace(0, 2, 0, 1, 0)

    def connecting(*_: Any) -> None:
        done.wait(60)
        raise RuntimeError("too late")

    monkeypatch.setattr(c10d, "ProcessGroupGloo", connecting)
    monkeypatch.setattr(c10d, "_get_default_store", lambda: dist.FileStore(str(tmp_path / "meeting"), 2))
    other = dist.FileStore(str(tmp_path / "meeting"), 2)
    meeting, opening = Rendezvous(other, 1, range(2)), Opening()
    there = threading.Thread(target=lambda: [meeting.reach(stage, 10) for stage in ("come", "ready")])
    there.start()
    begin = time.monotonic()
    opening.come(place, 0.2)
    with pytest.raises(PeerError, match=r"host 1.*within 0\.6 seconds.*did not answer"):
        opening.open_wire()
    assert time.monotonic() - begin < 5
    there.join(10)
    done.set()


def test_hosts_of_which_one_had_failed_open_the_store_again(folder: Path, context: Any) -> None:
    """However often each has tried before."""
    (folder / "gave-up").unlink(missing_ok=True)
    assert fault_hosts.all_of(context, fault_hosts.open_again, 2, str(folder)) == [0, 0]


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_restart_goes_on_with_the_mini_batches_that_were_left(
    folder: Path, context: Any, moment: int
) -> None:
    """Of each host those before the state that was saved and those after it are those of a run in which
    nothing happened."""
    name = f"restart-{moment}-{TURN}"
    fault(folder, context, "SIGKILL", 2, name, train=True)
    logged = [
        [json.loads(line) for line in (folder / f"{name}.log.{rank}").read_text().splitlines(True)[:-1]]
        for rank in range(2)
    ]
    again = [
        context.Process(
            target=fault_hosts.go_on, args=(rank, 2, str(folder), name, max(map(len, logged)) + 90)
        )
        for rank in range(2)
    ]
    for process in again:
        process.start()
    for process in again:
        process.join(START_SECONDS)
    assert [process.exitcode for process in again] == [0, 0]
    for rank in range(2):
        rest, whole = (json.loads((folder / f"{name}.{w}.{rank}").read_text()) for w in ("rest", "whole"))
        assert logged[rank] == whole[: len(logged[rank])]
        begin = whole.index(rest[0])
        assert 0 < begin <= len(logged[rank]) + 1
        assert whole[begin:] == rest[: len(whole) - begin]


ENDS = """
import os, signal, subprocess, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
import featstore
how, rank = sys.argv[1], int(os.environ.get("RANK", sys.argv[-1]))
if how.startswith("SIG") or how == "cut":  # under torchrun
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
features = np.load("features.npy")
if how == "cut":
    from fault_hosts import cut, sockets
    before = sockets()
store = featstore.open_split("parts2", memory="16MiB", timeout_seconds=3)
with store.reader(memory="16MiB") as reader:
    for step in range(10**6):
        ids = np.random.default_rng([rank, step]).integers(0, 1200, 300)
        assert (reader.read(ids) == features[ids]).all()
        if step == 20 and rank == 1:
            if how == "error":
                raise ZeroDivisionError("on purpose")
            if how == "cut":
                cut(sockets() - before, [], 0)
                continue
            if how == "SIGSTOP":  # torchrun ends it only when it goes on
                subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"], start_new_session=True)
            if how.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, how))
            break
"""


@pytest.mark.parametrize(("how", "code"), [("error", 1), pytest.param("end", 0, marks=pytest.mark.thorough)])
def test_a_process_that_leaves_the_store_open_ends_as_it_would(folder: Path, how: str, code: int) -> None:
    """Its threads are waiting for the network when the interpreter goes, and do not end it by SIGABRT; others
    are told."""
    made = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, how, str(folder / f"{how}.meeting"), str(rank)], cwd=folder,
            stderr=subprocess.PIPE, text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TEST_HOW_IT_ENDS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=START_SECONDS)[1] for one in made]
    finally:
        for one in made:
            one.kill()
    assert [one.returncode for one in made] == [1, code], said
    assert "PeerError: host 1 (rank 1) " in said[0]  # why, it can say only where it is quick enough
    assert ("on purpose" in said[1]) == (how == "error")


@pytest.mark.parametrize(
    ("kind", "why", "code"),
    [
        ("SIGSTOP", r"PeerError: host 1 \(rank 1\) was not heard of for 3 seconds", "1"),
        pytest.param("SIGKILL", "", "-9", marks=pytest.mark.thorough),
        pytest.param("cut", r"PeerError: host [01] \(rank [01]\) is gone", "1", marks=pytest.mark.thorough),
    ],
)
def test_under_torchrun_it_is_the_error_of_the_process(folder: Path, kind: str, why: str, code: str) -> None:
    """And not a signal: torchrun names the error and exit code 1. It ends the others itself where one is
    killed."""
    (folder / "ends.py").write_text(ENDS)
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ends.py",
         kind], cwd=folder, capture_output=True, text=True, timeout=2 * START_SECONDS, check=False,
        env={name: value for name, value in os.environ.items() if name != "FAULT_HOSTS_WARM"} | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        },
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(why, done.stderr), done.stderr
    assert f"exitcode  : {code} " in done.stderr, done.stderr
    assert "SIGABRT" not in done.stderr
    assert "AssertionError" not in done.stderr
