"""Tuning: the solver finds what brute force finds; the profile and the choice are those of the workload it
was given."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.base.dtypes import bfloat16
from featstore.engine import choose
from featstore.errors import BudgetError, SourceError, WaitTimeoutError
from featstore.loaders.batch import Batch
from featstore.loaders.online.loader import OnlineLoader
from featstore.sampling.neighbors import NeighborSampler, SampledSubgraph
from featstore.tiers.slots.layout import POLICIES
from featstore.tiers.slots.simulation import simulate
from featstore.tune import profiling as pf
from featstore.tune import timetable, tuning
from featstore.tune.allocation import (
    CORES,
    NOTHING_SPENT,
    STAGES,
    Choice,
    Cost,
    Profile,
    Reading,
    counts_up_to,
    forecast_loader,
    ranked,
)
from featstore.tune.timetable import Timetable
from featstore.tune.trials import candidates
from featstore.tune.tuning import tune
from featstore.tune.workload import neighbour_batches, stand_in

ROWS, BATCHES = 3000, 9
MEMORY = 8 << 20
URING, SLOW = Reading("uring", 128), Reading("threads", 32)


class Skewed:
    """Mini-batches of random ids, another epoch each time; ``seconds`` to sample each."""

    def __init__(self, seconds: float = 0.0, batches: int = BATCHES, tables: tuple[str, ...] = ("",)) -> None:
        self.seconds, self.batches, self.tables, self.epoch = seconds, batches, tables, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        rng = np.random.default_rng(self.epoch)
        for _ in range(self.batches):
            time.sleep(self.seconds)
            found = {t: np.unique((rng.random(300) ** 2 * ROWS).astype(np.int64)) for t in self.tables}
            yield found if self.tables != ("",) else found[""]


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, 100)).astype(np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, x: np.ndarray) -> Iterator[Any]:
    with featstore.pack(tmp_path_factory.mktemp("tune") / "s", x) as made:
        yield made


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy, nothing is left out either."""
    monkeypatch.setattr(timetable, "LEAST_SECONDS", 60.0)


def quickly(store: Any, make_batches: Any, step: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "memory": MEMORY,
        "cores": 2,
        "seconds": 0.2,
        "engines": ["threads"],
        "queue_depths": [16, 32],
    }
    return tune(store, make_batches, step, **given | options)


# The solver.

times = st.integers(0, 20).map(lambda n: n / 8)
costs = st.builds(Cost, times, times)
readings = st.sampled_from(
    [Reading(e, q, x) for e in ("uring", "threads") for q in (32, 128) for x in (None, 4)]
)
profiles = st.builds(
    Profile,
    st.integers(1, 8),
    st.dictionaries(st.integers(0, 5), costs, min_size=1),
    st.dictionaries(readings, costs, min_size=1),
    costs,
    st.dictionaries(st.integers(1, 5), costs, min_size=1),
)


def seconds_of(p: Profile, workers: int, reading: Reading, threads: int) -> float:
    """The definition, written down once more."""
    stages = [p.sample[workers], p.read[reading], p.extract, p.train[threads]]
    return max(max(s.seconds for s in stages), sum(s.cpu_seconds for s in stages) / p.cores)


@given(profiles)
def test_the_solution_is_the_best_of_all(profile: Profile) -> None:
    threads = [count for count in profile.train if count <= profile.cores] or [*profile.train]
    everything = [seconds_of(profile, *one) for one in product(profile.sample, profile.read, threads)]
    best = ranked(profile)
    assert best[0].seconds == min(everything)
    choice = best[0].choice
    assert seconds_of(profile, choice.workers, choice.reading, choice.train_threads) == best[0].seconds
    pairs = [(one.choice.workers, one.choice.train_threads) for one in best]
    assert sorted(pairs) == sorted(product(profile.sample, threads)), "each pair once"
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    for one in best:
        workers, count = one.choice.workers, one.choice.train_threads
        assert one.seconds == min(seconds_of(profile, workers, reading, count) for reading in profile.read)


@given(profiles, st.integers(1, 8))
def test_more_cores_are_never_slower(profile: Profile, more: int) -> None:
    larger = Profile(profile.cores + more, profile.sample, profile.read, profile.extract, profile.train)
    assert ranked(larger)[0].seconds <= ranked(profile)[0].seconds


@given(profiles)
def test_who_is_the_slowest(profile: Profile) -> None:
    for one in ranked(profile):
        assert one.slowest in (*STAGES, CORES)
        if one.slowest == CORES:
            assert all(cost.seconds < one.seconds for cost in one.stages.values())
            assert one.busy == pytest.approx(1)
        else:
            assert one.stages[one.slowest].seconds == one.seconds


def test_threads_only_where_cores_are_idle() -> None:
    train = {1: Cost(3, 3), 2: Cost(2, 4)}
    read = {URING: Cost(1, 0.5)}
    alone = Profile(4, {0: Cost(1, 1)}, read, NOTHING_SPENT, train)
    assert ranked(alone)[0].choice.train_threads == 2
    busy = Profile(2, {0: Cost(2, 2)}, read, NOTHING_SPENT, train)
    best = ranked(busy)[0]
    assert best.choice.train_threads == 1, "a second thread costs more than it brings"
    assert (best.seconds, best.slowest) == (3, "train")
    assert forecast_loader(busy, Choice(0, 2, URING)).slowest == CORES


def test_ties_take_what_costs_less() -> None:
    sample = {0: Cost(1, 1), 1: Cost(1, 1), 2: Cost(0.5, 1.5)}
    read = {URING: Cost(2, 1), SLOW: Cost(2, 0.5)}
    best = ranked(Profile(8, sample, read, NOTHING_SPENT, {2: Cost(1, 1), 1: Cost(1, 1)}))[0]
    assert best.choice == Choice(0, 1, SLOW)
    assert best.seconds == 2


@given(profiles, st.integers(1, 9))
def test_candidates_are_the_best_and_differ(profile: Profile, trials: int) -> None:
    best = ranked(profile)
    reading = best[0].choice.reading
    compared = Choice(0, 1, reading)
    found = candidates(best, trials, compared)
    assert len(found) == len(set(found))
    assert compared in found
    assert min(trials, len(best)) <= len(found) <= min(trials, len(best)) + 1
    assert found[0] == best[0].choice
    assert {choice.reading for choice in found} == {reading}
    counts = {one.choice.train_threads for one in best}
    assert len({choice.train_threads for choice in found}) >= min(len(counts), -(-trials // 2))


def test_impossible_profiles() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        Cost(-1, 0)
    with pytest.raises(ValueError, match="cannot take"):
        Cost(float("nan"), 0)
    with pytest.raises(ValueError, match="at least 1 core"):
        Profile(0, {0: NOTHING_SPENT}, {URING: NOTHING_SPENT}, NOTHING_SPENT, {1: NOTHING_SPENT})
    with pytest.raises(ValueError, match="'read'"):
        Profile(1, {0: NOTHING_SPENT}, {}, NOTHING_SPENT, {1: NOTHING_SPENT})
    with pytest.raises(KeyError):
        forecast_loader(
            Profile(1, {0: NOTHING_SPENT}, {URING: NOTHING_SPENT}, NOTHING_SPENT, {1: NOTHING_SPENT}),
            Choice(1, 1, URING),
        )


@given(st.integers(1, 300))
def test_counts_up_to(most: int) -> None:
    counts = counts_up_to(most)
    assert counts[0] == 1
    assert counts[-1] == most
    assert all(a < b <= max(a + 1, a * 3 // 2) for a, b in pairwise(counts))
    assert len(counts) <= 16


# The parts of a profile.


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"min", "static"}))
def test_misses_are_those_of_the_buffer(policy: str) -> None:
    trace = [{"features": ids} for _ in range(3) for ids in Skewed()]
    rows = [batch["features"] for batch in trace]
    half = len(rows) // 2
    for slots in (400, 1500, ROWS):
        missed = pf.misses(trace, "features", slots, policy)
        assert len(missed) == len(rows) - half
        wanted = simulate(rows, slots, policy)[1] - simulate(rows[:half], slots, policy)[1]
        assert sum(map(len, missed)) == wanted
        for ids, batch in zip(missed, rows[half:], strict=True):
            assert np.isin(ids, batch).all()
    with pytest.raises(ValueError, match="hold no mini-batch"):
        pf.misses(trace, "features", 10, policy)


def test_misses_of_a_static_set() -> None:
    trace = [{"features": ids} for _ in range(2) for ids in Skewed()]
    kept = pf.frequent([batch["features"] for batch in trace[:BATCHES]], 200)
    missed = pf.misses(trace, "features", 200 + 2 * max(len(b["features"]) for b in trace), "static")
    assert not np.isin(kept, np.concatenate(missed)).any()


def test_frequent() -> None:
    ids = [np.array([3, 1, 3]), np.array([2, 3, 1])]
    assert pf.frequent(ids, 2).tolist() == [3, 1]
    assert pf.frequent(ids, 9).tolist() == [3, 1, 2]
    assert pf.frequent([], 9).tolist() == []
    assert pf.frequent(ids, -1).tolist() == []


def test_pace() -> None:
    cost = pf.pace(Skewed(0.01, 12), 2, 12, 10)
    assert cost.seconds >= 0.01
    assert cost.cpu_seconds < cost.seconds
    with pytest.raises(SourceError, match="gave 1 mini-batches, where about 9 were expected"):
        pf.pace([np.arange(3)], 2, 9, 1)


def test_training_is_timed_by_threads() -> None:
    before = torch.get_num_threads()
    seen = []

    def step(batch: Any) -> None:
        seen.append(torch.get_num_threads())
        time.sleep(0.04 / torch.get_num_threads() ** 2)

    found = pf.time_training(step, [None, None], [1, 2], Timetable(0.1))
    assert torch.get_num_threads() == before
    assert set(seen) == {before, 1, 2}
    assert found[1].seconds >= 0.04
    assert 0.01 <= found[2].seconds < found[1].seconds
    assert pf.time_training(None, [], [1, 2], Timetable(1.0)) == {1: NOTHING_SPENT, 2: NOTHING_SPENT}


# All of it.


def test_a_choice_and_what_it_is_good_for(store: Any, x: np.ndarray) -> None:
    before = torch.get_num_threads()
    told: list[tuple[str, int, int]] = []
    steps = []
    result = quickly(store, lambda workers: Skewed(), steps.append, progress=lambda *one: told.append(one))
    assert steps
    assert all(np.array_equal(batch.x, x[batch.n_id]) for batch in steps[:20])
    assert torch.get_num_threads() == before
    assert [done for _, done, _ in told] == list(range(6))
    assert len({what for what, _, _ in told}) == len(told) == told[0][2]
    assert set(result.profile.sample) == {0, 1, 2}
    assert set(result.profile.train) == {before, 1, 2}
    assert {Reading("threads", 16), Reading("threads", 32)} < set(result.profile.read)
    assert {one.extracted for one in result.profile.read} > {None}
    assert next(iter(result.profile.read)) == result.before.choice.reading
    assert 0 < result.hit_rate < 1
    assert result.epoch_seconds == result.seconds * BATCHES
    assert result.after.choice == result.choice
    assert result.seconds <= 1.02 * min(trial.seconds for trial in result.tried)
    assert any((t.choice.workers, t.choice.train_threads) == (0, before) for t in result.tried), (
        "what it is compared with"
    )
    assert [p.hit_rate for p in result.curve] == sorted(p.hit_rate for p in result.curve)
    assert sum(result.memory.values()) <= MEMORY
    with store.loader(Skewed(), mode="online", **result.loader_options()) as loader:
        assert all(np.array_equal(batch.x, x[batch.n_id]) for batch in loader)
    result.apply()
    assert torch.get_num_threads() == result.train_threads
    torch.set_num_threads(before)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["stage"] for row in data["stages"]] == list(STAGES)
    assert data["loader_options"]["memory"] == MEMORY


def test_threads_beyond_the_cores_are_only_compared_with(store: Any) -> None:
    def step(batch: Any) -> None:
        time.sleep(0.03 / torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        result = quickly(store, lambda workers: Skewed(), step, trials=2, cores=2, workers=(0,))
    finally:
        torch.set_num_threads(before)
    assert result.before.choice.train_threads == 4
    assert any(trial.choice.train_threads == 4 for trial in result.tried)
    assert result.train_threads == 2


def test_slow_sampling_gets_workers(store: Any) -> None:
    made = []

    def make(workers: int) -> Skewed:
        made.append(workers)
        return Skewed(0.04 / max(1, workers) ** 2)

    result = quickly(store, make, trials=0, cores=3)
    assert sorted(made) == [0, 1, 2, 3], "once each"
    assert result.workers == 3
    assert result.before.slowest == "sample"
    assert result.before.seconds >= 0.04
    assert result.after.seconds < 0.5 * result.before.seconds
    assert result.tried == ()
    assert result.seconds == result.after.seconds


def test_a_slow_step_gets_threads(store: Any) -> None:
    def step(batch: Any) -> None:
        time.sleep(0.06 / torch.get_num_threads() ** 2)

    result = quickly(store, lambda workers: Skewed(), step, trials=2, cores=3)
    assert result.train_threads == 3
    assert result.profile.train[1].seconds >= 0.06
    assert min(result.after.seconds, result.seconds) >= 0.06 / 9, "by the model, and as tried out"


@pytest.mark.parametrize("slow", ["sample", "train", "workers"])
def test_the_seconds_given_are_kept_to(store: Any, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Whatever is slow: the rest is left out, by name, and there is a choice."""
    monkeypatch.setattr(timetable, "LEAST_SECONDS", 0.0)

    def make(workers: int) -> Skewed:
        return Skewed({"sample": 0.15, "workers": 0.3 * min(1, workers)}.get(slow, 0.0))

    def step(batch: Any) -> None:
        time.sleep(0.15 if slow == "train" else 0.0)

    begin = time.perf_counter()
    result = quickly(store, make, step, cores=3, seconds=1.5, trials=4)
    assert time.perf_counter() - begin < 1.5 * 1.5 + 1.0, (
        "a second for threads and files on a machine that is busy"
    )
    assert result.left_out, "what there was no time for"
    assert len(set(result.left_out)) == len(result.left_out)
    assert {"sample": "sampling with", "train": "train", "workers": "trying out"}[slow] in " ".join(
        result.left_out
    )
    assert result.to_dict()["left_out"] == list(result.left_out)
    assert result.seconds > 0


def test_nothing_is_left_out_where_there_is_time(store: Any) -> None:
    assert quickly(store, lambda workers: Skewed(), seconds=0.2).left_out == ()


def test_two_tables(tmp_path: Path, x: np.ndarray) -> None:
    with featstore.pack(tmp_path / "s", {"a": x, "b": x[:, :7].copy()}) as store:
        result = quickly(
            store, lambda workers: Skewed(tables=("a", "b")), trials=1, workers=[], memory="10MiB"
        )
        assert set(result.policy) == {"a", "b"}
        assert set(result.profile.sample) == {0}
        assert result.hit_rate > 0


def test_everything_in_the_buffer(store: Any) -> None:
    """Nothing is missed any more, and reading is free."""
    result = quickly(
        store, lambda workers: Skewed(batches=60), trials=0, workers=[], memory="64MiB", seconds=1
    )
    assert result.hit_rate > 0.97
    assert not result.filling
    assert result.profile.read[result.choice.reading].seconds < 0.01


def test_knobs_that_the_loader_may_have(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Knobs(OnlineLoader):
        def __init__(
            self,
            *arguments: Any,
            extracted: int | None = None,
            reader_memory: int | None = None,
            **options: Any,
        ) -> None:
            given.append({"extracted": extracted, "reader_memory": reader_memory})
            super().__init__(*arguments, **options)

    monkeypatch.setattr(tuning, "OnlineLoader", Knobs)
    result = quickly(store, lambda workers: Skewed(), trials=1, memory="40MiB", queue_depths=[16])
    found = set(result.profile.read)
    assert {one.extracted for one in found} == {None, *tuning.EXTRACTED_TRIED}
    assert {one.reader_bytes for one in found} >= {None, 4 << 20}
    assert given[0] == {"extracted": None, "reader_memory": None}
    reading = result.choice.reading
    # it was tried out
    assert {"extracted": reading.extracted, "reader_memory": reading.reader_bytes} in given[1:]
    options = result.loader_options()
    assert options.get("extracted") == reading.extracted
    assert options.get("reader_memory") == reading.reader_bytes


@pytest.mark.skipif(choose().name != "uring", reason="io_uring does not work here")
@pytest.mark.parametrize(("busy", "own"), [(0.5, {}), (1.6, {}), (1.6, {"threads": 2})])
def test_cores_are_divided_between_reading_and_the_rest(
    store: Any, monkeypatch: pytest.MonkeyPatch, busy: float, own: dict[str, Any]
) -> None:
    """Threads of the reader are tried where reading takes more than a core, and nobody has said how many; a
    step that needs the cores gets them."""
    asked: list[Any] = []

    def timed(_: Any, missed: Any, reading: Reading, memory: int, seconds: float, options: Any) -> Cost:
        asked.append(reading.threads or options.get("threads"))
        rings = min(reading.threads or 4, 4)
        return Cost(0.004 / rings, 0.0005 if busy < 1 else 0.004 * (1 + 0.2 * rings))

    monkeypatch.setattr(pf, "time_reading", timed)
    monkeypatch.setattr(
        pf, "time_training", lambda _, __, threads, ___: dict.fromkeys(threads, Cost(0.02, 0.02))
    )
    result = quickly(store, lambda workers: Skewed(), trials=0, cores=4, engines=["uring"], **own)
    tried = {one.threads for one in result.profile.read}
    assert tried == ({None, 1, 2, 3, 4} if busy > 1 and not own else {None})
    assert set(asked) == (tried if not own else {2})
    if busy > 1 and not own:
        assert result.choice.reading.threads == 1  # it is not the slowest stage, and takes the least
        assert result.loader_options()["threads"] == 1


def test_mistakes(store: Any) -> None:
    def make(workers: int) -> Skewed:
        return Skewed()

    for options, text in (
        ({"cores": 0}, "at least 1, not 0"),
        ({"workers": [-1]}, "must not be negative, not -1"),
        ({"queue_depths": []}, "queue_depths is empty"),
        ({"engines": []}, "engines is empty"),
        ({"seconds": 0}, "seconds must be a number of more than 0"),
        ({"seconds": float("inf")}, "seconds must be a number of more than 0"),
        ({"trials": -1}, "trials must not be negative"),
        ({"step": 3}, "must be a function"),
        ({"engine": "uring"}, "engine= of the loader"),
        ({"queue_depth": 3}, "queue_depth= of the loader"),
        ({"policy": "best"}, "policy must be one of .* not 'best'"),
    ):
        with pytest.raises(SourceError, match=text):
            quickly(store, make, **options)
    with pytest.raises(ValueError, match="engine must be one of"):
        quickly(store, make, engines=["fast"])
    with pytest.raises(BudgetError, match="too small"):
        quickly(store, make, memory="1MiB")
    with pytest.raises(SourceError, match="returned a generator"):
        quickly(store, lambda workers: iter(Skewed()))
    with pytest.raises(SourceError, match="returned a int"):
        quickly(store, lambda workers: 3)
    with pytest.raises(SourceError, match="gave 0 mini-batches"):
        quickly(store, lambda workers: [])
    with pytest.raises(SourceError, match=r"make_batches\(1\) gave 1 mini-batches, where about 9"):
        quickly(store, lambda workers: Skewed() if workers == 0 else [np.arange(3)])


def test_errors_of_the_step_come_through(store: Any) -> None:
    def step(batch: Any) -> None:
        raise RuntimeError("out of patience")

    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="out of patience"):
        quickly(store, lambda workers: Skewed(), step)
    assert torch.get_num_threads() == before


class HangsInWorkers(NeighborSampler):
    """A sampler that never comes back in a worker process."""

    def sample(self, seeds: Any, batch_index: int = 0, *, epoch: int = 0) -> SampledSubgraph:
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(600)
        return super().sample(seeds, batch_index, epoch=epoch)


@pytest.mark.timeout(60)
def test_workers_that_hang_end_the_tuning(store: Any) -> None:
    sampler = HangsInWorkers(np.arange(ROWS + 1), np.arange(ROWS)[::-1].copy(), [1])
    make = neighbour_batches(sampler, np.arange(90), 10, timeout_seconds=1.0)
    assert len(list(make(0))) == len(make(1)) == 9  # type: ignore[arg-type]
    with pytest.raises(WaitTimeoutError, match="no mini-batch came from 1 sampler workers within 1 seconds"):
        quickly(store, make, workers=[1], nodes=lambda batch: batch["n_id"])


def test_what_workers_raise_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DataLoader timed out of mind")

    sampler = NeighborSampler(np.arange(ROWS + 1), np.arange(ROWS), [1])
    monkeypatch.setattr(NeighborSampler, "sample", wrong)
    with pytest.raises(RuntimeError, match="timed out of mind") as raised:
        list(neighbour_batches(sampler, np.arange(9), 3)(1))
    assert not isinstance(raised.value, WaitTimeoutError)


def test_an_epoch_of_one_mini_batch_is_refused(store: Any) -> None:
    with pytest.raises(SourceError, match=r"an epoch is one mini-batch.*make smaller ones"):
        quickly(store, lambda workers: Skewed(batches=1))


def test_what_it_was_tuned_with_is_part_of_the_options(store: Any) -> None:
    """Whoever copies them has the loader that was measured."""
    result = quickly(store, lambda workers: Skewed(), trials=0, policy="lru", verify=False)
    assert {"policy": "lru", "verify": False}.items() <= result.loader_options().items()
    assert {"policy": "lru", "verify": False}.items() <= result.to_dict()["loader_options"].items()
    with store.loader(Skewed(), mode="online", **result.loader_options()) as loader:
        assert sum(1 for _ in loader) == BATCHES


def test_the_model_that_stands_in_trains_on_bfloat16() -> None:
    sample = {"nodes": (2, 3), "edges": (3,), "row": np.array([2, 3, 4]), "col": np.array([0, 0, 1])}
    rows = np.ones((5, 4), np.float32).astype(bfloat16())
    stand_in(4, (3,))(Batch(0, np.arange(5), rows, sample))
