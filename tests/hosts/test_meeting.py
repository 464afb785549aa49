"""Hosts find each other in the store of their run, whatever those have left there who met in it before."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch.distributed as dist

from featstore.errors import PeerError
from featstore.hosts.meeting import Rendezvous
from featstore.hosts.opening import Opening
from featstore.hosts.places import HostPlace


def meet(store: Any, machine: int, machines: int, seconds: float) -> tuple[str, list[int]]:
    """The name of the meeting, and who has not come."""
    meeting = Rendezvous(store, machine, range(machines))
    missing = meeting.reach("come", seconds)
    return meeting.name, missing


def all_meet(store: Any, after: list[float], seconds: float = 20.0) -> list[tuple[str, list[int]]]:
    """What each machine gets that comes after so many seconds."""

    def come(machine: int) -> tuple[str, list[int]]:
        time.sleep(after[machine])
        return meet(store, machine, len(after), seconds)

    with ThreadPoolExecutor(len(after)) as pool:
        return list(pool.map(come, range(len(after))))


@settings(max_examples=10)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.03, 0.1]), min_size=2, max_size=4), min_size=2, max_size=3))
def test_all_have_the_name_of_one_meeting_which_is_new(runs: list[list[float]]) -> None:
    """Of one run after the other, of other numbers of machines, with what all have left."""
    store, names = dist.HashStore(), set()
    for after in runs:
        found = all_meet(store, after)
        assert {(name, len(missing)) for name, missing in found} == {(found[0][0], 0)}
        names.add(found[0][0])
    assert len(names) == len(runs)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_who_has_not_come_is_named_by_all_and_may_come_later(gone: int) -> None:
    store, machines = dist.HashStore(), [0, 1, 2]
    all_meet(store, [0.0] * 3)
    with ThreadPoolExecutor(2) as pool:
        there = [machine for machine in machines if machine != gone]
        found = list(pool.map(lambda machine: meet(store, machine, 3, 1.5), there))
    assert [missing for _, missing in found] == [[gone]] * 2
    assert len({name for name, missing in all_meet(store, [0.0, 0.05, 0.0]) if not missing}) == 1


def test_one_that_gave_up_and_comes_again_is_met() -> None:
    store = dist.HashStore()
    assert meet(store, 1, 2, 0.1) == ("", [0])
    assert meet(store, 0, 2, 0.1)[1] == [1]
    (first, none), (second, nobody) = all_meet(store, [0.0, 0.1])
    assert first == second
    assert none == nobody == []


def test_a_store_that_does_not_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process that has it stands still."""
    from torch.distributed import distributed_c10d

    done = threading.Event()

    class Still:
        def check(self, _: Any) -> bool:
            return not done.wait(60)

    monkeypatch.setattr(distributed_c10d, "_get_default_store", Still)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"host 0 \(rank 0\) has the store by which ranks of this run meet"):
        Opening().come(HostPlace(0, 2, 0, 1, 0), 0.2)
    assert time.monotonic() - begin < 5
    done.set()
