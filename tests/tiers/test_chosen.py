"""Buffers that choose their policy: whatever they take and change to, every row is the source's, the budget
holds, and what is chosen can be seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, FeatstoreError
from featstore.testing import ArraySource, check_source, check_tier
from featstore.tiers import chosen
from featstore.tiers.slots import choose
from featstore.tiers.slots.choose import CANDIDATES

ROWS, WIDTH = 6000, 100
MEMORY = 12 << 20
ROUNDS = 8  # through all rows, after which it has looked twice


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    made = {
        "wide": rng.standard_normal((ROWS, WIDTH), np.float32),
        "narrow": rng.integers(0, 255, (9000, 3), np.uint8),
    }
    for one in made.values():
        one.flags.writeable = False
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: dict[str, np.ndarray]) -> Any:
    with pack(tmp_path_factory.mktemp("chosen") / "s", arrays) as made:
        yield made


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses in small budgets, and soon."""
    monkeypatch.setattr(chosen, "_CHOOSING_SHARE", 2)
    monkeypatch.setattr(chosen, "CHOOSING_BYTES", 1 << 20)
    monkeypatch.setattr(choose, "LOG_ROWS", 2400)
    monkeypatch.setattr(choose, "SHADOW_SLOTS", 512)


def skewed(rng: np.random.Generator, count: int) -> np.ndarray:
    return (rng.random(count) ** 4 * ROWS).astype(np.int64)


def test_a_buffer_that_chooses_over_arrays(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    check_tier(featstore.Buffer("auto"), store, arrays, 3 << 20)


@settings(max_examples=5)
@given(
    memory=st.sampled_from(["4MiB", "4500KiB", "900KiB"]),
    forced=st.lists(st.sampled_from(CANDIDATES), min_size=1, max_size=6),
    over=st.sampled_from([[], [featstore.Static({"wide": range(50)}, "100KiB")]]),
    device=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_every_row_is_the_sources_whatever_is_chosen(
    store: featstore.Store, arrays: dict[str, np.ndarray], memory: str, forced: list[str], over: list[Any],
    device: bool, seed: int,
) -> None:  # fmt: skip
    """What is chosen is drawn, so that it changes all the time."""
    left: Iterator[str] = cycle(forced)
    decided = 0
    honest = choose.PolicyChoice.decide

    def decide(self: choose.PolicyChoice) -> str:
        nonlocal decided
        honest(self)
        decided += 1
        self.policy = next(left)
        return self.policy

    tiers = [*over, featstore.Buffer("auto", memory)]
    tiers = [featstore.Device("cpu", "60KiB"), *tiers] if device else tiers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose.PolicyChoice, "decide", decide)
        patch.setattr(choose, "LOG_ROWS", 900)
        with store.reader(tiers=tiers, memory="40MiB") as reader:
            check_source(reader, arrays, seed=seed, requests=15, ids_max=1500)
            taken = reader.stats().policies["buffer"]
            assert set(taken) == {"wide", "narrow"}
            assert set(taken.values()) <= {*CANDIDATES}
            assert (decided > 2) == (memory != "900KiB")  # in which nothing is chosen
            held = reader.memory()
            assert held["unused"] >= 0
            assert held["buffer tier"] <= featstore.Buffer("auto", memory).memory
            assert 0 <= sum(reader.stats().hits.values()) <= reader.stats().rows_asked


def test_what_hits_most_is_taken_and_told(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    """Going round and round through more rows than there are slots hits nothing but rows that are kept."""
    tiers = [featstore.Buffer("auto", "3MiB")]
    with store.reader(tiers=tiers, memory=MEMORY, tables=["wide"]) as reader:
        slots = reader.tiers[0]._buffers["wide"].slots  # type: ignore[attr-defined]
        assert reader.stats().policies == {"buffer": {"wide": "s3-fifo"}}
        assert "goes by s3-fifo: too little is seen" in str(reader.plan([1]))
        for _ in range(ROUNDS):
            for low in range(0, ROWS, 100):
                ids = np.arange(low, low + 100)
                np.testing.assert_array_equal(reader.read(ids), arrays["wide"][ids])
        stats = reader.stats()
        assert stats.policies == {"buffer": {"wide": "static"}}
        plan = reader.plan([1])
        assert "goes by static: of the last rows seen these would have hit: static " in str(plan)
        assert plan.to_dict()["policies"]["buffer"]["wide"]["name"] == "static"
        before = reader.stats()
        for low in range(0, ROWS, 100):
            reader.read(np.arange(low, low + 100))
        since = reader.stats().since(before)
        assert since.policies == stats.policies
        assert slots > since.hits["buffer"] >= 0.6 * slots
    with store.reader(tiers=[featstore.Buffer("fifo", "2MiB")], memory=MEMORY, tables=["wide"]) as reader:
        for low in [*range(0, ROWS, 100)] * 2:
            reader.read(np.arange(low, low + 100))
        assert reader.stats().hits["buffer"] == 0
        assert "goes by fifo: it was asked for" in str(reader.plan([1]))


def test_where_nothing_is_chosen_that_is_said(store: featstore.Store) -> None:
    for memory, because in (
        ("900KiB", "the memory is too little to choose another"), ("8MiB", "all rows have slots"),
    ):  # fmt: skip
        tiers = [featstore.Buffer("auto", memory)]
        with store.reader(tiers=tiers, memory="16MiB", tables=["wide"]) as reader:
            assert reader.plan([1]).policies == {"buffer": {"wide": ("s3-fifo", because)}}


def test_the_budget_that_an_error_names_works(store: featstore.Store) -> None:
    with pytest.raises(BudgetError) as found:
        store.reader(tiers=[featstore.Buffer("auto")], memory=1)
    with store.reader(tiers=[featstore.Buffer("auto")], memory=found.value.needed_bytes) as reader:
        assert len(reader.read({"wide": range(0, ROWS, 10)})["wide"]) == -(-ROWS // 10)


def test_rows_that_cannot_be_kept_are_an_error_of_who_asked(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """Reading what a chosen policy is to keep fails: that is told, once, and the buffer goes on."""
    below = ArraySource(store, {"wide": arrays["wide"]})
    tier = featstore.Buffer("auto").over(below, 3 << 20)
    honest, broken = tier._choices.decide, OSError(5, "the device fails")  # type: ignore[attr-defined]

    def decide(*, wait: bool) -> None:
        below.error = broken
        try:
            honest(wait=wait)
        finally:
            below.error = None

    tier._choices.decide = decide  # type: ignore[attr-defined]
    errors = []
    for _ in range(ROUNDS):
        for low in range(0, ROWS, 100):
            ids = np.arange(low, low + 100)
            try:
                rows = tier.submit({"wide": ids}, out=None).result(60)["wide"]
            except OSError as error:
                errors.append(error)
                continue
            np.testing.assert_array_equal(rows, arrays["wide"][ids])
    assert errors
    assert all(error is broken for error in errors)
    tier.close()


def test_it_changes_while_many_ask(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    with store.reader(tiers=[featstore.Buffer("auto", "3MiB")], memory=MEMORY, tables=["wide"]) as reader:
        failed: list[BaseException] = []

        def ask(number: int) -> None:
            rng = np.random.default_rng(number)
            try:
                for _ in range(60):
                    ids = skewed(rng, int(rng.integers(1, 3000)))
                    np.testing.assert_array_equal(reader.read(ids), arrays["wide"][ids])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=ask, args=[n]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)
        assert "would have hit" in str(reader.plan([1]))
        assert reader.memory()["unused"] >= 0


def test_options_of_a_policy_are_not_of_one_that_is_chosen() -> None:
    with pytest.raises(FeatstoreError, match="no option 'gamma'"):
        featstore.Buffer("auto", gamma=0.5)
