"""The kernels of mega-batches against NumPy and SciPy: the induced subgraph, counts, weights at the border,
rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.errors import BudgetError
from featstore.loaders.mega import sizes
from featstore.loaders.mega.induce import (
    FILLED,
    TARGET,
    Places,
    border_weights,
    copy_kept,
    count_by_partition,
    induce_block,
)
from featstore.loaders.mega.sizes import ListNeeds, Needs, RowNeeds, fit, sizes_of


@dataclass(frozen=True)
class World:
    """A graph over rows in partitions, some of them resident, and hubs. ``lists``: the sources of each
    row."""

    offsets: np.ndarray
    lists: list[np.ndarray]
    hub_rows: np.ndarray
    resident: np.ndarray
    starts: np.ndarray
    places: int
    block_edges: int
    dtype: Any

    @property
    def rows(self) -> int:
        return int(self.offsets[-1])

    def local_of(self) -> dict[int, int]:
        """Where each row in memory is found as a source."""
        found = {int(row): local for local, row in enumerate(self.hub_rows)}
        for partition, start in zip(self.resident.tolist(), self.starts.tolist()):
            low, high = self.offsets[partition : partition + 2]
            found |= {row: start + row - int(low) for row in range(int(low), int(high))}
        return found


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes_ = draw(st.lists(st.integers(0, 150), min_size=1, max_size=9).filter(any))
    offsets = np.concatenate([[0], np.cumsum(sizes_)]).astype(np.int64)
    rows = int(offsets[-1])
    degrees = rng.poisson(draw(st.sampled_from([0, 1, 6])), rows) * (rng.random(rows) < 0.7)
    # Half of the sources are near, so that lists hold the row itself and duplicates, too.
    lists = []
    for row, degree in enumerate(degrees):
        near = np.clip(row + rng.integers(-1, 2, degree), 0, rows - 1)
        lists.append(np.where(rng.random(degree) < 0.5, near, rng.integers(0, rows, degree)))
    full = np.flatnonzero(np.diff(offsets))
    resident = rng.permutation(full)[: draw(st.integers(1, len(full)))]
    hubs = draw(st.integers(0, min(rows, 30)))
    size = int(np.diff(offsets).max())
    slots = rng.permutation(len(full) + 2)[: len(resident)]
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return World(
        offsets, lists, rng.permutation(rows)[:hubs].astype(dtype), resident.astype(np.int64),
        hubs + slots * size, hubs + (len(full) + 2) * size, draw(st.integers(1, 40)), dtype,
    )  # fmt: skip


def induce(world: World, rows: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ends, local sources) of the lists of ``rows``, through the kernel, block by block."""
    here = Places(world.offsets, world.hub_rows).here(world.resident, world.starts)
    file = np.concatenate([np.empty(0, world.dtype), *(world.lists[row] for row in rows)]).astype(world.dtype)
    first = 1000  # the lists begin somewhere in their file
    offsets = first + np.concatenate([[0], np.cumsum([len(world.lists[row]) for row in rows])]).astype(
        np.int64
    )
    state, ends = np.zeros(2, np.int64), np.full(len(rows), -7, np.int64)
    indices, ids = np.empty(len(file) + 1, np.int32), np.empty(len(file) + 1, np.int64)
    for low in range(0, max(1, len(file)), world.block_edges):
        block, filled = file[low : low + world.block_edges].copy(), int(state[FILLED])
        bad = induce_block(
            offsets, block, first + low, world.rows, *here, wanted, state, ends, indices
        )  # fmt: skip
        assert bad == -1
        copy_kept(block, 7 * np.arange(low, low + len(block)), ids[filled : state[FILLED]])
    assert state[TARGET] == len(rows)
    places = ids[: state[FILLED]] // 7  # an edge's id is seven times its place in the file
    at = np.searchsorted(offsets - first, places, side="right") - 1
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(np.cumsum(np.bincount(at, minlength=len(rows))), ends)
    local_of = world.local_of()
    assert [local_of[int(source)] for source in file[places]] == indices[: state[FILLED]].tolist()
    return ends, indices[: state[FILLED]]


@given(worlds())
@settings(max_examples=120)
def test_induced_lists_are_those_of_the_twin(world: World) -> None:
    local_of = world.local_of()
    for rows in (
        world.hub_rows.astype(np.int64),
        *(np.arange(*world.offsets[p : p + 2]) for p in world.resident),
    ):
        wanted = np.random.default_rng(len(rows)).random(len(rows)) < 0.8
        ends, indices = induce(world, rows, wanted)
        twin = [
            [local_of[int(source)] for source in world.lists[row] if int(source) in local_of] if want else []
            for row, want in zip(rows.tolist(), wanted.tolist())
        ]
        assert ends.tolist() == np.cumsum([len(found) for found in twin]).tolist()
        assert indices.tolist() == [local for found in twin for local in found]


@given(worlds())
@settings(max_examples=35)
def test_induced_subgraph_is_scipys(world: World) -> None:
    target = np.repeat(np.arange(world.rows), [len(found) for found in world.lists])
    source = np.concatenate([np.empty(0, np.int64), *world.lists]).astype(np.int64)
    whole = sp.csc_matrix((np.ones(len(source)), (source, target)), (world.rows, world.rows))
    local_of = world.local_of()
    rows = np.array(sorted(local_of))
    local = np.array([local_of[row] for row in rows])
    ends, indices = induce(world, rows, np.full(len(rows), True))
    lengths = np.diff(np.concatenate([[0], ends]))
    found = sp.csc_matrix(
        (np.ones(len(indices)), (indices, np.repeat(local, lengths))), (world.places, world.places)
    )
    assert (found[local][:, local] != whole[rows][:, rows]).nnz == 0
    assert found.sum() == whole[rows][:, rows].sum(), "nothing outside, duplicates kept"


@given(worlds())
@settings(max_examples=35)
def test_counts_and_places_are_their_twins(world: World) -> None:
    places = Places(world.offsets, world.hub_rows)
    partition_of = np.repeat(np.arange(len(world.offsets) - 1), np.diff(world.offsets))
    assert places.hints.tolist() == partition_of[::64].tolist()
    hub_bits, hub_ranks, _ = (one.copy() for one in places.here(np.empty(0, np.int64), np.empty(0, np.int64)))
    for _ in range(2):  # the buffers are used again
        bits, ranks, local = places.here(world.resident, world.starts)
        member = np.unpackbits(bits.view(np.uint8), bitorder="little")[: world.rows]
        local_of = world.local_of()
        assert np.flatnonzero(member).tolist() == sorted(local_of)
        assert local[: len(local_of)].tolist() == [local_of[row] for row in sorted(local_of)]
        assert ranks.tolist() == (np.cumsum(member) - member)[::64].tolist()
    sources = np.concatenate([np.empty(0, np.int64), *world.lists]).astype(world.dtype)
    counts = np.arange(len(world.offsets)).astype(np.int64)
    bad = count_by_partition(sources, places.hints, world.offsets, hub_bits, hub_ranks, counts)
    assert bad == -1
    twin = np.bincount(partition_of[sources], minlength=len(world.offsets) - 1) + np.arange(
        len(world.offsets) - 1
    )
    assert counts[:-1].tolist() == twin.tolist()
    assert counts[-1] == len(world.offsets) - 1 + np.isin(sources, world.hub_rows).sum()


@pytest.mark.parametrize("bad", [-1, 300, 2**31 - 1, -(2**31)])
def test_sources_that_are_no_rows_are_named_by_position(bad: int) -> None:
    offsets = np.array([0, 100, 100, 300], np.int64)
    places = Places(offsets, np.array([7, 250], np.int32))
    block = np.array([1, 2, 3, bad, bad], np.int32)
    here = places.here(np.array([0]), np.array([2]))
    assert count_by_partition(block, places.hints, offsets, *here[:2], np.zeros(4, np.int64)) == 3
    found = induce_block(
        np.array([50, 52, 55], np.int64), block, 50, 300, *here, np.full(2, True), np.zeros(2, np.int64),
        np.empty(2, np.int64), np.empty(6, np.int32),
    )  # fmt: skip
    assert found == 3


# Weights.


def weigh(
    row: Any, col: Any, local: Any, hubs: int, slot_rows: int, always: Any, chance: float
) -> np.ndarray:
    weights = np.empty(len(row), np.float32)
    as_ids = [np.asarray(one, np.int64) for one in (row, col, local, local)]
    slots = (hubs, slot_rows)
    border_weights(*as_ids, slots, slots, np.asarray(always, bool), chance, weights)
    return weights


@given(st.integers(0, 2**32), st.integers(0, 5), st.floats(0.01, 1.0))
@settings(max_examples=35)
def test_border_weights_are_their_twin(data: int, hubs: int, chance: float) -> None:
    rng = np.random.default_rng(data)
    slot_rows, slots = 4, 5
    places = hubs + slot_rows * slots
    always = (np.arange(places) < hubs) | (rng.random(places) < 0.1)
    local = rng.permutation(places)
    col = np.repeat(rng.permutation(places), rng.integers(0, 6, places))
    row = rng.integers(0, places, len(col))
    weights = weigh(row, col, local, hubs, slot_rows, always, chance)
    partition = np.where(np.arange(places) < hubs, -1, (np.arange(places) - hubs) // slot_rows)
    source, target = local[row], local[col]
    sure = always[source] | ((partition[source] == partition[target]) & (partition[source] >= 0))
    twin = np.where(sure, 1.0, 1.0 / chance)
    sums, counts = np.bincount(col, twin, minlength=places), np.bincount(col, minlength=places)
    twin *= counts[col] / sums[col]
    np.testing.assert_allclose(weights, twin, rtol=1e-5)
    means = np.bincount(col, weights, minlength=places)[counts > 0] / counts[counts > 0]
    np.testing.assert_allclose(means, 1.0, rtol=1e-5)


def test_weighted_means_are_less_biased() -> None:
    """A target sees its own partition and the hubs always, others now and then: an unweighted mean leans
    towards those."""
    rng = np.random.default_rng(0)
    partitions, slot_rows, hubs, resident = 12, 10, 6, 4
    value = np.where(
        np.arange(partitions * slot_rows) // slot_rows == 0, 5.0, rng.normal(size=partitions * slot_rows)
    )
    hub_rows = 15 + 10 * np.arange(hubs)  # hubs of value 9, one in each of partitions 1 to 6
    value[hub_rows] = 9.0
    near, far = (
        rng.integers(1, slot_rows, 5),
        rng.choice(np.setdiff1d(np.arange(10, 120), hub_rows), 30, replace=False),
    )
    neighbours = np.concatenate([near, far, hub_rows])
    exact = value[neighbours].mean()
    plain, weighted = [], []
    chance = (resident - 1) / (partitions - 1)
    for _ in range(3000):
        here = np.concatenate([[0], rng.permutation(np.arange(1, partitions))[: resident - 1]])
        start = {int(p): hubs + slot * slot_rows for slot, p in enumerate(here)}
        sources, values = [], []
        always = np.arange(hubs + resident * slot_rows) < hubs
        for one in neighbours.tolist():
            partition = one // slot_rows
            if partition in start:
                sources.append(start[partition] + one % slot_rows)
                always[sources[-1]] |= one in hub_rows
            elif one in hub_rows:
                sources.append(hub_rows.tolist().index(one))
            else:
                continue
            values.append(value[one])
        local = np.array([start[0], *sources])
        col, row = np.zeros(len(sources)), np.arange(1, len(local))
        weights = weigh(row, col, local, hubs, slot_rows, always, chance)
        plain.append(np.mean(values))
        weighted.append(np.mean(weights * values))
    bias_plain, bias_weighted = abs(np.mean(plain) - exact), abs(np.mean(weighted) - exact)
    assert bias_plain > 1.0
    assert bias_weighted < 0.15 * bias_plain


# Sizes.


def needs_of(rng: np.random.Generator, partitions: int, **changes: Any) -> Needs:
    rows = rng.integers(0, 500, partitions)
    rows[0] = 400
    of_lists: dict[str, Any] = {
        "target": "x", "source_bytes": 4, "value_bytes": 0, "partition_edges": rows * 12, "hub_edges": 700
    }  # fmt: skip
    of_rows = RowNeeds(int(rows.sum()), 400, 4, rows, 50)
    return Needs({"x": of_rows}, {"x": ListNeeds(**of_lists | changes)}, "x", 1 << 20)


@given(
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 8)),
    st.sampled_from([4, 8]),
)
@settings(max_examples=50)
def test_the_largest_that_fits_is_taken(
    data: int, partitions: int, replaced: int | None, source_bytes: int
) -> None:
    needs = needs_of(np.random.default_rng(data), partitions, source_bytes=source_bytes)
    count = needs.with_rows
    given_ = [sizes_of(needs, n, replaced or n, sizes.BLOCK_EDGES_MIN) for n in range(1, count + 1)]
    for one, other in pairwise(given_[:-1]):
        assert one.memory_bytes < other.memory_bytes, "more partitions take more (but for all of them)"
    with pytest.raises(BudgetError) as caught:
        fit(needs, 1000, None, replaced)
    smallest = caught.value.needed_bytes
    assert smallest == min(given_[0].memory_bytes, given_[-1].memory_bytes)
    assert fit(needs, smallest, None, replaced).memory_bytes <= smallest
    with pytest.raises(BudgetError):
        fit(needs, smallest - 1, None, replaced)
    before = 0
    for memory in np.linspace(smallest, 3 * given_[-1].memory_bytes, 12).astype(int).tolist():
        found = fit(needs, memory, None, replaced)
        assert found.memory_bytes <= memory
        assert found.resident >= before
        before = found.resident
        assert fit(needs, memory, found.resident, replaced) == found
    assert before == count
    assert fit(needs, given_[-1].memory_bytes, None, replaced).resident == count, (
        "all, where all fit and a few less do not"
    )


@pytest.mark.parametrize("resident", [1, 7, 20])
def test_the_budget_that_the_error_names_works(resident: int) -> None:
    needs = needs_of(np.random.default_rng(3), 30)
    with pytest.raises(BudgetError, match=f"mega-batches of {resident} partitions") as caught:
        fit(needs, 2 << 20, resident, None)
    assert fit(needs, caught.value.needed_bytes, resident, None).resident == resident
    with pytest.raises(BudgetError):
        fit(needs, caught.value.needed_bytes - 1, resident, None)
