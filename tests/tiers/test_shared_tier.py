"""A shared buffer as the last tier: every row is the source's, in whatever stack and process, the disk is the
owner's to read, and nobody hangs."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import child, exit_code

import featstore
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CancelledError,
    ClosedError,
    IdError,
    UnknownNameError,
)
from featstore.shared.client import BufferClient
from featstore.testing import check_source
from featstore.tiers.buffer_tier import BUFFER_POLICIES

ROWS = 2000
SECONDS = 30.0


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    made = {
        "floats": rng.standard_normal((ROWS, 20), np.float32),
        "bytes": rng.integers(0, 255, (700, 3), np.uint8),
        "halves": rng.standard_normal((90, 2, 150)).astype(ml_dtypes.bfloat16),
        "records": rng.integers(0, 2**30, 300).astype([("a", "<i8")]),
        "number": rng.integers(0, 2**60, 1),
    }
    for one in made.values():
        one.flags.writeable = False
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: dict[str, np.ndarray]) -> Any:
    with pack(tmp_path_factory.mktemp("shared") / "s", arrays) as made:
        yield made


def smallest(store: featstore.Store, **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        featstore.SharedBuffer(store, memory=1, **options)
    return caught.value.needed_bytes


@pytest.fixture(scope="module")
def shared(store: featstore.Store) -> Any:
    with featstore.SharedBuffer(store, memory="16MiB") as made:
        yield made


# Several tables.


@settings(max_examples=8)
@given(
    tables=st.lists(
        st.sampled_from(["floats", "bytes", "halves", "records", "number"]),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    batch_rows=st.sampled_from([1, 7, 300, None]),
    policy=st.sampled_from(BUFFER_POLICIES),
    spare=st.integers(0, 300_000),
    seed=st.integers(0, 2**30),
)
def test_tables_share_one_budget(
    store: featstore.Store, arrays: dict[str, np.ndarray], tables: list[str], batch_rows: int | None,
    policy: str, spare: int, seed: int,
) -> None:  # fmt: skip
    """The smallest budget works, one byte less does not, and no more is held than was given."""
    options: dict[str, Any] = {
        "tables": tables,
        "batch_rows": batch_rows,
        "policy": policy,
        "engine": "threads",
    }
    needed = smallest(store, **options)
    with pytest.raises(BudgetError) as caught:
        featstore.SharedBuffer(store, memory=needed - 1, **options)
    assert caught.value.needed_bytes == needed
    rng = np.random.default_rng(seed)
    with featstore.SharedBuffer(store, memory=needed + spare, **options) as shared, shared.client() as client:
        parts = shared.memory()
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == needed + spare
        held = sum(buffer.memory_bytes for buffer in shared._buffers.values())
        assert held + shared._reader.budget.memory_bytes <= needed + spare - parts["requests"]
        assert os.fstat(shared._service._memory).st_size <= parts["rows"] + 64
        assert client.tables == shared.tables == tables
        requests = []
        for _ in range(6):
            some = rng.permutation(tables)[: rng.integers(1, len(tables) + 1)]
            ids = {str(n): rng.integers(0, len(arrays[n]), rng.integers(0, 60)) for n in some}
            requests.append((client.submit(ids), ids))
        for request, ids in requests[::2] + requests[1::2]:
            for name, rows in request.result().items():
                assert rows.tobytes() == arrays[name][ids[name]].tobytes()
        for name in tables:
            table = client.table(name)
            assert (table.rows, table.row_bytes) == (len(arrays[name]), arrays[name][0].nbytes)
            assert table.dtype == arrays[name].dtype
            there = client.holds(name, np.arange(len(arrays[name])))
            assert there.sum() <= shared.slots[name]
        assert client.stats().misses == sum(shared.stats(name).misses for name in tables)


def test_ids_need_a_table_where_there_are_several(
    shared: featstore.SharedBuffer, store: featstore.Store
) -> None:
    with shared.client() as client:
        with pytest.raises(IdError, match=r"this shared buffer has 5 tables; say which.*'halves'"):
            client.read([1])
        with pytest.raises(UnknownNameError, match=r"no table 'float'; it has .*did you mean 'floats'"):
            client.read({"float": [1]})
        with pytest.raises(ArgumentError, match="ids are not"):
            client.read({"floats": [1]}, out={"bytes": np.zeros((1, 3), np.uint8)})
        with pytest.raises(IdError, match="table 'bytes' has 700 rows"):
            client.read({"floats": [1], "bytes": [700]})
        with pytest.raises(IdError, match="table 'bytes' has 700 rows"):
            client.holds("bytes", [700])
    for wrong in (["no"], [], ["floats", "floats"]):
        with pytest.raises(ArgumentError, match="table"):
            featstore.SharedBuffer(store, tables=wrong)


def test_rows_go_where_they_are_wanted(shared: featstore.SharedBuffer, arrays: dict[str, np.ndarray]) -> None:
    with shared.client() as client:
        out = {"floats": np.zeros((9, 20), np.float32), "bytes": np.zeros((2, 3), np.uint8)}
        ids = {"floats": [5, 6], "bytes": [7, 7]}
        request = client.submit(ids, out=out, at={"floats": [8, 0], "bytes": [1, 0]})
        assert request.result()["floats"] is out["floats"]
        assert np.array_equal(out["floats"][[8, 0]], arrays["floats"][[5, 6]])
        assert not out["floats"][1:8].any()
        assert np.array_equal(out["bytes"], arrays["bytes"][[7, 7]])


# As a tier.


@st.composite
def above(draw: st.DrawFn) -> list[Any]:
    memory = st.sampled_from([None, "300KiB", "2MiB"])
    kinds = {
        "buffer": st.builds(featstore.Buffer, st.sampled_from(BUFFER_POLICIES), memory),
        "static": st.builds(
            featstore.Static,
            st.just({"floats": range(0, 90, 3), "number": [0]}),
            st.sampled_from([None, "200KiB"]),
        ),
    }
    return [draw(kinds[kind]) for kind in draw(st.permutations(list(kinds)))[: draw(st.integers(0, 2))]]


@settings(max_examples=6)
@given(tiers=above(), batch_rows=st.sampled_from([5, 64, None]), seed=st.integers(0, 2**30))
def test_every_row_is_the_sources(
    store: featstore.Store, arrays: dict[str, np.ndarray], tiers: list[Any], batch_rows: int | None, seed: int
) -> None:
    memory = smallest(store, batch_rows=batch_rows) + 50_000
    with (
        featstore.SharedBuffer(store, memory=memory, batch_rows=batch_rows, engine="threads") as shared,
        store.reader(tiers=[*tiers, featstore.Shared(shared.client())], memory="16MiB") as reader,
    ):
        check_source(reader, arrays, seed=seed, requests=6, ids_max=200)
        memory_of = reader.memory()
        assert memory_of["unused"] >= 0
        assert sum(memory_of.values()) == 16 << 20
        assert set(memory_of) == {"shared tier", "unused"} | {f"{t.name} tier" for t in reader.tiers}
        stats = reader.stats()
        assert 0 <= sum(stats.hits.values()) <= stats.rows_asked
        assert (stats.engine, stats.reads, stats.bytes_read) == ("shared", 0, 0)
        assert list(stats.hits)[-1] == "shared"
        assert " over ".join(tier.name for tier in reader.tiers) in str(reader)


def test_a_device_over_a_shared_buffer(
    store: featstore.Store, shared: featstore.SharedBuffer, arrays: dict[str, np.ndarray]
) -> None:
    tiers = [featstore.Device("cpu", "100KiB"), featstore.Shared(shared.client())]
    some = {name: arrays[name] for name in ("floats", "bytes", "halves", "number")}
    with store.reader(tiers=tiers, tables=list(some), memory="128MiB") as reader:
        check_source(reader, some, requests=5)


def test_the_tier_is_a_source(
    shared: featstore.SharedBuffer, store: Any, arrays: dict[str, np.ndarray]
) -> None:
    spec = featstore.Shared(shared.client())
    tier = spec.as_source(store, store.tables, spec.host_bytes(list(store.tables.values())))
    check_source(tier, arrays, threads=4)
    before = tier.hits()
    ids = np.arange(50)
    there = tier.holds("floats", ids)
    tier.submit({"floats": ids}, out=None).result(SECONDS)
    assert tier.hits() - before == there.sum()
    assert tier.holds("floats", ids).all()
    longer = np.zeros((60, 20), np.float32)
    tier.submit({"floats": ids}, out={"floats": longer}).result(SECONDS)
    assert np.array_equal(longer[:50], arrays["floats"][:50])
    tier.close()
    tier.close()
    with pytest.raises(ClosedError):
        tier.submit({"floats": ids}, out=None)
    with pytest.raises(BudgetError, match="ask a shared buffer"):
        spec.as_source(store, store.tables, 10)


def test_plan_says_what_it_does_not_know(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    with (
        featstore.SharedBuffer(store, memory="16MiB", tables="floats") as shared,
        store.reader(tiers=[featstore.Buffer("lru"), featstore.Shared(shared.client())]) as reader,
    ):
        assert reader.tables == ["floats"]  # by default those of the buffer
        shared.client().read(np.arange(30))
        plan = reader.plan(np.arange(100))
        assert dict(plan.hits) == {"buffer": 0, "shared": 30}
        assert (plan.engine, plan.reads, plan.bytes_read) == ("shared", 0, 0)
        assert plan.tables[0].rows_missed == 70
        assert math.isnan(plan.forecast_seconds)
        assert plan.to_dict()["forecast_seconds"] is plan.to_dict()["tables"][0]["forecast_seconds"] is None
        assert "70 missed" in str(plan)
        assert "read by the owner of the shared buffer" in str(plan)
        assert " ms " not in str(plan)
        reader.read(np.arange(100))
        assert reader.stats().hits == {"buffer": 0, "shared": 30}
        assert reader.plan(np.arange(100)).forecast_seconds == 0
        assert shared.reader_stats().rows_asked == 100


# What is refused.


def test_what_is_refused(
    store: featstore.Store, shared: featstore.SharedBuffer, tmp_path: Path, pack: Any
) -> None:
    last = featstore.Shared(shared.client())
    for tiers in ([last, featstore.Buffer()], [last, featstore.Static({"floats": [1]})], [last, last]):
        with pytest.raises(ArgumentError, match="Shared must be the last of tiers="):
            store.reader(tiers=tiers)
    with pytest.raises(ArgumentError, match="make it the last"):
        last.over(store.reader(), 1 << 20)
    for option in ({"engine": "threads"}, {"verify": False}, {"queue_depth": 4}):
        with pytest.raises(ArgumentError, match="which the owner of the shared buffer does"):
            store.reader(tiers=[last], **option)
    with pytest.raises(UnknownNameError):
        store.reader(tiers=[last], tables=["no"])
    with pytest.raises(BudgetError) as caught:
        store.reader(tiers=[last], memory=100)
    with store.reader(tiers=[last], memory=caught.value.needed_bytes) as reader:
        assert reader.memory()["unused"] == 0
    with pytest.raises(ArgumentError, match="client must be a client"):
        featstore.Shared(shared)  # type: ignore[arg-type]
    other = pack(tmp_path / "other", {"floats": np.zeros((ROWS, 20), np.float32)})
    with other, pytest.raises(ArgumentError) as found:
        other.reader(tiers=[last])
    for one in (store, other):
        assert one.uuid in str(found.value)
        assert str(one.path) in str(found.value)
    with (
        featstore.SharedBuffer(store, memory="16MiB", tables="bytes") as bytes_alone,
        pytest.raises(UnknownNameError, match="this shared buffer has no table 'floats'"),
    ):
        store.reader(tiers=[featstore.Shared(bytes_alone.client())], tables=["floats"])


# Ending.


def test_a_cancelled_request_ends(store: featstore.Store, shared: featstore.SharedBuffer) -> None:
    with store.reader(tiers=[featstore.Shared(shared.client())]) as reader:
        requests = [reader.submit({"floats": np.arange(ROWS), "bytes": np.arange(700)}) for _ in range(20)]
        for request in requests[::2]:
            request.cancel()
        assert not wait(requests, timeout=SECONDS).not_done
        for request in requests[1::2]:
            assert len(request.result()["bytes"]) == 700
        for request in requests[::2]:
            assert request.exception() is None or isinstance(request.exception(), CancelledError)


def test_closing_while_threads_read(
    store: featstore.Store, shared: featstore.SharedBuffer, arrays: dict[str, np.ndarray]
) -> None:
    reader = store.reader(tiers=[featstore.Shared(shared.client())], tables=["floats"])

    def read(seed: int) -> int:
        rng, done = np.random.default_rng(seed), 0
        try:
            while True:
                ids = rng.integers(0, ROWS, 300)
                assert np.array_equal(reader.read(ids), arrays["floats"][ids])
                done += 1
        except ClosedError:
            return done

    with ThreadPoolExecutor(7) as pool:
        reading = [pool.submit(read, seed) for seed in range(7)]
        time.sleep(0.3)
        pending = [reader.submit(np.arange(ROWS)) for _ in range(5)]
        reader.close()
        assert all(len(request.result(SECONDS)) == ROWS for request in pending)
        assert sum(one.result(SECONDS) for one in reading) > 7


def own(store: featstore.Store, pipe: Any) -> None:
    shared = featstore.SharedBuffer(store, memory=smallest(store, batch_rows=5), batch_rows=5)
    pipe.send(pickle.dumps(shared.client()))
    time.sleep(120)


def test_an_owner_that_dies_in_the_middle(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    here, there = multiprocessing.Pipe()
    owner = multiprocessing.get_context("fork").Process(target=own, args=(store, there))
    owner.start()
    try:
        assert here.poll(SECONDS)
        client = pickle.loads(here.recv())
        reader = store.reader(tiers=[featstore.Buffer("lru", "1MiB"), featstore.Shared(client)])
        assert np.array_equal(reader.read({"bytes": [3]})["bytes"], arrays["bytes"][[3]])
        everything = {name: np.tile(np.arange(len(one)), 9) for name, one in arrays.items()}
        requests = [reader.submit(everything) for _ in range(4)]
        time.sleep(0.05)
        owner.kill()
        assert not wait(requests, timeout=SECONDS).not_done
        assert any(isinstance(request.exception(), ClosedError) for request in requests)
        for ask in (lambda: reader.read({"floats": np.arange(ROWS)}), lambda: reader.plan({"floats": [1]})):
            with pytest.raises(ClosedError, match="has died"):
                ask()
        reader.close()
        with pytest.raises(ClosedError):
            store.reader(tiers=[featstore.Shared(client)])
    finally:
        owner.kill()
        owner.join(SECONDS)


def test_the_owner_closes(store: featstore.Store) -> None:
    shared = featstore.SharedBuffer(store, memory="16MiB")
    with store.reader(tiers=[featstore.Shared(shared.client())]) as reader:
        reader.read({"floats": [1]})
        shared.close()
        with pytest.raises(ClosedError, match="closed it"):
            reader.read({"floats": [1]})


# Processes.


def check_in_worker(path: Path, client: BufferClient, arrays: dict[str, np.ndarray], seed: int) -> None:
    with (
        featstore.open(path) as store,
        store.reader(
            tiers=[featstore.Buffer("lru", "1MiB"), featstore.Shared(client)], memory="8MiB"
        ) as reader,
    ):
        check_source(reader, arrays, seed=seed, requests=6, threads=2, ids_max=200)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_in_several_processes(store: featstore.Store, arrays: dict[str, np.ndarray], method: str) -> None:
    context = multiprocessing.get_context(method)
    with featstore.SharedBuffer(store, memory=smallest(store, batch_rows=20), batch_rows=20) as shared:
        client = shared.client()
        client.read({"number": [0]})  # connected before the fork
        workers = [
            context.Process(target=check_in_worker, args=(store.path, client, arrays, seed))
            for seed in range(3)
        ]
        for worker in workers:
            worker.start()
        check_in_worker(store.path, client, arrays, 9)
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        assert shared.stats().misses > 0
        assert shared._service.error is None


def test_a_forked_child_makes_its_own(store: featstore.Store, shared: featstore.SharedBuffer) -> None:
    with store.reader(tiers=[featstore.Shared(shared.client())], tables=["floats"]) as reader:
        rows = reader.read([1, 2])

        def in_child() -> bool:
            with pytest.raises(ClosedError, match="belongs to the process"):
                reader.read([1, 2])
            with store.reader(tiers=[featstore.Shared(shared.client())], tables=["floats"]) as mine:
                return bool(np.array_equal(mine.read([1, 2]), rows))

        assert exit_code(child(in_child)) == 0
        with pickle.loads(pickle.dumps(reader)) as other:
            assert np.array_equal(other.read([1, 2]), rows)


def test_a_worker_that_is_killed_leaves_nothing(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with featstore.SharedBuffer(store, memory=smallest(store, batch_rows=8), batch_rows=8) as shared:

        def read_for_ever() -> None:
            with store.reader(tiers=[featstore.Shared(shared.client())]) as reader:
                while True:
                    check_source(reader, arrays, requests=3)

        pids = [child(read_for_ever) for _ in range(2)]
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with store.reader(tiers=[featstore.Shared(shared.client())]) as reader:
            check_source(reader, arrays, requests=5)
        end = time.monotonic() + SECONDS
        while any(shared._service._pinned) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(shared._service._pinned)
