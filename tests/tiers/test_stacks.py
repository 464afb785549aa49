"""Stacks of tiers, drawn: whatever stands over whatever, every row is the source's, and the budget holds."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.engine.request import Request
from featstore.errors import ArgumentError, BudgetError, ClosedError, CorruptionError, IdError
from featstore.storage.store import Table
from featstore.testing import ArraySource, check_source, check_tier
from featstore.tiers import RowSource
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.buffer_tier import BUFFER_POLICIES
from featstore.tiers.device import DeviceBuffer

ROWS = 3000


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {
        "floats": rng.standard_normal((ROWS, 20), np.float32),
        "bytes": rng.integers(0, 255, (700, 3), np.uint8),
        "halves": rng.standard_normal((90, 2, 150)).astype(ml_dtypes.bfloat16),
        "numbers": rng.integers(0, 2**60, 1),
    }
    for one in made.values():
        one.flags.writeable = False
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: dict[str, np.ndarray]) -> Any:
    graph = np.random.default_rng(0).integers(0, ROWS, (2, 20_000))
    path = tmp_path_factory.mktemp("stacks") / "s"
    with pack(path, arrays, graph={"floats": graph}, order={"floats": "degree"}) as made:
        yield made


def buffers() -> st.SearchStrategy[featstore.Buffer]:
    return st.builds(
        featstore.Buffer, st.sampled_from(BUFFER_POLICIES), st.sampled_from([None, "300KiB", "1MiB", "5MiB"])
    )


def statics() -> st.SearchStrategy[featstore.Static]:
    ids = st.dictionaries(
        st.sampled_from(["floats", "bytes", "halves"]), st.lists(st.integers(0, 89), max_size=40), max_size=3
    )
    return st.builds(featstore.Static, st.just("degree"), st.sampled_from([None, "200KiB"])) | st.builds(
        featstore.Static, ids, st.sampled_from(["300KiB", None])
    )


def devices() -> st.SearchStrategy[featstore.Device]:
    return st.builds(
        featstore.Device, st.sampled_from(["cpu", ["cpu", "cpu"]]), st.sampled_from(["300KiB", "2MiB"]),
        st.sampled_from(BUFFER_POLICIES),
    )  # fmt: skip


@st.composite
def stacks(draw: st.DrawFn) -> list[Any]:
    host = [draw(kind) for kind in draw(st.permutations([buffers(), statics()]))[: draw(st.integers(0, 2))]]
    return [draw(devices()), *host] if draw(st.booleans()) else host


@settings(max_examples=8)
@given(tiers=stacks(), seed=st.integers(0, 2**30), engine=st.sampled_from(["uring", "threads"]))
def test_every_row_is_the_sources(
    store: featstore.Store, arrays: dict[str, np.ndarray], tiers: list[Any], seed: int, engine: str
) -> None:
    with store.reader(tiers=tiers, memory="32MiB", engine=engine) as reader:
        check_source(reader, arrays, seed=seed, requests=6, ids_max=500)
        memory = reader.memory()
        assert memory["unused"] >= 0
        assert sum(memory.values()) == 32 << 20
        stats = reader.stats()
        assert 0 <= sum(stats.hits.values()) <= stats.rows_asked
        assert set(stats.hits) >= {tier.name for tier in reader.tiers}


@settings(max_examples=15)
@given(tiers=stacks())
def test_the_budget_that_an_error_names_works(store: featstore.Store, tiers: list[Any]) -> None:
    with pytest.raises(BudgetError) as found:
        store.reader(tiers=tiers, memory=1)
    needed = found.value.needed_bytes
    with pytest.raises(BudgetError):
        store.reader(tiers=tiers, memory=needed - 1)
    with store.reader(tiers=tiers, memory=needed) as reader:
        assert reader.memory()["unused"] >= 0
        assert len(reader.read({"floats": range(0, ROWS, 10)})["floats"]) == ROWS // 10


@pytest.mark.parametrize("policy", BUFFER_POLICIES)
def test_a_buffer_over_arrays(store: featstore.Store, arrays: dict[str, np.ndarray], policy: str) -> None:
    check_tier(featstore.Buffer(policy), store, arrays, 2 << 20)


@pytest.mark.parametrize("rows", [{"floats": np.arange(0, ROWS, 2)}, "degree"], ids=["given", "degree"])
def test_static_rows_over_arrays(store: featstore.Store, arrays: dict[str, np.ndarray], rows: Any) -> None:
    check_tier(featstore.Static(rows), store, arrays, 1 << 20)


@pytest.mark.parametrize("device", ["cpu", ["cpu", "cpu", "cpu"]])
def test_a_device_over_arrays(store: featstore.Store, arrays: dict[str, np.ndarray], device: Any) -> None:
    check_tier(featstore.Device(device, "1MiB"), store, arrays, 80 << 20)


@pytest.mark.parametrize(
    ("tier", "kind"),
    [(featstore.Buffer("lru", "1MiB"), FeatureBuffer), (featstore.Device("cpu", "1MiB"), DeviceBuffer)],
)
def test_rows_that_are_asked_for_again_and_again_are_no_more_pieces(
    store: featstore.Store,
    arrays: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    tier: Any,
    kind: Any,
) -> None:
    """Of a table that has slots for all of its rows: a request of any of them fits."""
    begun, begin = [], kind.begin
    monkeypatch.setattr(
        kind, "begin", lambda self, ids, *a, **k: begun.append(len(ids)) or begin(self, ids, *a, **k)
    )
    ids = {"numbers": np.zeros(2000, np.int64), "halves": np.tile(np.arange(90), 20)}
    with store.reader(tiers=[tier], memory="64MiB") as reader:
        found = reader.read(ids)
        for name, wanted in ids.items():
            rows = found[name]
            raw = rows.view(torch.uint8).numpy() if isinstance(rows, torch.Tensor) else rows
            assert raw.tobytes() == arrays[name][wanted].tobytes()
    assert sum(begun) == 1800 + 2000
    assert len(begun) < 20, "as many as the memory has ids for, not as many as there are rows"


class Double:
    """A tier of one's own: it remembers nothing, and counts what passes."""

    name, memory_bytes, passed = "double", 0, 0

    def host_bytes(self, tables: list[Table]) -> int:
        return 0

    def least_bytes(self, tables: list[Table]) -> int:
        return 0

    def over(self, below: RowSource, memory_bytes: int) -> Double:
        self.store, self.tables, self.below = below.store, below.tables, below
        return self

    def submit(self, ids: Any, *, out: Any, at: Any = None) -> Request:
        self.passed += sum(map(len, ids.values()))
        return self.below.submit(ids, out=out, at=at)

    def holds(self, table: str, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids), bool)

    def hits(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_tier_of_ones_own(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    above, below = Double(), Double()
    below.name = "lower"
    with store.reader(tiers=[above, featstore.Buffer("lru"), below]) as reader:
        check_source(reader, arrays, requests=10)
        assert above.passed >= reader.stats().hits["buffer"] + below.passed > 0
        assert list(reader.plan({"floats": [1]}).hits) == ["double", "buffer", "lower"]


class Wrong(Double):
    def submit(self, ids: Any, *, out: Any, at: Any = None) -> Request:
        return self.below.submit({name: one[::-1].copy() for name, one in ids.items()}, out=out, at=at)


def test_the_kit_finds_a_tier_that_gives_wrong_rows(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with pytest.raises(AssertionError, match="wrong rows"):
        check_tier(Wrong(), store, arrays, 1 << 20)


class Boastful(Double):
    def holds(self, table: str, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), bool)


def test_the_kit_finds_a_tier_that_says_it_holds_more(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with pytest.raises(AssertionError, match="said it holds"):
        check_tier(Boastful(), store, arrays, 1 << 20)


class BoastfulOfOne(Double):
    def holds(self, table: str, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), table == "bytes")


class Unnamed(Double):
    name = ""


class Numbered(Double):
    name = 7  # type: ignore[assignment]


class Silent(Double):
    least_bytes = None  # type: ignore[assignment]


class Vague(Double):
    def least_bytes(self, tables: list[Table]) -> int:
        return 0.5  # type: ignore[return-value]


class Demanding(Double):
    """It needs more than it says."""

    def over(self, below: RowSource, memory_bytes: int) -> Double:
        if memory_bytes < 4096:
            raise BudgetError(4096, memory_bytes, "work")
        return super().over(below, memory_bytes)

    def host_bytes(self, tables: list[Table]) -> int:
        return 8192


class Spreading(Demanding):
    """It holds more than it was given."""

    memory_bytes = 6000

    def least_bytes(self, tables: list[Table]) -> int:
        return 5000


class Immense(Demanding):
    """It is to have less than it needs."""

    def least_bytes(self, tables: list[Table]) -> int:
        return 10_000


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (BoastfulOfOne(), "rows of 'bytes' that it said it holds"),
        (Unnamed(), "name is empty"),
        (Numbered(), "must be a text, not 7"),
        (Silent(), "no method least_bytes"),
        (Vague(), "must give an int, not 0.5"),
        (Demanding(), "cannot be made in the 0 bytes of its least_bytes"),
        (Spreading(), "holds 6,000 bytes of 5,000"),
        (Immense(), "needs 10,000 bytes, more than the 8,192"),
    ],
)
def test_the_kit_finds(store: featstore.Store, arrays: dict[str, np.ndarray], spec: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_tier(spec, store, arrays, 1 << 20)


def test_the_kit_takes_a_tier_of_ones_own(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    check_tier(Double(), store, arrays, 1 << 20)


# What a reader of tiers says and takes.


def test_plan_and_stats_speak_of_each_tier(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    tiers = [
        featstore.Device("cpu", "20KiB", "lru"),
        featstore.Buffer("lru", "1MiB"),
        featstore.Static({"floats": range(50)}),
    ]
    with store.reader(tiers=tiers, tables=["floats"], memory="128MiB") as reader:
        first = reader.plan(np.arange(100))
        assert dict(first.hits) == {"device": 0, "buffer": 0, "static": 50}
        assert first.tables[0].rows_missed == 50
        reader.read(np.arange(100))
        reader.read(np.arange(100, 400))
        plan = reader.plan(np.arange(400))
        assert sum(plan.hits.values()) == 400
        assert plan.reads == 0
        assert 0 < plan.hits["device"] <= 256
        assert plan.tables[0].ids == 400
        assert "from the device tier" in str(plan)
        stats = reader.stats()
        assert (stats.requests, stats.rows_asked) == (2, 400)
        assert stats.bytes_asked == 400 * 80
        assert stats.hits == {"device": 0, "buffer": 0, "static": 50}


def test_short_forms_are_these_tiers(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    options = {"policy": "sieve", "device": "cpu", "device_memory": "1MiB", "static": {"bytes": [1, 2]}}
    with store.reader(**options, memory="128MiB") as reader:
        assert [tier.name for tier in reader.tiers] == ["device", "buffer"]
        assert reader.read({"bytes": [[1], [600]]})["bytes"].shape == (2, 1, 3)
        assert reader.stats().hits["static"] == 1
        assert "device over buffer over disk" in str(reader)
    with store.reader(policy="lru") as reader:
        assert [tier.name for tier in reader.tiers] == ["buffer"]
    assert isinstance(store.reader(), featstore.Reader)


def test_rows_as_the_ids_were_given(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    x = arrays["floats"]
    with store.reader(policy="lru", tables=["floats"]) as reader:
        ids = torch.tensor([[5, 7], [9, 5]])
        got = reader.read(ids)
        assert isinstance(got, torch.Tensor)
        assert np.array_equal(got.numpy(), x[ids.numpy()])
        out = np.empty((2, 2, 20), np.float32)
        assert reader.read(ids.numpy(), out=out) is out
        assert np.array_equal(out, x[ids.numpy()])
        with pytest.raises(ArgumentError, match="out must be"):
            reader.read([1, 2], out=np.empty((2, 19), np.float32))
        with pytest.raises(ArgumentError, match="give out too"):
            reader.submit([1], at=[0])
        with pytest.raises(IdError, match="node id 3000 is out of range"):
            reader.read([ROWS])
        with pytest.raises(IdError):
            reader.plan([-1])
    with store.reader(policy="lru") as reader, pytest.raises(IdError, match="4 tables; say which"):
        reader.read([1])


def test_out_on_the_host_of_rows_on_a_device(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    with store.reader(device="cpu", device_memory="1MiB", tables=["halves"], memory="64MiB") as reader:
        out = torch.empty((3, 2, 150), dtype=torch.bfloat16)
        assert reader.read([3, 1, 3], out=out) is out
        assert out.view(torch.int16).numpy().tobytes() == arrays["halves"][[3, 1, 3]].tobytes()
        assert reader.read([3]).dtype == torch.bfloat16


def test_requests_are_futures(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    with store.reader(policy="lru", tables=["floats"]) as reader:
        requests = [reader.submit([n, n + 1]) for n in range(20)]
        done, late = wait(requests, timeout=30)
        assert not late
        assert done == set(requests)

        async def gathered() -> list[Any]:
            wrapped = [asyncio.wrap_future(reader.submit([n])) for n in range(5)]
            return [*await asyncio.gather(*wrapped), await reader.submit([7])]

        rows = asyncio.run(gathered())
        assert np.array_equal(np.concatenate(rows), arrays["floats"][[0, 1, 2, 3, 4, 7]])


def test_a_cancelled_request_ends(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    below = ArraySource(store, arrays)
    for spec in (featstore.Buffer("lru"), featstore.Device("cpu", "1MiB"), featstore.Static({"bytes": [0]})):
        tier = spec.over(below, 4 << 20)
        below.held = True
        request = tier.submit({"floats": np.arange(3)}, out=None)
        assert not request.done()
        assert request.cancel()
        below.held = False
        below.let_go()
        assert wait([request], timeout=30).done
        assert request.cancelled()
        check_source(tier, arrays, requests=5)
        tier.close()


def test_use_after_close(store: featstore.Store) -> None:
    reader = store.reader(policy="lru", device="cpu", device_memory="1MiB", memory="128MiB")
    request = reader.submit({"floats": np.arange(100)})
    reader.close()
    reader.close()
    assert len(request.result(30)["floats"]) == 100
    for call in (lambda: reader.read({"floats": [1]}), reader.stats, lambda: reader.plan({"floats": [1]})):
        with pytest.raises(ClosedError):
            call()


def test_closing_tiers_ends_what_is_under_way(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    for spec in (featstore.Buffer("lru"), featstore.Device("cpu", "1MiB")):
        below = ArraySource(store, arrays)
        tier = spec.over(below, 4 << 20)
        below.held = True
        request = tier.submit({"floats": np.arange(10)}, out=None)
        threading.Timer(0.2, below.let_go).start()
        tier.close()
        assert np.array_equal(request.result(30)["floats"], arrays["floats"][:10])
        with pytest.raises(ClosedError):
            tier.submit({"floats": np.arange(10)}, out=None)


def test_a_reader_of_tiers_is_made_anew_from_a_pickle(store: featstore.Store, tmp_path: Path) -> None:
    with (
        store.reader(policy="lru", tables=["bytes"], memory="32MiB") as reader,
        pickle.loads(pickle.dumps(reader)) as other,
    ):
        assert np.array_equal(other.read([5]), reader.read([5]))
        assert other.memory_bytes == 32 << 20


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"tiers": [featstore.Buffer("lru"), featstore.Buffer("fifo")]},
            ArgumentError,
            "two tiers are called",
        ),
        ({"tiers": ["lru"]}, ArgumentError, "tiers must be a list of tiers"),
        ({"tiers": [featstore.Buffer("lru")], "policy": "lru"}, ArgumentError, "not both"),
        ({"tiers": [featstore.Buffer("lru")], "static": None}, ArgumentError, "not both"),
        ({"policy": "lru", "static_memory": 5}, ArgumentError, "static_memory"),
        ({"policy": "min"}, ArgumentError, "policy"),
        ({"policy": "lru", "by_row": True}, ArgumentError, "by_row"),
        ({"device": "cpu"}, ArgumentError, "device_memory"),
        ({"device_memory": "1MiB"}, ArgumentError, "device="),
        ({"policy": "lru", "device_policy": "lru"}, ArgumentError, "device="),
        ({"device": "cpu", "device_memory": 10}, BudgetError, "one row of each table"),
        ({"tiers": [featstore.Buffer("lru", "1GiB")], "memory": "64MiB"}, BudgetError, "these tiers"),
        ({"tiers": [featstore.Static({"floats": [ROWS]}), featstore.Buffer()]}, IdError, "out of range"),
        ({"tiers": [featstore.Static({"floats": [-1]})]}, IdError, "out of range"),
        ({"tiers": [featstore.Static({"float": [1]}), featstore.Buffer()]}, KeyError, "no table"),
        ({"policy": "lru", "memory": "1MiB"}, BudgetError, "smallest that works"),
        (
            {"tiers": [featstore.Static({"floats": range(3000)}, "1KiB"), featstore.Buffer()]},
            BudgetError,
            "static",
        ),
        ({"tiers": [featstore.Static({"floats": range(3000)}, "1KiB")]}, BudgetError, "static"),
    ],
)
def test_what_is_refused(
    store: featstore.Store, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        store.reader(**options)


def test_a_corrupt_page_ends_every_piece_that_wants_it(own: Path, features: Any) -> None:
    """One piece takes a row over from another that has failed, and none waits for one that is begun later."""
    chunk = next(p for p in sorted(own.rglob("*")) if p.is_file() and p.stat().st_size >= 16 * 1024)
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    with featstore.open(own) as store, store.reader(memory="4MiB", static=None) as reader:
        bad = [
            n for n in range(len(features)) if isinstance(reader.submit([n]).exception(20), CorruptionError)
        ]
        assert 5 < len(bad) < 30
        good = np.setdiff1d(np.arange(len(features)), bad)
        rng = np.random.default_rng(0)
        with store.reader(memory="8MiB", tiers=[featstore.Device("cpu", "100KiB")]) as stacked:
            for _ in range(20):
                requests = [stacked.submit(np.append(rng.choice(good, 20), bad[0])) for _ in range(9)]
                for request in requests:
                    assert isinstance(request.exception(20), CorruptionError)
            np.testing.assert_array_equal(stacked.read(good), features[good])
