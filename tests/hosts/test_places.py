"""Which host a process is on, by what torch.distributed and torchrun say."""

import sys
from types import SimpleNamespace

import pytest

from featstore.errors import ArgumentError
from featstore.hosts.places import HostPlace, place_among


def run_of(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local_world: str) -> None:
    dist = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank,
        get_world_size=lambda: world,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world)


@pytest.mark.parametrize(
    ("rank", "world", "local_world", "hosts", "place"),
    [
        (5, 8, "4", 2, HostPlace(1, 2, 1, 4, 1)),  # two machines of four ranks
        (5, 8, "4", 8, HostPlace(5, 8, 0, 1, 5)),  # the same, a part for each rank
        (5, 8, "4", 4, HostPlace(2, 4, 1, 2, 2)),  # the same, a part for each two
        (3, 4, "4", 2, HostPlace(1, 2, 1, 2, 1)),  # one machine, which stands for two
        (3, 4, "", 4, HostPlace(3, 4, 0, 1, 3)),  # started otherwise
    ],
)
def test_a_machine_stands_for_one_host_or_for_several(
    monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local_world: str, hosts: int, place: HostPlace
) -> None:
    run_of(monkeypatch, rank, world, local_world)
    assert place_among(hosts) == place


@pytest.mark.parametrize(
    ("world", "local_world", "hosts", "why"),
    [
        (6, "3", 4, "6 ranks cannot be spread evenly over the 4 hosts"),
        (4, "1", 2, "of 4 ranks 2 are on each, but LOCAL_WORLD_SIZE is 1"),  # a host would be on two machines
        (6, "3", 3, "of 6 ranks 2 are on each, but LOCAL_WORLD_SIZE is 3"),
    ],
)
def test_a_host_that_would_be_on_two_machines_is_refused(
    monkeypatch: pytest.MonkeyPatch, world: int, local_world: str, hosts: int, why: str
) -> None:
    run_of(monkeypatch, 0, world, local_world)
    with pytest.raises(ArgumentError, match=why):
        place_among(hosts)
