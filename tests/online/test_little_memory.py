"""Little memory: the online loader needs its reader and two of the largest mini-batches, whatever sizes they
come in; for one that finds no room the budget is divided anew, and where that is no help it is refused, at
its turn, with what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, IdError
from featstore.loaders.online import extraction
from featstore.loaders.online.loader import OnlineLoader

ROWS = {"paper": 6000, "author": 3000}
ROW_BYTES = {"paper": 1024, "author": 600}
MIB = 1 << 20
# Mini-batches of one table, and then of two: what they are made of is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore:mini-batch .* is the first with several tables")


@pytest.fixture(scope="module")
def tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.integers(0, 256, (ROWS[n], ROW_BYTES[n]), np.uint8) for n in ROWS}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tables: dict[str, np.ndarray]) -> Iterator[Any]:
    with featstore.pack(tmp_path_factory.mktemp("little") / "s", tables) as made:
        yield made


def mini_batches(sizes: list[tuple[int, int]], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Papers and authors of each; no authors at all where there are none."""
    rng = np.random.default_rng(seed)
    return [
        {"paper": rng.integers(0, ROWS["paper"], papers)}
        | ({"author": rng.integers(0, ROWS["author"], authors)} if authors else {})
        for papers, authors in sizes
    ]


def bytes_of(ids: dict[str, np.ndarray]) -> int:
    return sum(len(one) * ROW_BYTES[name] for name, one in ids.items())


def check(found: Any, ids: dict[str, np.ndarray], tables: dict[str, np.ndarray]) -> None:
    x = found.x if isinstance(found.x, dict) else {"paper": found.x}
    assert set(x) == set(ids)
    for name, one in ids.items():
        np.testing.assert_array_equal(np.asarray(x[name]), tables[name][one])


def through(
    store: Any, given: list[dict[str, np.ndarray]], tables: dict[str, np.ndarray], memory: int, **options: Any
) -> tuple[int, list[BudgetError]]:
    """Go through these mini-batches twice; where the budget is too small, go on with what the error names.
    The last budget, and the errors."""
    errors: list[BudgetError] = []
    state: Any = None
    done = 0  # of both epochs
    while True:
        with OnlineLoader(store, given, memory=memory, **options) as loader:
            if state is not None:
                loader.load_state(state)
            try:
                while done < 2 * len(given):
                    for found in loader:
                        assert found.index == done % len(given)
                        check(found, given[found.index], tables)
                        assert sum(loader.memory().values()) <= memory
                        done += 1
                        del found
                return memory, errors
            except BudgetError as error:
                assert error.given_bytes == memory < error.needed_bytes
                errors.append(error)
                state, memory = loader.state(), error.needed_bytes


SIZES = st.lists(
    st.tuples(st.sampled_from([0, 1, 30, 250, 300, 900, 2500]), st.sampled_from([0, 0, 5, 400])), min_size=1,
    max_size=7,
)  # fmt: skip


@given(
    sizes=SIZES, memory=st.sampled_from([1, 5 * MIB, 6 * MIB, 7 * MIB, 9 * MIB, 14 * MIB, 30 * MIB]),
    policy=st.sampled_from(["auto", "lru", "fifo"]), overtake=st.booleans(), seed=st.integers(0, 9),
    # The first mini-batch has to fit the devices' memory, which is a budget of its own.
    device=st.sampled_from([{}, {}, {"device": ["cpu", "cpu"], "device_memory": 8 * MIB}]),
)  # fmt: skip
@example([(250, 0), (2500, 0), (250, 0), (1, 400), (900, 400)], 6 * MIB, "auto", False, 0, {})
@example([(250, 0), (900, 0), (30, 5)], 1, "fifo", False, 0, {"device": "cpu", "device_memory": MIB})
@settings(max_examples=25, deadline=None)
def test_every_row_comes_whatever_sizes(
    store: Any, tables: dict[str, np.ndarray], sizes: list[tuple[int, int]], memory: int, policy: str,
    overtake: bool, seed: int, device: dict[str, Any],
) -> None:  # fmt: skip
    batches = mini_batches(sizes, seed)
    if device:
        pytest.importorskip("torch")
    if overtake:
        with OnlineLoader(store, batches, memory="40MiB", policy=policy, overtake=True, **device) as loader:
            found = list(loader)
        assert sorted(b.index for b in found) == list(range(len(batches)))
        for one in found:
            check(one, batches[one.index], tables)
        return
    enough, errors = through(store, batches, tables, memory, policy=policy, **device)
    if errors:
        again, more = through(store, batches, tables, enough, policy=policy, **device)
        # What it named last goes on, and from the beginning, too.
        assert (again, more) == (enough, [])
        largest = max(map(bytes_of, batches))
        assert enough <= 6 * MIB + 2.2 * largest


def test_it_needs_the_reader_and_two_of_the_largest(store: Any, tables: dict[str, np.ndarray]) -> None:
    batches = mini_batches([(5000, 0)] * 4)
    for policy in ("auto", "lru", "fifo", "sieve"):
        enough, errors = through(store, batches, tables, 1, policy=policy)
        assert len(errors) == 1
        with OnlineLoader(store, batches, memory=enough - 1, policy=policy) as loader:
            with pytest.raises(BudgetError) as refused:
                next(iter(loader))
            assert refused.value.needed_bytes == enough
        with OnlineLoader(store, batches, memory=enough, policy=policy) as loader:
            next(iter(loader))
            memory = loader.memory()
        beside = enough - memory["reader"] - 2 * bytes_of(batches[0])
        assert 0 < beside < 1.5 * MIB  # a few slots, and what is known of those under way


def test_a_larger_one_waits_and_the_budget_is_divided_anew(
    store: Any, tables: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int | None] = []
    original = extraction.Extraction.open

    def counted(self: Any, ids: Any, *, index: int | None = None, held_bytes: int = 0) -> None:
        opened.append(index)
        original(self, ids, index=index, held_bytes=held_bytes)

    monkeypatch.setattr(extraction.Extraction, "open", counted)
    batches = mini_batches([(200, 0)] * 5 + [(4000, 0)] + [(200, 0)] * 5 + [(4000, 0), (200, 300)])
    with OnlineLoader(store, batches, memory="24MiB", policy="lru") as loader:
        for _ in range(2):
            for batch, ids in zip(loader, batches, strict=True):
                check(batch, ids, tables)
        report = loader.report()
    assert opened == [None, 5, 12]  # the first, the large one, and the one with authors; each once
    asked = 2 * sum(len(one) for ids in batches for one in ids.values())
    counted_rows = sum(b.hits + b.misses for b in report.buffers.values())
    assert counted_rows == asked, "what was counted before is not forgotten"
    assert report.bytes_read >= 4000 * 1024


def test_nothing_is_skipped_by_one_that_is_refused(store: Any, tables: dict[str, np.ndarray]) -> None:
    batches = mini_batches([(300, 0)] * 3 + [(5000, 0)] + [(300, 0)] * 2)
    options: dict[str, Any] = {"policy": "lru"}
    seen = []
    with OnlineLoader(store, batches, memory="6MiB", **options) as loader:
        with pytest.raises(BudgetError, match="as large as number 3") as refused:  # noqa: PT012
            for batch in loader:
                seen.append(batch.index)
        state = loader.state()
        loader.load_state(state)
        with pytest.raises(BudgetError, match="number 3"):
            next(iter(loader))  # it is still its turn
        loader.set_epoch(1)
        assert next(iter(loader)).index == 0  # and the loader works
    with OnlineLoader(store, batches, memory=refused.value.needed_bytes, **options) as loader:
        loader.load_state(state)
        for batch in loader:
            check(batch, batches[batch.index], tables)
            seen.append(batch.index)
    assert seen == list(range(6))


def test_one_that_fits_alone_beside_a_small_one_is_not_refused(
    store: Any, tables: dict[str, np.ndarray]
) -> None:
    """Two of the largest would not fit; a largest one and those before and after it do."""
    batches = mini_batches([(100, 0), (100, 0), (5500, 0), (100, 0), (100, 0), (5500, 0), (100, 0)])
    largest = bytes_of(batches[2])
    memory = 6 * MIB + int(1.2 * largest)
    enough, errors = through(store, batches, tables, memory, policy="lru")
    assert (enough, errors) == (memory, [])
    state = {}
    with OnlineLoader(store, batches, memory=memory, policy="lru") as loader:
        for batch in loader:
            state[batch.index + 1] = loader.state()
    for begin in range(1, len(batches)):  # whoever goes on from anywhere needs no more
        with OnlineLoader(store, batches, memory=memory, policy="lru") as loader:
            loader.load_state(state[begin])
            for batch in loader:
                check(batch, batches[batch.index], tables)
            assert batch.index == len(batches) - 1


def test_what_was_skipped_counts_for_what_is_named(store: Any, tables: dict[str, np.ndarray]) -> None:
    """The table of authors is known to whoever goes on after the mini-batch that has rows of it."""
    batches = mini_batches([(300, 0), (30, 400), (900, 0), (1, 0), (250, 0), (250, 0), (900, 5)])
    enough, errors = through(store, batches, tables, 1, policy="fifo")
    assert len(errors) > 1
    assert through(store, batches, tables, enough, policy="fifo") == (enough, [])


def test_a_wrong_id_in_pieces_is_named(store: Any) -> None:
    batches = [np.arange(5000), np.append(np.arange(4999), ROWS["paper"])]
    with OnlineLoader(store, [{"paper": ids} for ids in batches], memory="16MiB") as loader:
        assert not loader.memory()
        with pytest.raises(IdError, match=r"mini-batch 1: .*out of range"):
            list(loader)


def test_breaking_off_in_pieces_leaves_nothing(store: Any, tables: dict[str, np.ndarray]) -> None:
    batches = mini_batches([(5000, 100)] * 3)
    with OnlineLoader(store, batches, memory="17MiB", policy="lru") as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                check(batch, batches[batch.index], tables)
                break
        loader.set_epoch(0)
        for batch, ids in zip(loader, batches, strict=True):
            check(batch, ids, tables)


def test_warm_rows_and_static_rows_in_little_memory(store: Any, tables: dict[str, np.ndarray]) -> None:
    batches = [{"paper": ids["paper"]} for ids in mini_batches([(4000, 0)] * 4)]
    with OnlineLoader(store, batches, memory="64MiB", policy="lru") as loader:
        list(loader)
        loader.save_cache("little")
    with OnlineLoader(store, batches, memory="14MiB", policy="lru", warm="little") as loader:
        for batch, ids in zip(loader, batches, strict=True):
            check(batch, ids, tables)
    static = {"paper": np.arange(3000), "author": np.arange(100)}
    with OnlineLoader(store, batches, memory="18MiB", policy="static", static=static) as loader:
        for batch, ids in zip(loader, batches, strict=True):
            np.testing.assert_array_equal(batch.x["paper"], tables["paper"][ids["paper"]])
        kept = {n: b.slots - b.slots_unkept for n, b in loader.extraction.buffers.items()}
        hits = loader.report().buffers["paper"].hits
    assert kept == {"paper": 3000, "author": 100}
    assert hits >= sum(int((ids["paper"] < 3000).sum()) for ids in batches)
