"""What each mode of a loader would cost: bytes that are exact are what is then read, the others are near;
what cannot be had says why; and ``mode="auto"`` takes what its rules say."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import ArgumentError, BudgetError, SourceError
from featstore.loaders.costs import costs as costs_module
from featstore.loaders.costs import packed as packed_module
from featstore.loaders.costs.choose import FASTER, choice
from featstore.loaders.costs.hits import Uses
from featstore.loaders.costs.popularity import learn
from featstore.loaders.costs.prices import Pattern, measured, prices, without_requests
from featstore.loaders.costs.result import ModeCost
from featstore.loaders.options import MODES
from featstore.loaders.train import forecast_once
from featstore.tiers.slots.simulation import simulate

NODES, WIDTH, BATCH = 40_000, 64, 100
TRAIN = np.arange(0, NODES, 8)
STEPS = -(-len(TRAIN) // BATCH)
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
SAMPLED: dict[str, Any] = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": BATCH}
#: None has room for all rows beside reader and mini-batches.
LITTLE, MEMORY, ENOUGH = "8MiB", "16MiB", "24MiB"


def skewed_edges(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    wanted = np.arange(1, NODES + 1) ** -0.6
    source = random.permutation(NODES)[random.choice(NODES, 300_000, p=wanted / wanted.sum())]
    return np.stack([source, random.integers(0, NODES, 300_000)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import featstore

    path = tmp_path_factory.mktemp("costs") / "s"
    with featstore.pack(
        path, FEATURES, graph=skewed_edges(1), order="ldg", topology=True, partitions=24,
        arrays={"train": TRAIN},
    ):  # fmt: skip
        pass
    with featstore.open(path) as opened:
        yield opened


def batches_of(count: int, rows: int = 1500, seed: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    wanted = np.arange(1, NODES + 1) ** -0.6
    wanted /= wanted.sum()
    return [random.choice(NODES, rows, replace=False, p=wanted) for _ in range(count)]


# Forecasts against what is then read.


def settled(loader: Any) -> Any:
    """The report when nothing is loaded ahead any more: beside an epoch's last mega-batch it is the next
    epoch's first."""
    before, now = None, loader.report()
    while before is None or now.bytes_read != before.bytes_read:
        time.sleep(0.3)
        before, now = now, loader.report()
    return now


def test_bytes_of_partitions_are_what_is_read(store: Any) -> None:
    cost = store.loader_costs(**SAMPLED, memory=MEMORY).modes["partitions"]
    assert cost.possible
    assert not cost.extrapolated
    with store.loader(mode="partitions", memory=MEMORY, **SAMPLED) as loader:
        assert loader._mode.loader.sets.steps > 1, "or nothing is read again"
        list(loader)
        once = settled(loader)
        list(loader)
        twice = settled(loader)
    assert twice.bytes_read - once.bytes_read == pytest.approx(cost.bytes_read, rel=0.01)
    assert twice.reads - once.reads == pytest.approx(cost.reads, rel=0.02)


def test_few_partitions_say_what_half_of_them_take(store: Any) -> None:
    said = store.loader_costs(**SAMPLED, memory=MEMORY).modes["partitions"].reason
    found = re.fullmatch(
        r"(\d+) of (\d+) partitions in memory at a time; less accurate than half of them, "
        r"which take ([\d,]+) bytes", said
    )  # fmt: skip
    assert found, said
    resident, count, needed = (int(one.replace(",", "")) for one in found.groups())
    assert resident < count / 2
    half = -(-count // 2)
    then = store.loader_costs(**SAMPLED, memory=needed).modes["partitions"].reason
    # Where all fit there is no mega-batch to be loaded ahead, which may take less than half of them twice.
    assert then.startswith((f"{half} of {count} partitions", "all partitions fit"))
    less = store.loader_costs(**SAMPLED, memory=int(0.9 * needed)).modes["partitions"].reason
    assert int(less.split()[0]) < half


@pytest.mark.parametrize("disk", [None, "4MiB"])
def test_bytes_of_compiled_are_what_is_read_where_an_epoch_was_seen_whole(
    store: Any, disk: str | None
) -> None:
    batches = batches_of(30)
    costs = store.loader_costs(batches, memory=LITTLE, disk=disk, share=1, seconds=60)
    assert costs.looked_at == costs.epoch_batches == 30
    cost = costs.modes["compiled"]
    assert cost.possible
    assert not cost.extrapolated
    assert not list((store.path / "packs").glob("costs*")) or not (store.path / "packs").exists()
    with store.loader(batches, mode="compiled", memory=LITTLE, disk=disk, name=f"c{disk}") as loader:
        forecast = loader._mode.loader.compiled.entry.forecast
        list(loader)
        once = loader.report().bytes_read
        list(loader)  # brings back what was in memory at first
        measured = loader.report().bytes_read - once
        assert loader.report().hit_rate == pytest.approx(cost.hit_rate, abs=0.001)
    rows = sum(table["bytes_read"] for table in forecast["tables"].values())
    assert rows == forecast["bytes_read"] <= cost.bytes_read
    # Records, and what is brought back, about; mini-batches that are read together share pages of the store.
    assert 0.85 * cost.bytes_read < measured < 1.1 * cost.bytes_read


def test_bytes_extrapolated_are_near(store: Any) -> None:
    """Of 50 mini-batches 16 are looked at: online and compiled within a quarter."""
    costs = store.loader_costs(**SAMPLED, memory=MEMORY, disk="1GiB")
    assert (costs.looked_at, costs.epoch_batches) == (16, STEPS)
    for mode in ("online", "compiled"):
        with store.loader(mode=mode, memory=MEMORY, **SAMPLED) as loader:
            list(loader)
            before = loader.report().bytes_read
            for _ in range(3):
                list(loader)
            measured = (loader.report().bytes_read - before) / 3
        cost = costs.modes[mode]
        assert cost.extrapolated
        assert cost.bytes_read == pytest.approx(measured, rel=1 / 4), mode


def test_disk_that_is_forecast_is_what_is_taken(store: Any) -> None:
    cost = store.loader_costs(**SAMPLED, memory=MEMORY).modes["compiled"]
    with store.loader(mode="compiled", name="taken", memory=MEMORY, **SAMPLED):
        there = (store.path / "packs" / "taken").rglob("*")
        taken = sum(path.stat().st_size for path in there if path.is_file())
    assert cost.disk_bytes == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_is_needed_is_what_is_needed(store: Any, mode: str) -> None:
    """A little more than the smallest works; less does not."""
    how: Any = SAMPLED if mode == "partitions" else {"batches": batches_of(20, 1500)}
    needed = store.loader_costs(**how, memory=ENOUGH).modes[mode].memory_needed_bytes
    assert needed is not None
    with store.loader(mode=mode, memory=int(1.15 * needed), **how) as loader:
        assert len(next(iter(loader)).n_id)
    if mode != "partitions":  # of less there is no sampler, and nothing to forecast from
        less = store.loader_costs(**how, memory=int(0.6 * needed)).modes[mode]
        assert not less.possible
        assert "memory" in less.reason
        with pytest.raises(BudgetError), store.loader(mode=mode, memory=int(0.85 * needed), **how) as loader:
            next(iter(loader))


# Prices.


def test_prices_give_back_what_was_measured() -> None:
    rows, runs = Pattern(1000, 4_096_000, 0.05, 0.004), Pattern(16, 8_000_000, 0.008, 0.002)
    some = Pattern(500, 10_240_000, 0.03, 0.003)
    found = prices([rows, runs, some], 1e-4)
    for one in (rows, some, runs):
        assert found.busy(one.reads, one.bytes_read) == pytest.approx(one.seconds)
        assert found.cpu(one.reads, one.bytes_read) == pytest.approx(one.cpu_seconds)
    assert found.busy(0, runs.bytes_read) == pytest.approx(0.008), "no reads: long ones"
    assert found.busy(10, 10 * runs.bytes_read) == pytest.approx(0.08)
    assert found.busy(0, 0) == 0
    assert found.busy(1, 2048) == pytest.approx(50e-6 - 2048 * 10e-6 / 16384), "shorter than any"


def test_asking_for_runs_one_by_one_is_not_a_price_of_theirs() -> None:
    """Readers of runs ask for many at once; and what is left is never nothing."""
    runs = Pattern(16, 8_000_000, 0.008, 0.002, requests=8)
    assert without_requests(runs, 1e-4).cpu_seconds == pytest.approx(0.0012)
    assert without_requests(runs, 1.0).cpu_seconds == pytest.approx(0.001)
    assert without_requests(runs._replace(requests=0), 1e-4) == runs._replace(requests=0)


@pytest.mark.parametrize(
    "seconds", [(1e-6, 2e-6, 3e-6), (1e-6, 1e-6, 4e-4), (5e-6, 2e-6, 1e-6), (0.0, 0.0, 0.0)]
)
def test_longer_reads_take_no_less_and_no_price_is_negative(seconds: tuple[float, ...]) -> None:
    """Also where a byte of long reads is the dearer one, or the clock was wrong."""
    lengths = (8192.0, 100_000.0, 400_000.0)
    curve = prices([Pattern(1, n, s, s) for n, s in zip(lengths, seconds, strict=True)], 0.0).clock
    each = [curve.of(1, byte_count) for byte_count in range(0, 600_000, 1000)]
    assert all(a <= b + 1e-12 for a, b in pairwise(each))
    assert min(each) >= 0


def test_prices_are_measured_on_the_store(store: Any) -> None:
    """Also where mini-batches hardly have rows, or a table is smaller than a run."""
    import featstore

    table = store.table("features")
    for ids in (batches_of(3), [np.array([7])], [np.empty(0, np.int64), np.arange(2)]):
        with featstore.Reader(store, memory="32MiB", static=None) as reader:
            found = measured(reader, table, ids)
        assert min(found.clock.seconds) > 0
        assert found.request_cpu_seconds > 0
        assert min(found.cores.seconds) >= 0


def test_with_two_mini_batches_at_once_reading_and_assembling_take_turns(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid = []
    original = packed_module._epoch
    monkeypatch.setattr(packed_module, "_epoch", lambda *args: laid.append(args) or original(*args))
    store.loader_costs(batches_of(20), memory=LITTLE)
    world, one, stages, _, _ = laid[0]
    stages = dict.fromkeys(stages, 0.0) | {"read": 3.0, "assemble": 2.0, "bring back": 0.5}
    assert original(world, replace(one, depth=2), stages, 0.0, 0.0) == 5.5
    assert original(world, replace(one, depth=3), stages, 0.0, 0.0) == 3.5
    assert original(world, replace(one, depth=2), stages, 0.0, 9.0) == 12.5, "who prepares reads, too"


# What cannot be had.


def test_modes_that_cannot_be_had_say_why(store: Any, tmp_path: Path) -> None:
    import featstore

    given = store.loader_costs(batches_of(20), memory=MEMORY).modes["partitions"]
    assert not given.possible
    assert "seeds=" in given.reason
    with featstore.pack(tmp_path / "plain", FEATURES[:2000]) as plain:
        modes = plain.loader_costs([np.arange(100)] * 4, memory="64MiB").modes
    assert modes["online"].possible
    assert modes["compiled"].possible


def test_a_full_disk_is_told(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "free_bytes", lambda path: 1000)
    modes = store.loader_costs(**SAMPLED, memory=ENOUGH).modes
    for mode in ("compiled", "rolling"):
        assert not modes[mode].possible
        assert "of disk" in modes[mode].reason
        assert "1000 B" in modes[mode].reason
    assert modes["online"].possible


def test_a_length_that_nobody_knows_is_asked_for(store: Any) -> None:
    def endless(_):
        return (iter(batches_of(200, 50)))  # fmt: skip

    with pytest.raises(ArgumentError, match="epoch_batches="):
        store.loader_costs(endless, memory=MEMORY, seconds=1e-9)
    costs = store.loader_costs(endless, memory=MEMORY, seconds=1e-9, epoch_batches=200)
    assert costs.epoch_batches == 200
    assert costs.looked_at < 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "seeds="),
        ({"batches": [np.arange(3)], "seeds": TRAIN}, "seeds= .* not both"),
        ({"batches": [np.arange(3)], "batch_size": 7}, "batch_size= .* not both"),
        ({"batches": [np.arange(3)], "seed": 0}, "seed= .* not both"),
        ({"batches": [np.arange(3)], "graph": "features"}, "graph= .* not both"),
        ({"batches": [np.arange(3)], "epoch_batches": 2}, "an epoch has 1 mini-batches"),
        ({"seeds": TRAIN, "fanouts": (2,), "batch_size": 9, "epoch_batches": 2}, "an epoch has .* leave it"),
        ({"batches": [np.arange(3)], "edge_table": "features"}, "is a table of nodes"),
        ({"batches": iter([np.arange(3)])}, "only once"),
        ({"batches": []}, "none"),
    ],
)
def test_what_is_refused(store: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises((ArgumentError, SourceError), match=says):
        store.loader_costs(**arguments)


# The result.


def test_the_result_is_plain_data_and_a_table(store: Any) -> None:
    costs = store.loader_costs(**SAMPLED, memory=MEMORY, disk="3x", train_seconds=0.001)
    data = json.loads(json.dumps(costs.to_dict()))
    assert list(data["modes"]) == list(MODES)
    assert data["mode"] in ("online", "rolling")
    text = str(costs)
    for mode in MODES:
        assert f"\n{mode} " in text
    assert "16 of an epoch's 50 mini-batches" in text
    assert f"auto: {costs.mode}, because {costs.because}" in text
    assert all(one.seconds["train"] == pytest.approx(0.05) for one in costs.modes.values() if one.possible)
    assert all(one.epoch_seconds >= 0.05 for one in costs.modes.values() if one.possible)


# What is taken by itself.

ONLINE = ModeCost("online", True, epoch_seconds=10.0, bytes_read=1000)
ROLLING = ModeCost("rolling", True, epoch_seconds=5.0, prepare_seconds=5.0, bytes_read=500, disk_bytes=99)
COMPILED = ModeCost("compiled", True, epoch_seconds=1.0, prepare_seconds=20.0, bytes_read=500, disk_bytes=77)
PARTITIONS = ModeCost("partitions", True, epoch_seconds=0.1, bytes_read=1)


def chosen(*changed: ModeCost, disk: bool = True, repeats: bool = False, epochs: int = 10) -> tuple[str, str]:
    modes = {one.mode: one for one in (ONLINE, COMPILED, ROLLING, PARTITIONS, *changed)}
    return choice(modes, disk=disk, repeats=repeats, epochs=epochs)


def test_rules_of_auto() -> None:
    """Each cause alone makes it another."""
    assert chosen()[0] == "rolling"
    assert chosen(disk=False)[0] == "online"
    assert "disk=" in chosen(disk=False)[1]
    assert chosen(repeats=True)[0] == "compiled"
    assert chosen(repeats=True, epochs=1)[0] == "online", "preparing does not pay"
    assert chosen(repeats=True, epochs=4)[0] == "compiled"
    assert chosen(replace(ONLINE, bytes_read=0))[0] == "online", "all rows fit"
    assert chosen(replace(ROLLING, epoch_seconds=10 * FASTER))[0] == "online", "not sure to be faster"
    assert chosen(replace(ROLLING, epoch_seconds=9.3 * FASTER))[0] == "rolling"
    assert chosen(replace(ROLLING, possible=False, reason="needs more"))[0] == "online"
    slow = replace(ROLLING, epoch_seconds=99.0)
    assert chosen(slow, replace(ONLINE, possible=False, reason="needs more"))[0] == "rolling"
    assert chosen(slow, replace(COMPILED, possible=False), repeats=True)[0] == "online"


def test_the_reason_has_the_numbers() -> None:
    mode, because = chosen()
    assert mode == "rolling"
    assert "5 s" in because
    assert "10 s" in because
    assert "99 B" in because
    assert "needs more" in chosen(replace(ROLLING, possible=False, reason="needs more"))[1]


def test_auto_takes_what_was_forecast(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader of the mode that the rules say, with the options that this one has."""
    for modes in ((ONLINE, ROLLING), (replace(ONLINE, epoch_seconds=1.0), ROLLING)):
        online, rolling = modes
        monkeypatch.setattr(costs_module, "online_cost", lambda world, one=online: one)
        monkeypatch.setattr(costs_module, "rolling_cost", lambda world, one=rolling: one)
        with store.loader(memory=ENOUGH, disk="1GiB", name="taken-by-auto", **SAMPLED) as loader:
            expected = "rolling" if online is ONLINE else "online"
            assert loader.mode == expected
            assert loader.costs.mode == expected
            assert loader.mode_because == loader.costs.because
            batch = next(iter(loader))
            np.testing.assert_array_equal(batch.x, FEATURES[batch.n_id])
        assert not (store.path / "packs" / "taken-by-auto-0").exists()


def test_auto_repeats_only_what_repeats(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "online_cost", lambda world: replace(ONLINE, epoch_seconds=100.0))
    monkeypatch.setattr(costs_module, "compiled_cost", lambda world, exact: COMPILED)
    monkeypatch.setattr(costs_module, "rolling_cost", lambda world: replace(ROLLING, epoch_seconds=100.0))
    batches = batches_of(20, 300)
    how: dict[str, Any] = {"memory": MEMORY, "disk": "1GiB", "name": "repeated"}
    with store.loader(batches, **how) as loader:
        assert loader.mode == "compiled", "a list is the same in every epoch"
    with store.loader(batches, repeat=False, **how) as loader:
        assert loader.mode == "online"
    with store.loader(**SAMPLED, **how) as loader:
        assert loader.mode == "online", "the store's own are fresh in every epoch"
    with store.loader(repeat=True, **SAMPLED, **how) as loader:
        assert loader.mode == "compiled"
    with store.loader(batches, policy="lru", **how) as loader:
        assert loader.mode == "online"
        assert "policy=" in loader.mode_because
    with store.loader(batches, memory=MEMORY) as loader:
        assert loader.mode == "online"
        assert "disk=" in loader.mode_because
        assert loader.costs is None


def test_auto_does_not_touch_another_sampler_s_mini_batches(store: Any) -> None:
    """Going through them once more could change what they give."""
    gone = []

    def epoch(number: int) -> Iterator[np.ndarray]:
        gone.append(number)
        return iter(batches_of(4, 300))

    with store.loader(epoch, memory=MEMORY, disk="1GiB") as loader:
        assert loader.mode == "online"
        assert "loader_costs" in loader.mode_because
        assert gone == []
        assert len(list(loader)) == 4
    assert gone == [0]


@pytest.mark.parametrize("memory", [1, "100KB"])
def test_too_little_memory_to_sample_is_said_as_a_loader_says_it(store: Any, memory: Any) -> None:
    """Of all the memory, and with as much as is said, it works."""
    with pytest.raises(BudgetError) as costs:
        store.loader_costs(**SAMPLED, memory=memory)
    with pytest.raises(BudgetError) as loader:
        store.loader(mode="online", **SAMPLED, memory=memory)
    assert str(costs.value) == str(loader.value)
    store.loader_costs(**SAMPLED, memory=costs.value.needed_bytes)


@pytest.mark.parametrize("option", ["repeat", "epochs", "train_seconds"])
def test_options_of_auto_are_of_auto(store: Any, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option}= is of mode 'auto', not of 'online'"):
        store.loader(mode="online", memory=MEMORY, **SAMPLED, **{option: 1})
    for other in ("hubs", "passes"):
        with pytest.raises(ArgumentError, match=f"{other}= is of mode 'partitions', not of 'auto'"):
            store.loader(memory=MEMORY, **SAMPLED, **{other: 1})


@pytest.mark.parametrize("mode", MODES)
def test_reports_say_what_reading_should_take_and_where_it_went(store: Any, mode: str) -> None:
    how: Any = SAMPLED if mode == "partitions" else {"batches": batches_of(60)}
    memory = {"compiled": LITTLE, "rolling": "15MiB"}.get(mode, MEMORY)
    with store.loader(mode=mode, memory=memory, **how) as loader:
        list(loader)
        report = loader.report()
        assert report.forecast_seconds > 0
        assert all(report.seconds[stage] > 0 for stage in ("check", "copy"))
        assert report.seconds["lookup"] >= 0
        assert {type(seconds) for seconds in report.seconds.values()} == {float}
        assert report.slowest not in ("lookup", "check", "copy"), "these are parts of others"


# How often rows are wanted.


def test_popularity_is_learned_from_few_mini_batches() -> None:
    """Hit rates of buffers, and of a schedule by next use, from 16 of 100 mini-batches of known chances."""
    random = np.random.default_rng(5)
    chance = np.minimum(0.9, 900 * np.arange(1, 30_001) ** -0.7 / (np.arange(1, 30_001) ** -0.7).sum())
    trace = [random.permutation(np.flatnonzero(random.random(30_000) < chance)) for _ in range(200)]
    few, all_ = Uses.of(trace[:100:6][:16], 100, 30_000), Uses(trace[:100], 100, None)
    assert few.popularity is not None
    assert few.popularity.batch_rows == pytest.approx(
        np.mean([len(one) for one in trace[:100:6][:16]]), rel=0.01
    )
    assert few.popularity.rows.sum() == pytest.approx(30_000, rel=0.001)
    for slots in (2000, 6000):
        hits, misses = simulate(trace, slots, "lru")
        warm = simulate(trace[:100], slots, "lru")
        true = (hits - warm[0]) / (hits - warm[0] + misses - warm[1])
        assert few.buffer_hit_rate(slots, ("lru",)) == pytest.approx(true, abs=0.03)
        assert few.scheduled(slots) == pytest.approx(all_.scheduled(slots), abs=0.04)


def test_mini_batches_that_share_nothing_have_no_hits() -> None:
    parts = np.split(np.random.default_rng(0).permutation(20_000), 40)
    uses = Uses(parts, 40, None)
    assert uses.buffer_hit_rate(5000, ("lru", "static")) < 0.3
    assert Uses.of(parts[:16], 40, 20_000).buffer_hit_rate(5000, ("lru",)) < 0.3


def test_rows_wanted_always_are_learned_as_such() -> None:
    ids = [np.concatenate([np.arange(50), 1000 + np.arange(k * 30, k * 30 + 30)]) for k in range(16)]
    popularity = learn(ids, 5000)
    assert popularity.rows[popularity.chance > 0.95].sum() == pytest.approx(50, rel=0.02)


def test_a_forecast_that_fails_leaves_nothing(store: Any) -> None:
    """What was recorded for it goes, whatever there was before."""
    packs = store.path / "packs"
    before = sorted(packs.iterdir()) if packs.exists() else None
    with pytest.raises(BudgetError):
        forecast_once(store, batches_of(4), "costs", memory=1 << 20)
    assert (sorted(packs.iterdir()) if packs.exists() else None) == before


def test_tables_of_which_nothing_is_asked_hit_nothing() -> None:
    """As where each mini-batch names all tables, of some with no ids."""
    uses = Uses.of([np.empty(0, np.int64)] * 6, 6, 1000)
    assert uses.buffer_hit_rate(10, ("lru", "s3-fifo")) == 0
    asked = Uses.of([np.arange(5) + 3 * number for number in range(6)], 6, 1000)
    assert 0 < asked.buffer_hit_rate(10**6, ("lru",)) <= 1
