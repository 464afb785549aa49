"""Rows on devices above the host's buffer: every row is the source's, none is brought twice, and hits are
those of the policy. All here on the device "cpu", several of which stand for several accelerators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import featstore
from featstore.base.dtypes import bfloat16
from featstore.errors import ArgumentError, BudgetError, CancelledError, FeatstoreError, IdError, SourceError
from featstore.loaders.online.extraction import Extraction
from featstore.loaders.online.loader import OnlineLoader
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.saved import SavedCache
from featstore.tiers.slots.layout import POLICIES
from featstore.tiers.slots.simulation import simulate

torch = pytest.importorskip("torch")

from featstore.tiers.device import DeviceBuffer, DeviceTicket  # noqa: E402

ROWS, ROW_BYTES = 900, 20
ON_DEVICES = sorted(set(POLICIES) - {"min", "static"})
MEMORY = "6MiB"


def rows_of(count: int, shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(
        0, 128, count * int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8
    )
    return raw.view(dtype).reshape(count, *shape)


def skewed(epoch: int, count: int = 8, size: int = 150, rows: int = ROWS) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(epoch)
    for _ in range(count):
        yield rng.permutation(np.unique((rng.random(size) ** 3 * rows).astype(np.int64)))


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return rows_of(ROWS, (5,), np.float32, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, x: np.ndarray) -> Iterator[Any]:
    with featstore.pack(tmp_path_factory.mktemp("device") / "s", x) as made:
        yield made


def check_epoch(loader: Any, x: np.ndarray, epoch: int) -> None:
    for batch, ids in zip(loader, list(skewed(epoch)), strict=True):
        assert isinstance(batch.x, torch.Tensor)
        np.testing.assert_array_equal(batch.n_id, ids)
        np.testing.assert_array_equal(batch.x.numpy(), x[ids])


# The loader.


@pytest.mark.parametrize("policy", ON_DEVICES)
@pytest.mark.parametrize("devices", [1, 3])
def test_every_policy_serves_the_source(store: Any, x: np.ndarray, policy: str, devices: int) -> None:
    options: dict[str, Any] = {
        "device": ["cpu"] * devices,
        "device_memory": 300 * ROW_BYTES,
        "device_policy": policy,
    }
    with OnlineLoader(store, skewed, memory=MEMORY, policy="fifo", **options) as loader:
        for epoch in range(3):
            check_epoch(loader, x, epoch)
        report = loader.report()
        assert sum(loader.memory().values()) <= 6 * 2**20
        assert loader.memory()["slot maps of devices"] > 0
    on_devices, on_host = report.devices["features"], report.buffers["features"]
    asked = sum(len(ids) for epoch in range(3) for ids in skewed(epoch))
    assert on_devices.hits + on_devices.misses == asked
    # the host is asked for what the devices have not
    assert on_host.hits + on_host.misses == on_devices.misses
    assert on_devices.hits > 0
    assert report.hit_rate == pytest.approx(1 - on_host.misses / asked)


@given(
    row_shape=st.sampled_from([(), (1,), (3,), (7,), (511,), (513,), (2, 6), (40_000,)]),
    dtype=st.sampled_from(
        ["uint8", "bool", "float16", "bfloat16", "int32", "float64", "complex64", "uint16"]
    ),
    devices=st.integers(1, 3),
    overtake=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_every_row_size_and_dtype(
    tmp_path_factory: pytest.TempPathFactory, row_shape: tuple[int, ...], dtype: str, devices: int,
    overtake: bool, seed: int
) -> None:  # fmt: skip
    count = 150
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    source = rows_of(count, row_shape, np.dtype(kind), seed)
    if dtype == "bool":
        source = rows_of(count, row_shape, np.uint8, seed) % 2 == 1
    batches = list(skewed(seed, 5, 20, count))
    row_bytes = source.nbytes // count
    with (
        featstore.pack(tmp_path_factory.mktemp("rows") / "s", source) as store,
        OnlineLoader(
            store,
            batches,
            memory="40MiB",
            device=["cpu"] * devices,
            device_memory=60 * row_bytes,
            overtake=overtake,
        ) as loader,
    ):
        for _ in range(2):
            found = list(loader)
            assert sorted(b.index for b in found) == list(range(5))
            for batch in found:
                wanted = source[batches[batch.index]]
                assert tuple(batch.x.shape) == wanted.shape
                assert batch.x.reshape(-1).view(torch.uint8).numpy().tobytes() == wanted.tobytes()


def test_a_saved_cache_fills_both_levels(store: Any, x: np.ndarray) -> None:
    options: dict[str, Any] = {
        "memory": "16MiB",
        "policy": "fifo",
        "device": ["cpu", "cpu"],
        "device_memory": 200 * ROW_BYTES,
    }
    with OnlineLoader(store, skewed, **options) as loader:
        check_epoch(loader, x, 0)
        loader.save_cache("two")
    with OnlineLoader(store, skewed, warm="two", **options) as loader:
        check_epoch(loader, x, 0)
        report = loader.report()
    assert report.buffers["features"].misses == 0
    asked = sum(len(ids) for ids in skewed(0))
    assert report.devices["features"].hits > asked // 2
    assert report.hit_rate == 1


@pytest.mark.parametrize("policy", ON_DEVICES)
def test_a_saved_cache_fills_other_devices_too(store: Any, x: np.ndarray, policy: str) -> None:
    """Saved on two devices; what is kept on those that are there is what would have left last, and the
    others' rows are on the host."""
    options: dict[str, Any] = {
        "memory": "16MiB",
        "policy": "fifo",
        "device_policy": policy,
    }
    with OnlineLoader(
        store, skewed, device=["cpu", "cpu"], device_memory=300 * ROW_BYTES, **options
    ) as loader:
        for epoch in range(2):
            check_epoch(loader, x, epoch)
        loader.save_cache(policy)
        there = {int(i) for buffer in (loader.extraction.buffers, loader.extraction.on_devices)
                 for i in buffer["features"].cached_ids()}  # fmt: skip
    for devices, slots in ((1, 200), (2, 150), (3, 130)):
        memory = slots * ROW_BYTES
        with OnlineLoader(
            store, skewed, device=["cpu"] * devices, device_memory=memory, warm=policy, **options
        ) as loader:
            next(iter(loader))
            loader.save_cache("again")
        with SavedCache(store, policy) as cache, SavedCache(store, "again") as again:
            saved, found = (np.concatenate(list(c.ids("features"))) for c in (cache, again))
        assert set(saved.tolist()) == there
        assert len(saved) == len(there)
        assert set(found.tolist()) == there  # nothing is lost between the levels


@given(
    ids=st.lists(st.integers(0, ROWS - 1), unique=True, max_size=60), devices=st.integers(1, 3),
    slots=st.integers(1, 25), cuts=st.lists(st.integers(0, 60), max_size=3),
)  # fmt: skip
def test_the_last_that_fit_go_to_their_device(
    store: Any, ids: list[int], devices: int, slots: int, cuts: list[int]
) -> None:
    pieces = np.split(np.array(ids, np.int64), sorted(cuts))
    with store.reader() as reader, FeatureBuffer(reader, slots=100, policy="fifo") as host:
        buffer = DeviceBuffer(host, ["cpu"] * devices, slots=slots, policy="fifo")
        staging = np.empty(10 * ROW_BYTES, np.uint8)
        others: list[int] = []
        for fit, rest in buffer.last_that_fit(lambda: iter(pieces)):
            buffer.load(fit, staging)
            others += rest.tolist()
        last = [[i for i in ids if i % devices == number][-slots:] for number in range(devices)]
        assert buffer.cached_ids().tolist() == [i for one in last for i in one]
        assert others == [i for i in ids if all(i not in one for one in last)]
        assert np.flatnonzero(buffer.holds(np.arange(ROWS))).tolist() == sorted(
            i for one in last for i in one
        )


def test_several_tables(tmp_path: Path) -> None:
    tables = {"paper": rows_of(500, (9,), np.int16, 1), "author": rows_of(200, (33,), np.uint8, 2)}
    rng = np.random.default_rng(5)
    batches = [{"paper": rng.permutation(500)[:80], "author": rng.permutation(200)[:40]} for _ in range(6)]
    options: dict[str, Any] = {"device": ["cpu", "cpu"], "device_memory": "8KiB"}
    with (
        featstore.pack(tmp_path / "s", tables) as store,
        OnlineLoader(store, batches, memory="32MiB", **options) as loader,
    ):
        for batch, ids in zip(loader, batches, strict=True):
            for name, source in tables.items():
                np.testing.assert_array_equal(batch.x[name].numpy(), source[ids[name]])
        assert set(loader.report().devices) == set(tables)


def test_what_waits_for_slots_of_a_device_is_not_begun_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second table's are taken, and what the first one gives back is not what it waits for."""
    tables = {"paper": rows_of(5000, (9,), np.int16, 1), "author": rows_of(2000, (33,), np.uint8, 2)}
    rng = np.random.default_rng(5)
    same = rng.permutation(5000)[:80]  # which are there
    batches = [{"paper": same, "author": rng.permutation(2000)[:40]} for _ in range(9)]
    begun, begin = [], Extraction.begin

    def counted(self: Extraction, *asked: Any) -> Any:
        begun.append(begin(self, *asked))
        return begun[-1]

    monkeypatch.setattr(Extraction, "begin", counted)
    options: dict[str, Any] = {"device": "cpu", "device_memory": 90 * 18 + 45 * 33}
    with (
        featstore.pack(tmp_path / "s", tables) as store,
        OnlineLoader(store, batches, memory="32MiB", **options) as loader,
    ):
        for batch, ids in zip(loader, batches, strict=True):
            time.sleep(0.05)
            for name, source in tables.items():
                np.testing.assert_array_equal(batch.x[name].numpy(), source[ids[name]])
    assert None in begun  # some had to wait
    assert len(begun) < 20 * len(batches)


def test_the_memory_it_names_works(store: Any, x: np.ndarray) -> None:
    for devices in (1, 2):
        options: dict[str, Any] = {"memory": MEMORY, "device": ["cpu"] * devices}
        with (
            pytest.raises(BudgetError, match="device_memory=") as raised,
            OnlineLoader(store, skewed, device_memory=20, **options) as loader,
        ):
            next(iter(loader))
        for memory, works in (
            (raised.value.needed_bytes, True),
            (raised.value.needed_bytes - ROW_BYTES, False),
        ):
            with OnlineLoader(store, skewed, device_memory=memory, **options) as loader:
                if works:
                    check_epoch(loader, x, 0)
                else:
                    with pytest.raises(BudgetError):
                        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device_memory": "1MiB"}, SourceError, "say on which, with device="),
        (
            {"device": "cpu", "device_memory": "1MiB", "device_policy": "static"},
            SourceError,
            "device_policy must be .* not 'static'",
        ),
        ({"device": "nonsense"}, SourceError, "device='nonsense' cannot be used here"),
        ({"device": "cpu", "tensors": False}, SourceError, "leave out device="),
    ],
)
def test_bad_input_is_named(
    store: Any, options: dict[str, Any], error: type[FeatstoreError], match: str
) -> None:
    with pytest.raises(error, match=match):
        OnlineLoader(store, skewed, **options)


def test_a_read_that_fails_holds_no_slots(store: Any, x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failing = FeatureBuffer.gather, [3]

    def gather(self: FeatureBuffer, *arguments: Any) -> Any:
        failing[0] -= 1
        if failing[0] == 0:
            raise OSError("made up")
        return original(self, *arguments)

    monkeypatch.setattr(FeatureBuffer, "gather", gather)
    options: dict[str, Any] = {"memory": MEMORY, "device": ["cpu", "cpu"], "device_memory": 150 * ROW_BYTES}
    with OnlineLoader(store, skewed, **options) as loader:
        for _ in range(3):
            failing[0] = 3
            with pytest.raises(OSError, match="made up"):
                list(loader)
        loader.set_epoch(0)
        check_epoch(loader, x, 0)


# The buffer by itself.


@pytest.fixture
def make(store: Any) -> Iterator[Callable[..., DeviceBuffer]]:
    opened: list[Any] = []

    def make(
        devices: int = 1, slots: int = 200, policy: str = "fifo", host_slots: int = ROWS
    ) -> DeviceBuffer:
        reader = store.reader(memory="8MiB", static=None)
        host = FeatureBuffer(reader, slots=host_slots, policy="lru")
        opened.extend([reader, host])
        return DeviceBuffer(host, ["cpu"] * devices, slots=slots, policy=policy)

    yield make
    for one in reversed(opened):
        one.close()


def gathered(buffer: DeviceBuffer, ticket: DeviceTicket) -> np.ndarray:
    limit = time.monotonic() + 20
    while not ticket.done():
        assert time.monotonic() < limit
    found: np.ndarray = buffer.gather(ticket, np.empty(len(ticket.ids) * ROW_BYTES, np.uint8)).numpy()
    return found


@pytest.mark.parametrize("policy", ON_DEVICES)
@given(seed=st.integers(0, 999), devices=st.integers(1, 3), slots=st.integers(60, 200))
@settings(max_examples=8)
def test_hits_are_those_of_the_policy(
    store: Any, x: np.ndarray, policy: str, seed: int, devices: int, slots: int
) -> None:
    batches = list(skewed(seed, 10, 60))
    with store.reader(memory="8MiB", static=None) as reader, FeatureBuffer(reader, slots=ROWS) as host:
        buffer = DeviceBuffer(host, ["cpu"] * devices, slots=slots, policy=policy)
        for ids in batches:
            ticket = buffer.begin(ids)
            assert ticket is not None
            np.testing.assert_array_equal(gathered(buffer, ticket), x[ids])
        stats = buffer.stats()
    shards = [[ids[ids % devices == n] for ids in batches] for n in range(devices)]
    expected = np.sum([simulate(one, slots, policy) for one in shards], 0)
    assert (stats.hits, stats.misses) == tuple(expected)
    assert stats.batches == len(batches)


def test_a_row_on_its_way_is_not_brought_twice(make: Callable[..., DeviceBuffer], x: np.ndarray) -> None:
    buffer = make(devices=2)
    first, second = buffer.begin(np.arange(50)), buffer.begin(np.arange(30, 70))
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(np.sort(second.asked_of_host), np.arange(50, 70))
    first.cancel()  # now the second has to bring all of its own
    np.testing.assert_array_equal(gathered(buffer, second), x[30:70])
    with pytest.raises(CancelledError):
        first.done()


def test_what_does_not_fit(make: Callable[..., DeviceBuffer], x: np.ndarray) -> None:
    buffer = make(devices=2, slots=10)
    with pytest.raises(BudgetError, match="cpu"):
        buffer.begin(np.arange(0, 22, 2))  # all belong on the first device
    with pytest.raises(IdError):
        buffer.begin([ROWS])
    one = buffer.begin(np.arange(20))
    assert one is not None
    assert buffer.begin(np.arange(20, 22)) is None
    np.testing.assert_array_equal(gathered(buffer, one), x[:20])
    other = buffer.begin(np.arange(20, 40))
    assert other is not None
    np.testing.assert_array_equal(gathered(buffer, other), x[20:40])


def test_a_row_that_occurs_twice_is_brought_after_another_gave_up(store: Any, x: np.ndarray) -> None:
    with store.reader() as reader, FeatureBuffer(reader, slots=100, policy="fifo") as host:
        buffer = DeviceBuffer(host, ["cpu"], slots=20, policy="fifo")
        first, second = buffer.begin([3, 4]), buffer.begin([3, 3, 5, 4, 3])
        assert first is not None
        assert second is not None
        first.release()
        limit = time.monotonic() + 20
        while not second.done():
            assert time.monotonic() < limit
        rows = buffer.gather(second, np.empty(5 * ROW_BYTES, np.uint8))
        np.testing.assert_array_equal(rows.numpy(), x[[3, 3, 5, 4, 3]])


def test_only_tickets_with_rows_are_gathered(store: Any, x: np.ndarray) -> None:
    staging = np.empty(5 * ROW_BYTES, np.uint8)
    with store.reader() as reader, FeatureBuffer(reader, slots=100) as host:
        buffer, other = (DeviceBuffer(host, ["cpu"], slots=20, policy="fifo") for _ in range(2))
        first, second = buffer.begin([3, 4]), buffer.begin([4, 5])
        assert first is not None
        assert second is not None
        with pytest.raises(ArgumentError, match="one that this buffer"):
            other.gather(first, staging)
        with pytest.raises(ArgumentError, match="not all there"):  # row 4 comes with the first
            buffer.gather(second, staging)
        with pytest.raises(ArgumentError, match="staging has 20 bytes, and 2 rows"):
            buffer.gather(first, staging[:ROW_BYTES])
        np.testing.assert_array_equal(gathered(buffer, first), x[[3, 4]])
        with pytest.raises(CancelledError, match="released"):
            buffer.gather(first, staging)
        np.testing.assert_array_equal(gathered(buffer, second), x[[4, 5]])


class Levels(RuleBasedStateMachine):
    """Tickets begun, gathered and given up in any order: no deadlock, no wrong row, none asked of the host
    that is there or on its way."""

    store: Any
    x: np.ndarray

    @initialize(devices=st.integers(1, 3), slots=st.integers(12, 30), policy=st.sampled_from(ON_DEVICES))
    def open(self, devices: int, slots: int, policy: str) -> None:
        self.reader = self.store.reader(memory="8MiB", static=None)
        self.host = FeatureBuffer(self.reader, slots=300, policy="lru")
        self.buffer = DeviceBuffer(self.host, ["cpu"] * devices, slots=slots, policy=policy)
        self.tickets: list[DeviceTicket] = []

    @rule(ids=st.lists(st.integers(0, 59), max_size=12))
    def begin(self, ids: list[int]) -> None:
        coming = {int(i) for t in self.tickets for i in t.asked_of_host} | set(
            self.buffer.cached_ids().tolist()
        )
        ticket = self.buffer.begin(np.array(ids, np.int64))
        if ticket is None:
            assert self.tickets
            return
        assert not coming & set(ticket.asked_of_host.tolist())
        assert len(set(ticket.asked_of_host.tolist())) == len(ticket.asked_of_host)
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule()
    def gather_the_oldest(self) -> None:
        ticket = self.tickets.pop(0)
        np.testing.assert_array_equal(gathered(self.buffer, ticket), self.x[ticket.ids])

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 9))
    def gather_one_out_of_order(self, which: int) -> None:
        ticket = self.tickets[which % len(self.tickets)]
        ticket.done()
        if not any(len(part.waits) for part in ticket._parts):  # waits for no other ticket
            self.tickets.remove(ticket)
            np.testing.assert_array_equal(gathered(self.buffer, ticket), self.x[ticket.ids])

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 9), cancel=st.booleans())
    def give_up(self, which: int, cancel: bool) -> None:
        ticket = self.tickets.pop(which % len(self.tickets))
        ticket.cancel() if cancel else ticket.release()
        # Its rows are brought by whoever wants them, from now on.
        for other in self.tickets:
            other.done()
            other.asked_of_host = np.unique([other.asked_of_host.tolist() + _own(other)])

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            for ticket in self.tickets:
                ticket.cancel()
            pins = [int(shard.map.slots["pins"].sum()) for shard in self.buffer._shards]
            assert pins == [0] * len(pins)
            self.host.close()
            self.reader.close()


def _own(ticket: DeviceTicket) -> list[int]:
    """What a ticket brings by now."""
    return [int(i) for fill in ticket._fills if fill.missed for i in fill.ids()]


def test_any_order_of_tickets(store: Any, x: np.ndarray) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Levels.store, Levels.x = store, x
    run_state_machine_as_test(
        Levels, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
