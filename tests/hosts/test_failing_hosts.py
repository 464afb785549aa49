"""A host that cannot open its store tells the others, who wait for it, at once and why; it has its own error.
The next time all meet."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch.distributed as dist
from failing_hosts import TIMEOUT_SECONDS, fail_alone, try_to_open
from fault_hosts import all_of, forked_from
from test_split_training import graph_and_rows
from torch.distributed import distributed_c10d

import featstore
from featstore.errors import BudgetError, SourceError
from featstore.hosts import opening
from featstore.hosts.meeting import HasFailed, Rendezvous
from featstore.hosts.opening import Opening

AT_ONCE = TIMEOUT_SECONDS / 2  # of a machine that has other things to do: else it is three time-outs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("failing")
    graph_and_rows(made, pack)
    with featstore.open(made / "s") as store:
        featstore.split(store, 2, made / "others", train="train", seed=5)
    shutil.copytree(made / "parts2" / "topology", made / "mixed" / "topology")
    shutil.copytree(made / "others" / "host-1", made / "mixed" / "host-1")
    shutil.copytree(made / "parts3" / "topology", made / "without" / "topology")
    for machine in range(2):
        shutil.copytree(made / "parts2" / "topology", made / f"swapped-{machine}" / "topology")
        part = f"host-{1 - machine}"
        shutil.copytree(made / "parts2" / part, made / f"swapped-{machine}" / part)
    return made


@pytest.fixture(scope="module")
def context(folder: Path) -> Any:
    return forked_from(folder)


@pytest.mark.parametrize(
    ("hosts", "bad", "how", "error", "text"),
    [
        (2, 1, "mixed", "SourceError", "is of the split"),
        (2, 0, "memory", "BudgetError", "a memory budget of 1 bytes is too small"),
        (2, 1, "fail", "OSError", "the disk is gone"),
        (2, 0, "interrupt", "KeyboardInterrupt", ""),
        (3, 2, "memory", "BudgetError", "a memory budget of 1 bytes is too small"),
        (3, 0, "without", "SourceError", "has no host-N"),
        (3, 1, "nowhere", "SourceError", "has no topology in it or beside it"),
    ],
)
def test_others_are_told_at_once_and_all_meet_the_next_time(
    folder: Path, context: Any, hosts: int, bad: int, how: str, error: str, text: str
) -> None:
    """Whoever leads, however many there are, before all have come and after that."""
    name = f"{hosts}-{bad}-{how}"
    assert all_of(context, try_to_open, hosts, hosts, str(folder), name, bad, how) == [0] * hosts
    said = [json.loads((folder / f"{name}.said.{rank}").read_text()) for rank in range(hosts)]
    assert max(one["seconds"] for one in said) < AT_ONCE, said
    own = said.pop(bad)
    assert own["type"] == error
    assert text in own["text"]
    passed = error if error in ("SourceError", "BudgetError") else "FeatstoreError"
    for one in said:
        assert (one["type"], one["host"], one["rank"], one["cause"]) == ("PeerError", bad, bad, passed)
        assert text in one["text"]
        assert error in one["text"]
        assert one["notes"] == [f"on host {bad} (rank {bad})"]


@pytest.mark.parametrize("bad", [0, 1])
def test_who_fails_is_named_by_its_part(folder: Path, context: Any, bad: int) -> None:
    """Machines are numbered as they come, and need not have the part of their number."""
    name = f"swapped-{bad}"
    assert all_of(context, try_to_open, 2, 2, str(folder), name, bad, "swapped") == [0] * 2
    told = json.loads((folder / f"{name}.said.{1 - bad}").read_text())
    assert (told["type"], told["host"], told["rank"]) == ("PeerError", 1 - bad, bad)
    assert told["notes"] == [f"on host {1 - bad} (rank {bad})"]


@pytest.mark.parametrize(
    ("bad", "how", "error"), [(0, "nowhere", "SourceError"), (2, "memory", "BudgetError")]
)
def test_hosts_of_several_ranks(folder: Path, context: Any, bad: int, how: str, error: str) -> None:
    """The rank that leads there is named, whether or not it knows how many are on a host; those beside others
    have nobody to wait for."""
    name = f"ranks-{bad}"
    assert all_of(context, try_to_open, 4, 2, str(folder), name, bad, how, 2) == [0] * 4
    said = [json.loads((folder / f"{name}.said.{rank}").read_text()) for rank in range(4)]
    assert max(one["seconds"] for one in said) < AT_ONCE, said
    assert said[bad]["type"] == error
    told = said[2 - bad]
    assert (told["type"], told["host"], told["rank"], told["cause"]) == ("PeerError", bad // 2, bad, error)
    assert "type" not in said[1]
    assert "type" not in said[3]


def test_who_fails_does_not_wait_for_those_who_do_not_come(folder: Path, context: Any) -> None:
    assert all_of(context, fail_alone, 2, str(folder), "alone") == [0, 0]


def test_a_store_that_does_not_answer_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    class Still:
        def set(self, *_: Any) -> None:
            done.wait(60)

    class Broken:
        def set(self, *_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(opening, "_TELL_SECONDS", 0.2)
    for store in (Still, Broken):
        monkeypatch.setattr(distributed_c10d, "_get_default_store", store)
        begin, error = time.monotonic(), SourceError("on purpose")
        with pytest.raises(SourceError) as raised, Opening():
            raise error
        assert raised.value is error
        assert time.monotonic() - begin < 5
    done.set()


def test_one_that_has_no_others_to_tell_does_not_wait(folder: Path) -> None:
    with pytest.raises(BudgetError):
        featstore.open_split(folder / "parts1", memory=1)


# The meeting alone.


def come(store: Any, machine: int, machines: int, fails: dict[int, str], after: float) -> str:
    """How it ends for a machine, which fails at some stage or does not."""
    time.sleep(after)
    meeting = Rendezvous(store, machine, range(machines))
    try:
        for stage in ("come", "ready"):
            if fails.get(machine) == stage:
                meeting.fail("on purpose", 20)
                return "failed"
            assert not meeting.reach(stage, 20)
    except HasFailed as error:
        meeting.fail("was told", 20)
        assert (error.why, fails[error.rank]) in {("on purpose", "come"), ("on purpose", "ready")}
        return "told"
    return meeting.name


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_none_that_has_failed_before_makes_the_next_meeting_fail(seed: int) -> None:
    """One meeting after the other, in one store, which those who are told leave at other moments."""
    draw, store = random.Random(seed), dist.HashStore()
    machines, names = draw.randrange(2, 5), set[str]()
    for _ in range(4):
        fails = {draw.randrange(machines): draw.choice(["come", "ready"]) for _ in range(draw.randrange(3))}
        with ThreadPoolExecutor(machines) as pool:
            asked = [
                pool.submit(come, store, one, machines, fails, draw.choice([0.0, 0.0, 0.05]))
                for one in range(machines)
            ]
            ends = [one.result(30) for one in asked]
        if fails:
            assert {"failed"} <= set(ends) <= {"failed", "told"}, (fails, ends)
        else:
            assert len(set(ends)) == 1, ends
            names.add(ends[0])
    assert all(name.startswith("featstore/hosts/") for name in names)


def test_who_comes_again_at_once_is_not_told_of_the_failure_before() -> None:
    """While the one that leads waits for others to hear of it."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        first, second = Rendezvous(store, 0, range(3)), Rendezvous(store, 1, range(3))
        failing = pool.submit(first.fail, "on purpose", 1.5)
        with pytest.raises(HasFailed):
            second.reach("come", 20)
        again = [pool.submit(Rendezvous(store, 1, range(3)).reach, "come", 20)]
        failing.result(20)
        again += [pool.submit(Rendezvous(store, machine, range(3)).reach, "come", 20) for machine in (0, 2)]
        assert [one.result(30) for one in again] == [[], [], []]
