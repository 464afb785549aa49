"""The online loader: the rows of every mini-batch are those of the source, whatever the policy, the budget
and the interruptions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.engine import ENGINES
from featstore.errors import (
    BudgetError,
    ClosedError,
    FeatstoreError,
    FeatstoreWarning,
    IdError,
    SourceError,
)
from featstore.loaders.online import extraction
from featstore.loaders.online.loader import OnlineLoader
from featstore.tiers import chosen
from featstore.tiers.slots.layout import POLICIES

ROWS, BATCHES = 3000, 9
ONLINE = [*sorted(set(POLICIES) - {"min"}), "auto"]
SMALL = "6MiB"


def rows_of(count: int, shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(
        0, 256, count * int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8
    )
    return raw.view(dtype).reshape(count, *shape)


def skewed(epoch: int, count: int = BATCHES, size: int = 300, rows: int = ROWS) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(epoch)
    for _ in range(count):
        yield rng.permutation(np.unique((rng.random(size) ** 2 * rows).astype(np.int64)))


def same_size(epoch: int) -> Iterator[np.ndarray]:
    for number in range(5):
        yield np.random.default_rng((epoch, number)).permutation(ROWS)[:250]


def check_same_size(loader: Any, x: np.ndarray, epoch: int) -> None:
    for batch, ids in zip(loader, same_size(epoch), strict=True):
        np.testing.assert_array_equal(batch.x, x[ids])


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return rows_of(ROWS, (100,), np.float32, 1).view(np.int32).astype(np.float32)  # no NaN


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, x: np.ndarray) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, ROWS))])
    indices = (rng.random(indptr[-1]) ** 2 * ROWS).astype(np.int32)
    path = tmp_path_factory.mktemp("online") / "s"
    with featstore.pack(path, x, graph=(indptr, indices), order="ldg", partitions=4) as made:
        yield made


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("featstore-sample", "featstore-extract")]


def check_epoch(batches: Any, x: np.ndarray, epoch: int, after: int = 0) -> None:
    wanted = list(skewed(epoch))[after:]
    found = 0
    for number, (batch, ids) in enumerate(zip(batches, wanted, strict=True)):
        assert batch.index == after + number
        np.testing.assert_array_equal(batch.n_id, ids)
        np.testing.assert_array_equal(batch.x, x[ids])
        found += 1
    assert found == len(wanted)


@pytest.mark.parametrize("policy", ONLINE)
def test_every_policy_serves_the_source(store: Any, x: np.ndarray, policy: str) -> None:
    with OnlineLoader(store, skewed, memory=SMALL, policy=policy) as loader:
        for epoch in range(3):
            check_epoch(loader, x, epoch)
        report = loader.report()
        assert report.batches == 3 * BATCHES + 3 - 3  # the end of an epoch is no mini-batch
        assert sum(loader.memory().values()) <= 6 * 2**20
        buffer = report.buffers["features"]
        asked = sum(len(ids) for epoch in range(3) for ids in skewed(epoch))
        assert buffer.hits + buffer.misses == asked
        assert 0 < buffer.misses < asked


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine(store: Any, x: np.ndarray, engine: str) -> None:
    with OnlineLoader(store, skewed, memory=SMALL, policy="fifo", engine=engine) as loader:
        check_epoch(loader, x, 0)


@given(
    row_shape=st.sampled_from([(1,), (3,), (8,), (511,), (513,), (2, 7), (40_000,)]),
    dtype=st.sampled_from(["uint8", "float16", "int64"]),
    policy=st.sampled_from(ONLINE), seed=st.integers(0, 99), overtake=st.booleans(),
)  # fmt: skip
@settings(max_examples=25)
def test_every_row_size(
    tmp_path_factory: pytest.TempPathFactory,
    row_shape: tuple[int, ...],
    dtype: str,
    policy: str,
    seed: int,
    overtake: bool,
) -> None:
    if policy == "static":
        policy = "fifo"  # without a graph nobody knows degrees
    count = 150
    source = rows_of(count, row_shape, dtype, seed)
    path = tmp_path_factory.mktemp("rows")
    with featstore.pack(path / "s", source) as store:
        batches = list(skewed(seed, 5, 20, count))
        with OnlineLoader(store, batches, memory="40MiB", policy=policy, overtake=overtake) as loader:
            found = list(loader)
        assert sorted(b.index for b in found) == list(range(5))
        for batch in found:
            assert batch.x.view(np.uint8).tobytes() == source[batches[batch.index]].tobytes()


# Interruptions.


def test_breaking_off_begins_the_next_epoch(store: Any, x: np.ndarray) -> None:
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                break
        assert own_threads() == []
        before = loader.report().seconds["read"]
        check_epoch(loader, x, 1)
        assert loader.report().seconds["read"] > before
        loader.set_epoch(0)
        check_epoch(loader, x, 0)


def test_an_exception_in_the_loop_and_one_in_the_sampler(store: Any, x: np.ndarray) -> None:
    class Mistake(Exception):
        pass

    def broken(epoch: int) -> Iterator[np.ndarray]:
        for number, ids in enumerate(skewed(epoch)):
            if epoch == 1 and number == 4:
                raise Mistake("of the sampler")
            yield ids

    with OnlineLoader(store, broken, memory=SMALL) as loader:
        with pytest.raises(Mistake, match="of the loop"):  # noqa: PT012
            for _ in loader:
                raise Mistake("of the loop")
        seen = []
        with pytest.raises(Mistake, match="of the sampler"):  # noqa: PT012
            for batch in loader:
                seen.append(batch.index)
        assert seen == [0, 1, 2, 3], "what was sampled before is handed over"
        assert own_threads() == []
        check_epoch(loader, x, 2)


def test_a_second_iteration_ends_the_first(store: Any, x: np.ndarray) -> None:
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        first = iter(loader)
        next(first)
        check_epoch(loader, x, 1)
        with pytest.raises(ClosedError, match="another iteration"):
            next(first)


@pytest.mark.parametrize("after", [0, 1, 5, BATCHES])
def test_going_on_in_the_middle(store: Any, x: np.ndarray, after: int) -> None:
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        loader.set_epoch(3)
        walk = iter(loader)
        for _ in range(after):
            next(walk)
        state = loader.state()
        walk.close()
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        loader.load_state(state)
        check_epoch(loader, x, 3 if after else state["epoch"], after)
        check_epoch(loader, x, 4 if after else state["epoch"] + 1)


def test_states_of_others_are_refused(store: Any) -> None:
    with OnlineLoader(store, skewed) as loader:
        state = loader.state()
        with pytest.raises(SourceError, match="the state has store = 'other'"):
            loader.load_state(state | {"of": {"store": "other"}})
        with pytest.raises(SourceError, match="next of the state must not be negative"):
            loader.load_state(state | {"next": -1})
    with (
        OnlineLoader(store, skewed, overtake=True) as loader,
        pytest.raises(SourceError, match="overtake"),
    ):
        loader.state()


def test_nothing_is_left_after_closing(store: Any) -> None:
    loader = OnlineLoader(store, skewed, memory=SMALL)
    kept = next(iter(loader))
    copy = kept.x.copy()
    loader.close()
    loader.close()
    assert own_threads() == []
    np.testing.assert_array_equal(kept.x, copy)
    with pytest.raises(ClosedError):
        next(iter(loader))
    assert loader.report().batches == 1


# Budgets.


def test_the_budget_it_names_works(store: Any, x: np.ndarray) -> None:
    def loader(memory: int | str) -> OnlineLoader:
        return OnlineLoader(store, same_size, memory=memory)

    with loader("1MiB") as small, pytest.raises(BudgetError) as caught:
        next(iter(small))
    with loader(caught.value.needed_bytes) as fits:
        for epoch in range(2):
            check_same_size(fits, x, epoch)
    with loader(caught.value.needed_bytes - 1) as small, pytest.raises(BudgetError):
        next(iter(small))


def test_a_loader_that_could_not_open_tries_again(
    store: Any, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failing = extraction.Extraction._buffer, [True]

    def buffer(self: Any, *arguments: Any) -> Any:
        made = original(self, *arguments)
        if failing[0]:
            made.close()
            raise OSError("made up")
        return made

    monkeypatch.setattr(extraction.Extraction, "_buffer", buffer)
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        with pytest.raises(OSError, match="made up"):
            list(loader)
        assert loader.report().bytes_read == 0
        failing[0] = False
        loader.set_epoch(0)
        check_epoch(loader, x, 0)


def test_a_sampler_may_use_its_memory_again(store: Any, x: np.ndarray) -> None:
    def batches(epoch: int) -> Iterator[np.ndarray]:
        memory = np.empty(300, np.int64)
        for ids in skewed(epoch):
            memory[: len(ids)] = ids
            yield memory[: len(ids)]

    with OnlineLoader(store, batches, memory=SMALL) as loader:
        check_epoch(loader, x, 0)


def test_the_loop_may_keep_what_it_got(store: Any, x: np.ndarray) -> None:
    with OnlineLoader(store, skewed, memory=SMALL) as loader:
        kept = list(loader)
    for batch in kept:
        np.testing.assert_array_equal(batch.x, x[batch.n_id])


# Warm start.


def test_a_saved_cache_makes_the_first_epoch_warm(store: Any, x: np.ndarray) -> None:
    options: dict[str, Any] = {"memory": "16MiB", "policy": "fifo"}  # all rows that are asked for fit
    with OnlineLoader(store, skewed, **options) as loader:
        check_epoch(loader, x, 0)
        loader.save_cache("mine")
    with OnlineLoader(store, skewed, warm="mine", **options) as loader:
        check_epoch(loader, x, 0)
        asked = sum(len(ids) for ids in skewed(0))
        buffer = loader.report().buffers["features"]
        assert (buffer.hits, buffer.misses) == (asked, 0)
    with OnlineLoader(store, skewed, **options) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state()
        del batches
    with OnlineLoader(store, skewed, warm="mine", **options) as loader:  # so does one that goes on
        loader.load_state(state)
        rest = sum(len(ids) for ids in list(skewed(0))[1:])
        assert len(list(loader)) == len(list(skewed(0))) - 1
        buffer = loader.report().buffers["features"]
        assert (buffer.hits, buffer.misses) == (rest, 0)
    assert featstore.verify(store.path).ok
    path = store.path / "caches" / "mine.cache"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    for name, what in (("mine", "damaged"), ("other", "not there"), ("../x", "name")):
        with pytest.raises(SourceError, match=what):
            OnlineLoader(store, skewed, warm=name)


@pytest.mark.parametrize("policy", sorted(set(ONLINE) - {"static", "auto"}))
def test_a_warm_start_is_as_good_as_going_on(store: Any, x: np.ndarray, policy: str) -> None:
    rng = np.random.default_rng(3)
    hot, others = np.split(rng.permutation(ROWS), [400])

    def batches(epoch: int) -> Iterator[np.ndarray]:
        once = np.random.default_rng(epoch).permutation(others)
        for number in range(20):
            yield np.concatenate([hot[number % 4 :: 4], once[130 * number : 130 * (number + 1)]])

    def hits(loader: Any) -> int:
        for batch in loader:
            np.testing.assert_array_equal(batch.x, x[batch.n_id])
        return int(loader.report().buffers["features"].hits)

    options: dict[str, Any] = {"memory": "4510KiB", "policy": policy, "extracted": 1}  # about 950 slots
    with OnlineLoader(store, batches, **options) as loader:
        cold = hits(loader)
        before = hits(loader)
        loader.save_cache(policy)
        gone_on = hits(loader) - before
    with OnlineLoader(store, batches, warm=policy, **options) as loader:
        loader.set_epoch(2)
        warm = hits(loader)
    assert warm >= 0.95 * gone_on
    assert warm > cold


# What comes in, what goes out.


def test_static_rows_of_several_tables(tmp_path: Path) -> None:
    tables = {"paper": rows_of(5000, (90,), np.int16, 1), "author": rows_of(2000, (330,), np.uint8, 2)}
    batches = [{"paper": np.arange(k, k + 50), "author": np.arange(k, k + 30)} for k in range(6)]
    only_papers = [{"paper": ids["paper"]} for ids in batches]
    with featstore.pack(tmp_path / "s", tables) as store:

        def loader(given: Any, static: Any, memory: int) -> OnlineLoader:
            return OnlineLoader(store, given, memory=memory, policy="static", static=static)

        with loader(batches, np.arange(9), 2**23) as one, pytest.raises(SourceError, match="of which table"):
            list(one)
        with loader(only_papers, {"author": np.arange(9)}, 2**23) as one:  # later ones may have authors
            assert [list(batch.x) for batch in one] == [["paper"]] * 6
            assert one.extraction.buffers["author"].slots >= 9
        author = np.arange(300)
        with loader(batches, {"author": author}, 1) as one, pytest.raises(BudgetError) as refusal:
            list(one)
        memory = refusal.value.needed_bytes
        with loader(batches, {"author": author}, memory) as one:
            for batch, ids in zip(one, batches, strict=True):
                for name, source in tables.items():
                    np.testing.assert_array_equal(batch.x[name], source[ids[name]])
            buffers = one.extraction.buffers
            assert {n: b.slots - b.slots_unkept for n, b in buffers.items()} == {"paper": 0, "author": 300}


def test_several_tables(tmp_path: Path) -> None:
    tables = {"paper": rows_of(500, (9,), np.int16, 1), "author": rows_of(200, (33,), np.uint8, 2)}
    rng = np.random.default_rng(5)
    batches = [
        {"paper": rng.permutation(500)[:80], "author": rng.permutation(200)[: 2 * n]} for n in range(1, 7)
    ]
    with featstore.pack(tmp_path / "s", tables) as store:
        with OnlineLoader(store, batches, memory="32MiB") as loader:
            for batch, ids in zip(loader, batches, strict=True):
                for name, source in tables.items():
                    np.testing.assert_array_equal(batch.x[name], source[ids[name]])
        with (
            OnlineLoader(store, [{"venue": np.arange(3)}]) as loader,
            pytest.raises(SourceError, match="'venue'"),
        ):
            next(iter(loader))


def test_node_types_may_be_missing_from_mini_batches(tmp_path: Path) -> None:
    tables = {"paper": rows_of(500, (9,), np.int16, 1), "author": rows_of(200, (33,), np.uint8, 2)}
    batches = [
        {"paper": np.arange(10)},
        {"paper": np.arange(40, 45), "author": np.arange(7)},
        {"author": np.arange(90, 97)},
    ]
    with (
        featstore.pack(tmp_path / "s", tables) as store,
        OnlineLoader(store, batches, memory="32MiB") as loader,
    ):
        only_papers = next(iter(loader))
        np.testing.assert_array_equal(only_papers.x, tables["paper"][:10])
        loader.set_epoch(0)
        with pytest.warns(FeatstoreWarning, match="1 is the first with several tables, .* of 'paper' alone"):
            found = [(batch.n_id, batch.x) for batch in loader]  # where there are two, all are dicts
        for (n_id, x), ids in zip(found[1:], batches[1:], strict=True):
            assert set(x) == set(n_id) == set(ids)
            for name in ids:
                np.testing.assert_array_equal(x[name], tables[name][ids[name]])


def test_a_table_without_rows(tmp_path: Path) -> None:
    tables = {"paper": rows_of(500, (9,), np.int16, 1), "none": np.empty((0, 4), np.float32)}
    batches = [{"paper": np.arange(at, at + 10), "none": np.empty(0, np.int64)} for at in (0, 30)]
    with featstore.pack(tmp_path / "s", tables) as store:
        for mode in ("online", "compiled"):
            with store.loader(batches, memory="32MiB", mode=mode) as loader:
                for batch, ids in zip(loader, batches, strict=True):
                    np.testing.assert_array_equal(batch.x["paper"], tables["paper"][ids["paper"]])
                    assert batch.x["none"].shape == (0, 4)


def test_a_buffer_of_more_rows_than_there_can_be(
    store: Any, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the memory would hold beyond that is not used."""
    monkeypatch.setattr("featstore.tiers.slots.layout.BUFFER_ROWS_MAX", 900)
    with OnlineLoader(store, skewed, memory="64MiB") as loader:
        check_epoch(loader, x, 0)
        (buffer,) = loader.extraction.buffers.values()
        assert buffer.slots == 900 < len(x)


def test_more_ids_than_the_table_has_rows(tmp_path: Path) -> None:
    source = rows_of(100, (4,), np.int32, 3)
    batches = [np.random.default_rng(n).integers(0, 100, 400) for n in range(5)]
    with featstore.pack(tmp_path / "s", source) as store:
        for options in ({}, {"device": "cpu", "device_memory": 1600}):
            with OnlineLoader(store, batches, memory="8MiB", **options) as loader:
                for batch, ids in zip(loader, batches, strict=True):
                    np.testing.assert_array_equal(np.asarray(batch.x), source[ids])


def test_an_unknown_option_is_refused_at_once(store: Any) -> None:
    with pytest.raises(TypeError, match="no option 'qdepth'"):
        OnlineLoader(store, skewed, qdepth=4)


def test_static_rows_are_kept_all_or_refused(store: Any, x: np.ndarray) -> None:
    def loader(memory: int | str, static: Any) -> OnlineLoader:
        return OnlineLoader(store, same_size, memory=memory, policy="static", static=static)

    def smallest(memory: int, static: Any) -> int:
        with (
            loader(memory, static) as small,
            pytest.raises(BudgetError, match="static rows asked for") as refusal,
        ):
            list(small)
        return refusal.value.needed_bytes

    few, some, nearly_all = np.arange(2), np.arange(ROWS // 8), np.arange(ROWS - 1)
    enough = smallest(1, few)
    with loader(enough, few) as fits:
        check_same_size(fits, x, 0)
    for static in (some, {"features": np.repeat(some, 2)}, nearly_all):
        needed = smallest(enough, static)
        assert smallest(needed - 1, static) == needed
        with loader(needed, static) as fits:
            check_same_size(fits, x, 0)
            buffer = fits.extraction.buffers["features"]
            kept = buffer.slots - buffer.slots_unkept
            assert kept == (0 if buffer.slots == ROWS else len(some)), "or all rows are there anyway"
            assert (buffer.slots == ROWS) == (static is nearly_all)


def _none_of_numbers(batch: Any) -> Any:
    return {} if isinstance(batch, int) else batch


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda s: OnlineLoader(s, [np.array([ROWS])]), IdError, "out of range"),
        (lambda s: OnlineLoader(s, [np.array([1.5])]), SourceError, "integers"),
        (lambda s: OnlineLoader(s, [object()]), SourceError, "nodes="),
        (lambda s: OnlineLoader(s, [object()], nodes=lambda _: {}), SourceError, "no node type"),
        (
            lambda s: OnlineLoader(s, [np.arange(3), 7], nodes=_none_of_numbers),
            SourceError,
            "no node type",
        ),
        (lambda s: OnlineLoader(s, [np.arange(3), np.array([ROWS])]), IdError, "mini-batch 1: "),
        (
            lambda s: OnlineLoader(s, skewed, policy="best"),
            SourceError,
            "policy must be .* not 'best'",
        ),
        (lambda s: OnlineLoader(s, skewed, policy="min"), SourceError, "compile"),
        (lambda s: OnlineLoader(s, skewed, policy="lru", static=[1]), SourceError, "static="),
        (
            lambda s: OnlineLoader(s, skewed, policy="static", static=[1, ROWS]),
            IdError,
            f"static: node id {ROWS} is out of range",
        ),
    ],
)
def test_bad_input_is_named(
    store: Any, make: Callable[[Any], Any], error: type[FeatstoreError], match: str
) -> None:
    with pytest.raises(error, match=match), make(store) as loader:
        list(loader)
    assert own_threads() == []


def test_pyg_objects_and_workers(store: Any, x: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("torch_geometric.data")

    class Samples(torch.utils.data.Dataset):  # type: ignore[misc,name-defined,unused-ignore]
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            ids = torch.from_numpy(list(skewed(7))[index])
            return data.Data(n_id=ids, edge_index=torch.zeros(2, 3, dtype=torch.int64), num_nodes=len(ids))

    for workers in (0, 2):
        sampler = torch.utils.data.DataLoader(Samples(), batch_size=None, num_workers=workers)
        with OnlineLoader(store, sampler, memory=SMALL) as loader:
            assert len(loader) == BATCHES
            for _ in range(2):
                for batch, ids in zip(loader, skewed(7), strict=True):
                    assert isinstance(batch, data.Data)
                    np.testing.assert_array_equal(batch.x.numpy(), x[ids])
                    assert batch.edge_index.shape == (2, 3)
        with OnlineLoader(store, sampler, memory=SMALL, device="cpu") as loader:
            assert next(iter(loader)).x.device.type == "cpu"


def test_what_is_given_stays_as_it_is(tmp_path: Path) -> None:
    """Rows and labels come to PyG's objects, not to those that were given: they may come again."""
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("torch_geometric.data")
    rows, labels = rows_of(200, (3,), np.float32, 1), np.arange(200) % 7
    none = torch.zeros(2, 0, dtype=torch.int64)
    given = [data.Data(n_id=torch.arange(at, at + 9), edge_index=none, num_nodes=9) for at in (0, 50)]
    typed = data.HeteroData()
    typed["paper"].n_id = torch.arange(5)
    with featstore.pack(tmp_path / "s", rows, arrays={"y": labels}) as store:
        for mode in ("online", "compiled"):
            twice = [*given, given[0]]
            with store.loader(twice, attach="y", memory="64MiB", mode=mode, device="cpu") as loader:
                for _ in range(2):
                    for batch, one in zip(loader, twice, strict=True):
                        np.testing.assert_array_equal(batch.x, rows[one.n_id])
                        np.testing.assert_array_equal(batch.y, labels[one.n_id])
    assert [sorted(one.keys()) for one in given] == [["edge_index", "n_id", "num_nodes"]] * 2
    with featstore.pack(tmp_path / "t", {"paper": rows}) as store:
        with store.loader([typed], memory="64MiB") as loader:
            (batch,) = loader
        np.testing.assert_array_equal(batch.sample["paper"].x, rows[:5])
    assert list(typed["paper"].keys()) == ["n_id"]


def test_a_set_epoch_is_called(store: Any) -> None:
    class Sampler:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[np.ndarray]:
            yield np.array([self.epoch])

    with OnlineLoader(store, Sampler(), memory=SMALL) as loader:
        assert [[b.n_id.tolist() for b in loader] for _ in range(3)] == [[[0]], [[1]], [[2]]]
    with OnlineLoader(store, iter([np.array([1])]), memory=SMALL) as loader:
        assert len(list(loader)) == 1
        with pytest.raises(SourceError, match="only once"):
            list(loader)


# The policy that chooses itself.


def test_auto_goes_on_with_what_hits_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going round and round through more rows than there are slots hits nothing but rows that are kept."""
    monkeypatch.setattr(chosen, "_CHOOSING_SHARE", 1)
    count = 6000
    source = rows_of(count, (1000,), np.float32, 1).view(np.int32).astype(np.float32)
    loop = [np.arange(low, low + 200) for low in range(0, count, 200)]
    with featstore.pack(tmp_path / "s", source) as store:
        with OnlineLoader(store, loop, memory="24MiB") as loader:
            found = []
            for _ in range(6):
                before = loader.report()
                for batch in loader:
                    np.testing.assert_array_equal(batch.x, source[batch.n_id])
                after = loader.report().buffers["features"]
                hits = after.hits - (before.buffers["features"].hits if before.buffers else 0)
                found.append((loader.policy["features"], hits / count))
            assert loader.memory()["choosing a policy"] > 0
            loader.save_cache("auto")
        with OnlineLoader(store, loop, memory="24MiB", warm="auto") as loader:
            list(loader)
            warm = loader.report().buffers["features"].hits / count
            assert loader.policy == {"features": found[-1][0]}
        with OnlineLoader(store, loop, memory="24MiB", policy="fifo") as loader:
            for _ in range(2):
                list(loader)
            assert loader.report().buffers["features"].hits == 0
    assert found[0] == ("s3-fifo", 0.0)
    assert found[-1][0] != "fifo"
    assert found[-1][1] > 0.3
    assert warm > 0.95 * found[-1][1]
