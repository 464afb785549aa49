"""Every policy does what its reference in plain Python does, to the last slot, on any trace, with rows held,
failed and read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceMap

from featstore.errors import BudgetError
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tiers.slots.simulation import simulate

NAMES = sorted(layout.POLICIES)
NEVER = layout.NEVER
BATCHES = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "s3-fifo": {"small": 0.3},
    "score": {"resident": 0.6, "gamma": 0.7, "delta": 3},
}


def ints(values: Any) -> Any:
    return np.array(values, np.int32)


@dataclass
class Ticket:
    """A mini-batch under way: its slots, and what it reads and waits for."""

    slots: list[int]
    reads: list[int]
    waits: list[int]


@dataclass
class Pair:
    """A slot map and its reference, which must never differ."""

    slots: int
    name: str
    tickets: list[Ticket] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy, options = layout.POLICIES[self.name], OPTIONS.get(self.name, {})
        self.map = layout.make_slot_map(
            self.slots, policy, batches=BATCHES if self.name == "min" else 0, **options
        )
        self.reference = ReferenceMap(self.slots, policy, **options)

    def acquire(self, rows: list[int], uses: list[int]) -> None:
        slots, missed, waits = (np.full(len(rows), -7, np.int32) for _ in range(3))
        before = [array.tobytes() for array in self.map]
        next_use = ints(uses) if self.name == "min" else sl.NO_NEXT_USE
        reads, waiting = sl.acquire(self.map, np.array(rows, np.int64), slots, missed, waits, next_use)
        expected = self.reference.acquire(rows, uses)
        if isinstance(expected, int):
            assert reads == -expected
            assert [array.tobytes() for array in self.map] == before
            return
        assert (slots.tolist(), missed[:reads].tolist(), waits[:waiting].tolist()) == expected
        self.tickets.append(Ticket(*expected))

    def end_read(self, number: int, good: bool) -> None:
        ticket = self.tickets[number]
        slots = [ticket.slots[i] for i in ticket.reads]
        (sl.complete if good else sl.abandon)(self.map, ints(slots))
        self.reference.end_read(slots, good)
        ticket.reads = []

    def look_again(self, number: int) -> None:
        ticket = self.tickets[number]
        waits, missed = ints(ticket.waits), np.empty(len(ticket.waits), np.int32)
        still, reads = sl.look_again(self.map, ints(ticket.slots), waits, missed)
        ticket.waits, more = self.reference.look_again(ticket.slots, ticket.waits)
        assert (waits[:still].tolist(), missed[:reads].tolist()) == (ticket.waits, more)
        ticket.reads = ticket.reads + more

    def release(self, number: int) -> None:
        ticket = self.tickets[number]
        if ticket.reads:
            self.end_read(number, True)
        del self.tickets[number]
        sl.release(self.map, ints(ticket.slots))
        self.reference.release(ticket.slots)

    def check(self) -> None:
        held, ours = self.reference.slots, self.map.slots
        assert ours["row"].tolist() == [s.row for s in held]
        assert ours["pins"].tolist() == [s.pins for s in held]
        assert ours["status"].tolist() == [s.status for s in held]
        c, r = self.map.counts, self.reference
        assert c[
            [layout.HITS, layout.MISSES, layout.WAITS, layout.EVICTIONS, layout.BATCHES, layout.UNPINNED]
        ].tolist() == [r.hits, r.misses, r.waits, r.evictions, r.batches, r.unpinned()]


rows_few = st.lists(st.tuples(st.integers(0, 14), st.integers(0, BATCHES - 1) | st.just(NEVER)), max_size=6)
steps = st.lists(
    st.tuples(st.just("acquire"), rows_few, st.just(True))
    | st.tuples(st.sampled_from(["read", "look", "release"]), st.integers(0, 99), st.booleans()),
    max_size=60,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(slots=st.integers(1, 12), program=steps)
def test_any_interleaving(name: str, slots: int, program: list[tuple[str, Any, bool]]) -> None:
    pair = Pair(slots, name)
    for step, value, good in program:
        if step == "acquire":
            pair.acquire([row for row, _ in value], [use for _, use in value])
        elif pair.tickets:
            number = value % len(pair.tickets)
            if step == "read":
                pair.end_read(number, good)
            elif step == "look":
                pair.look_again(number)
            else:
                pair.release(number)
        pair.check()


def skewed(rng: np.random.Generator, rows: int, batches: int, most: int) -> list[list[int]]:
    """Mini-batches of distinct rows, some of them much more wanted than others."""
    weights = 1.0 / np.arange(1, rows + 1)
    sizes = rng.integers(1, most + 1, batches)
    return [rng.choice(rows, size, replace=False, p=weights / weights.sum()).tolist() for size in sizes]


def next_uses(trace: list[list[int]]) -> list[list[int]]:
    found, later = [], {}  # type: ignore[var-annotated]
    for batch in range(len(trace) - 1, -1, -1):
        found.append([later.get(row, NEVER) for row in trace[batch]])
        later.update(dict.fromkeys(trace[batch], batch))
    return found[::-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_skewed_traces_with_rows_held_over_several_batches(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(int(rng.integers(30, 60)), name)
    trace = skewed(rng, 150, BATCHES, 12)
    for rows, uses in zip(trace, next_uses(trace), strict=True):
        pair.acquire(rows, uses)
        if pair.tickets and rng.random() < 0.9:
            pair.end_read(len(pair.tickets) - 1, rng.random() < 0.95)
        while pair.tickets and (len(pair.tickets) > 4 or rng.random() < 0.4):
            pair.release(int(rng.integers(len(pair.tickets))))
        pair.check()
    assert pair.reference.evictions > 0
    assert pair.reference.hits > 0


@pytest.mark.parametrize("name", NAMES)
def test_mini_batches_of_many_groups(name: str) -> None:
    """Missed rows are given slots in groups; a mini-batch of several, with rows that occur twice, is as if
    they came one by one."""
    rng = np.random.default_rng(5)
    pair = Pair(1500, name)
    trace = [(rng.power(0.6, 1200) * 4000).astype(int).tolist() for _ in range(5)]
    for rows, uses in zip(trace, next_uses(trace), strict=True):
        pair.acquire(rows, uses)
        pair.release(0)
        pair.check()
    assert pair.reference.evictions > 500


def simulated(trace: list[list[int]], slots: int, policy: int, **options: Any) -> tuple[int, int]:
    reference = ReferenceMap(slots, policy, **options)
    for rows, uses in zip(trace, next_uses(trace), strict=True):
        found = reference.acquire(rows, uses)
        assert not isinstance(found, int)
        reference.end_read([found[0][i] for i in found[1]], True)
        reference.release(found[0])
    return reference.hits, reference.misses


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"static"}))
def test_simulated_hits_are_those_of_the_reference(name: str) -> None:
    trace = skewed(np.random.default_rng(7), 400, 120, 20)
    found = simulate(trace, 50, name, next_uses=next_uses(trace) if name == "min" else None)
    assert found == simulated(trace, 50, layout.POLICIES[name])
    assert sum(found) == sum(map(len, trace))


def test_min_reads_least() -> None:
    trace = skewed(np.random.default_rng(3), 300, 150, 20)
    misses = {
        name: simulate(
            trace,
            60,
            name,
            next_uses=next_uses(trace) if name == "min" else None,
            static=range(20) if name == "static" else None,
        )[1]
        for name in NAMES
    }
    assert misses["min"] == min(misses.values())
    assert misses["min"] < misses["fifo"]


def test_static_rows_never_leave() -> None:
    trace = [[i, 0, 1] for i in range(10, 30)]
    assert simulate(trace, 5, "static", static=np.array([0, 1])) == (40, 20)


def test_too_small_a_buffer_says_how_small() -> None:
    with pytest.raises(BudgetError) as error:
        simulate([[1, 2], [1, 2, 3, 3]], 2, "lru")
    assert error.value.needed_bytes == 3


def test_a_map_in_shared_memory_is_the_same_map() -> None:
    raw = np.empty(layout.slot_map_bytes(20, layout.LRU) + 64, np.uint8)
    memory = raw[-raw.ctypes.data % 64 :]
    made = layout.make_slot_map(20, layout.LRU, memory=memory)
    slots, missed, waits = (np.empty(3, np.int32) for _ in range(3))
    sl.acquire(made, np.array([5, 6, 7]), slots, missed, waits)
    other = layout.attach_slot_map(memory)
    assert sl.acquire(other, np.array([7, 6, 8]), slots, missed, waits) == (1, 2)
    assert made.counts[layout.HITS] == 2
    with pytest.raises(ValueError, match="no slot map"):
        layout.attach_slot_map(np.zeros(4096, np.uint8))
    with pytest.raises(BudgetError):
        layout.make_slot_map(1000, layout.LRU, memory=memory)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (layout.FIFO, {"slots": 0}), (99, {}), (layout.MIN, {}), (layout.S3FIFO, {"small": 1.0}),
        (layout.SCORE, {"gamma": 1.0}), (layout.SCORE, {"delta": 0}), (layout.SCORE, {"alpha": 0.0}),
        (layout.SCORE, {"resident": 0.0}),
    ],
)  # fmt: skip
def test_wrong_options_are_errors(policy: int, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        layout.make_slot_map(options.pop("slots", 10), policy, **options)


def test_next_uses_are_for_min_alone() -> None:
    three = [np.empty(1, np.int32) for _ in range(3)]
    with pytest.raises(ValueError, match="next use"):
        sl.acquire(layout.make_slot_map(4, layout.MIN, batches=3), np.array([1]), *three)
    with pytest.raises(ValueError, match="next use"):
        sl.acquire(layout.make_slot_map(4, layout.FIFO), np.array([1]), *three, ints([2]))
