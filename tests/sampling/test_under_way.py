"""Several mini-batches of a stored graph at once, the pages that each keeps, and what it reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child
from test_sampling import random_graph
from test_stored_sampling import assert_equal, in_memory, least, packed_graph, seeds_of

import featstore
from featstore.errors import BudgetError, ClosedError, CorruptionError, IdError
from featstore.sampling import pages
from featstore.sampling.batches import SampledBatches, sample_batches
from featstore.sampling.under_way import UNDER_WAY_MAX, HeldInMemory, MadeAgain, Scratch, UnderWayNow

NODES = 20_000
FANOUTS = [4, 4, 4]


@pytest.fixture(scope="module")
def store(pack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.Store]:
    """A graph of about 400 pages. Not to be written to."""
    graph, path = random_graph(NODES, 400_000, 1), tmp_path_factory.mktemp("graph") / "s"
    with packed_graph(pack, path, graph, "permutation", 0.05) as opened:
        yield opened


# Kernels.


@settings(max_examples=25)
@given(
    total=st.integers(1, 40_000),
    size=st.integers(0, 300),
    wide=st.booleans(),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    pages_max=st.integers(0, 50),
    gap=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_missing_neighbours_equal_twin(
    total: int, size: int, wide: bool, share: float, pages_max: int, gap: int, seed: int
) -> None:
    rng, dtype = np.random.default_rng(seed), np.dtype(np.int64 if wide else np.int32)
    table = rng.integers(0, 2**31, total).astype(dtype)
    edge = rng.integers(0, total, size)
    row = np.where(rng.random(size) < share, -1, 7).astype(np.int64)
    expected, away = np.where(row < 0, table[edge], row), row < 0
    missing = pages.Missing(row, edge, int(away.sum()), total, dtype)
    of_page = 4096 // dtype.itemsize
    through: list[int] = []  # gaps that are read through, too
    for page in np.unique(edge[away] // of_page).tolist():
        near = bool(through) and page - through[-1] <= gap + 1
        through += range(through[-1] + 1 if near else page, page + 1)
    wanted = np.array(through[:pages_max], np.int64)
    np.testing.assert_array_equal(missing.first_pages(pages_max, gap), wanted)
    padded = np.concatenate([table, np.zeros(-total % of_page, dtype)]).reshape(-1, of_page)

    class Both:  # stands for a reader
        def read_pages(self, name: str, numbers: Any, out: Any) -> None:
            out[:] = padded[numbers]

        def read(self, ids: Any) -> Any:
            assert (np.diff(ids["t"]) >= 0).all()
            assert not np.isin(ids["t"] // of_page, wanted).any()
            return {"t": table[ids["t"]]}

    reader: Any = Both()
    missing.take(pages.KeptPages(reader, "t", wanted, dtype))
    assert len(missing) == (away & ~np.isin(edge // of_page, wanted)).sum()
    missing.read(reader, "t")
    assert len(missing) == 0
    np.testing.assert_array_equal(row, expected)


def test_pages_are_those_of_the_files(store: featstore.Store, engine: str) -> None:
    table = store.table("features/sources")
    files = [store.path / table.entry.chunk_path(chunk) for chunk in range(table.layout.chunks)]
    data = b"".join(path.read_bytes() for path in files)
    whole = np.frombuffer(data + bytes(-len(data) % 4096), np.uint8).reshape(-1, 4096)
    with store.reader(tables="features/sources", memory="4MiB", engine=engine, static=None) as reader:
        for wanted in ([], [0], [len(whole) - 1], [3, 4, 9, 200], range(len(whole))):
            numbers = np.array(wanted, np.int64)
            out = np.full((len(numbers), 4096), 7, np.uint8)
            reader.read_pages("features/sources", numbers, out)
            np.testing.assert_array_equal(out, whole[numbers])


def test_a_corrupted_page_that_is_kept_is_an_error(pack: Any, tmp_path: Path, engine: str) -> None:
    with packed_graph(pack, tmp_path / "s", random_graph(300, 150_000, 3)) as store:
        path = store.path / store.table("features/sources").entry.chunk_path(0)
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff")
        with (
            store.sampler([-1, 2], memory=least(store), engine=engine) as sampler,
            pytest.raises(CorruptionError, match="at byte 4096"),
        ):
            sampler.sample(np.arange(10))


# What is read.


def test_each_page_is_read_once(store: featstore.Store, engine: str) -> None:
    """Where there is room for those that are kept."""
    expected = in_memory(store, FANOUTS).sample(seeds_of(1, 400, NODES))
    layout = store.table("features/sources").layout
    with store.sampler(FANOUTS, memory="32MiB", engine=engine) as sampler:
        sampler._cache.cut(0)
        assert_equal(sampler.sample(seeds_of(1, 400, NODES)), expected)
        stats = sampler.stats()
        assert stats.edges_cached == 0
        assert 0 < stats.bytes_read <= layout.pages * 4096  # hops two and three want nearly all
    with store.sampler(FANOUTS, memory=least(store), engine=engine) as sampler:
        assert_equal(sampler.sample(seeds_of(1, 400, NODES)), expected)
        assert sampler.stats().bytes_read > layout.pages * 4096  # no room


# Several at once.


def test_several_are_under_way(store: featstore.Store) -> None:
    memory = in_memory(store, FANOUTS)
    with store.sampler(FANOUTS, memory="16MiB") as sampler, ThreadPoolExecutor(UNDER_WAY_MAX) as pool:
        sampler._cache.cut(0)
        read, met = sampler._lists[0].read, threading.Barrier(UNDER_WAY_MAX)

        def together(*arguments: Any, last: bool) -> None:
            met.wait(20)  # breaks where not all are reading
            read(*arguments, last=last)

        sampler._lists[0].read = together  # type: ignore[method-assign]
        batches = list(pool.map(lambda n: sampler.sample(seeds_of(n, 50, NODES), n), range(UNDER_WAY_MAX)))
    for number, batch in enumerate(batches):
        assert_equal(batch, memory.sample(seeds_of(number, 50, NODES), number))


def test_memory_for_one_is_enough_for_threads(store: featstore.Store) -> None:
    """Those that grow beyond what there is for each are made again, alone."""
    memory, counts = in_memory(store, FANOUTS), [10, 1500, 400, 2500, 30, 2500, 900, 3000, 20, 3000]
    needed = 1
    while True:
        try:
            with store.sampler(FANOUTS, memory=needed) as sampler:
                sampler.sample(seeds_of(0, 3000, NODES))
            break
        except BudgetError as error:
            needed = error.needed_bytes
    with store.sampler(FANOUTS, memory=needed) as sampler, ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda n: sampler.sample(seeds_of(0, counts[n], NODES), n), range(len(counts)))
        for number, batch in enumerate(made):
            assert_equal(batch, memory.sample(seeds_of(0, counts[number], NODES), number))
        assert sampler.stats().batches == len(counts)
        assert sum(sampler.memory().values()) == needed


def test_a_failed_mini_batch_holds_nothing(store: featstore.Store) -> None:
    with store.sampler(FANOUTS, memory="16MiB") as sampler:

        def fails(*arguments: Any, last: bool) -> None:
            raise KeyboardInterrupt

        sampler._cache.cut(0)
        read, sampler._lists[0].read = sampler._lists[0].read, fails  # type: ignore[method-assign]
        for _ in range(2 * UNDER_WAY_MAX):
            with pytest.raises(KeyboardInterrupt):
                sampler.sample([1, 2])
        sampler._lists[0].read = read  # type: ignore[method-assign]
        assert sampler.sample([1, 2]).num_sampled_nodes[0] == 2
        assert sampler.stats().batches == 1


class Cache:
    """Stands for what is held in memory."""

    memory_bytes, whole = 600, False
    cuts: list[int]

    def __init__(self) -> None:
        self.cuts = []

    def cut(self, room_bytes: int) -> None:
        self.cuts.append(room_bytes)
        self.memory_bytes = min(self.memory_bytes, room_bytes)


def test_scratch_is_shared_out() -> None:
    cache: Any = Cache()
    room = UnderWayNow(HeldInMemory([cache]), 1000, 100, 1000, lambda scratch: scratch)
    one, two, three = Scratch(room), Scratch(room), Scratch(room)
    with ThreadPoolExecutor(2) as pool:
        room.begin(one)
        one.reserve(250, "go")
        waits = pool.submit(room.begin, two)  # 150 are free, and one has needed 250
        one.reserve(500, "go on")  # there is no other yet
        assert cache.cuts == [500]
        assert not waits.done()
        room.end(one)
        waits.result(10)
        assert (cache.cuts, two.held_bytes) == ([500, 0], 500)  # there is room for two now
        room.begin(three)
        with pytest.raises(MadeAgain):
            two.reserve(700, "go")
        with pytest.raises(BudgetError, match="too small to go"):
            two.reserve(1001, "go")
        room.end(two)
        two = Scratch(room)
        alone, behind = pool.submit(room.begin, two, True), Scratch(room)
        assert not alone.done()
        room.end(three)
        alone.result(10)
        waits = pool.submit(room.begin, behind)  # nobody joins who is alone
        two.reserve(1000, "go")
        closes = threading.Thread(target=room.close)
        closes.start()
        with pytest.raises(ClosedError):
            waits.result(10)
        room.end(two)
        closes.join(10)
        assert not closes.is_alive()
    with pytest.raises(ClosedError):
        room.begin(Scratch(room))


def test_who_goes_through_them_has_them_sampled_ahead(store: featstore.Store) -> None:
    train, expected = np.arange(400), in_memory(store, FANOUTS)
    with sample_batches(
        store, train, FANOUTS, 40, memory=least(store, 0.2), in_memory=False, epoch=2
    ) as batches:
        threads = threading.active_count()
        for number, batch in enumerate(batches):
            assert_equal(batch, expected.sample(batches.seeds(number), number, epoch=2))
            if number == 5:
                break
        assert_equal(batches[9], expected.sample(batches.seeds(9), 9, epoch=2))
        made = list(batches)
        assert len(made) == 10
        assert_equal(made[7], batches[7])
        going: Any = iter(batches)
        next(going)

        def child() -> bool:
            for number, batch in enumerate(going, 1):
                assert_equal(batch, expected.sample(batches.seeds(number), number, epoch=2))
            return number == 9

        assert in_child(child) == 0
        going.close()
        assert threading.active_count() == threads
        bad = SampledBatches(batches.sampler, train, 40)
        bad.train = np.concatenate([bad.train[:99], [0, 0, 1]])
        with pytest.raises(IdError, match="stands twice"):
            list(bad)
