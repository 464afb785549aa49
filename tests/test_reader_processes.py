"""Readers in other processes: after a fork, pickled, and in workers as a data loader starts them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gates import Gate
from processes import in_child

import featstore
from featstore.reader.reader import Reader

MEMORY = "4MiB"


@pytest.fixture
def reader(store: featstore.Store, engine: str) -> Any:
    with store.reader(memory=MEMORY, engine=engine) as made:
        yield made


def child_reads(reader: Reader, ids: np.ndarray, expected: np.ndarray) -> int:
    return int(
        np.array_equal(reader.read(ids), expected) and np.array_equal(reader.submit(ids).result(20), expected)
    )


def test_a_forked_child_reads_and_so_does_its_parent(reader: Reader, features: np.ndarray) -> None:
    ids = np.array([999, 0, 5, 5])
    expected = features[ids]
    for before in (True, False):
        if before:
            reader.read([0])
        assert in_child(lambda: child_reads(reader, ids, expected)) == 0
        np.testing.assert_array_equal(reader.read(ids), expected)

    def closes() -> bool:
        reader.read(ids)
        reader.close()
        return True

    assert in_child(closes) == 0
    np.testing.assert_array_equal(reader.read(ids), expected)


def test_a_child_forked_while_requests_are_under_way(store: featstore.Store, features: np.ndarray) -> None:
    ids = np.arange(100)
    with store.reader(memory=MEMORY) as reader:
        gate = Gate(reader)
        requests = [reader.submit(ids) for _ in range(6)]
        assert gate.arrived.acquire(timeout=10)
        assert in_child(lambda: child_reads(reader, ids, features[ids])) == 0

        def closes() -> bool:
            reader.close()  # unused in the child: nothing to wait for
            return True

        assert in_child(closes) == 0
        gate.open()
        for request in requests:
            np.testing.assert_array_equal(request.result(10), features[ids])


def test_threads_of_a_forked_child_share_one_engine(reader: Reader, features: np.ndarray) -> None:
    ids = np.arange(200)

    def work() -> bool:
        barrier = threading.Barrier(6)

        def read(_: int) -> bool:
            barrier.wait()
            return bool(child_reads(reader, ids, features[ids]))

        with ThreadPoolExecutor(6) as pool:
            return all(pool.map(read, range(6)))

    assert in_child(work) == 0


def test_a_forked_child_whose_engine_fails_at_first_tries_again(reader: Reader, features: np.ndarray) -> None:
    """And has no part of the parent's, whose threads it has not: it would wait for ever."""
    from featstore.reader import reader as module

    def work() -> bool:
        make, calls = module.make, [0]

        def fails_once(*given: Any) -> Any:
            calls[0] += 1
            if calls[0] == 1:
                raise OSError("no ring")
            return make(*given)

        module.make = fails_once  # type: ignore[assignment]
        with pytest.raises(OSError, match="no ring"):
            reader.read([3])
        return bool(child_reads(reader, np.arange(20), features[:20]))

    assert in_child(work) == 0


def test_pickles(store: featstore.Store, features: np.ndarray, engine: str) -> None:
    with (
        store.reader(memory=MEMORY, engine=engine, static=[1, 2]) as reader,
        pickle.loads(pickle.dumps(reader)) as copy,
    ):
        assert copy.engine.name == engine
        assert copy.memory() == reader.memory()
        np.testing.assert_array_equal(copy.read([1, 999]), features[[1, 999]])
    with pickle.loads(pickle.dumps(store)) as again:
        assert again.uuid == store.uuid
        assert again.manifest == store.manifest


def serve(reader: Reader, jobs: Any, results: Any) -> None:
    while (ids := jobs.get()) is not None:
        results.put((ids, reader.read(ids)))
    reader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_workers_as_of_a_data_loader(store: featstore.Store, features: np.ndarray, method: str) -> None:
    context = multiprocessing.get_context(method)
    with store.reader(memory=MEMORY, static=[0, 1]) as reader:
        jobs, results = context.SimpleQueue(), context.SimpleQueue()
        workers = [context.Process(target=serve, args=(reader, jobs, results)) for _ in range(2)]
        for worker in workers:
            worker.start()
        batches = [np.random.default_rng(k).integers(0, 1000, 50) for k in range(10)]
        for batch in [*batches, None, None]:
            jobs.put(batch)
        for _ in batches:
            ids, rows = results.get()
            np.testing.assert_array_equal(rows, features[ids])
        for worker in workers:
            worker.join(20)
            assert worker.exitcode == 0


def test_a_program_that_forgets_its_reader_ends(store: featstore.Store, engine: str) -> None:
    """At exit, with requests under way and nobody waiting for them; a hang would run into the timeout."""
    program = (
        "import sys, numpy as np, featstore\n"
        "reader = featstore.open(sys.argv[1]).reader(memory='8MiB', engine=sys.argv[2])\n"
        "requests = [reader.submit(np.arange(1000).repeat(50)) for _ in range(4)]\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.path), engine], capture_output=True, text=True, timeout=60,
        env=os.environ | {"TEST_HOW_IT_ENDS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_new_reader_has_loaded_every_kernel_a_read_runs(store: featstore.Store, engine: str) -> None:
    """A child forked while another thread compiles could never compile: reads must not need to."""
    from featstore.plan import extents as plan
    from featstore.reader import lookup
    from featstore.tiers import static

    kernels = [
        lookup.rows_of_ids, lookup.row_histogram, lookup.select_rows, plan.make_keys, plan.radix_sort,
        plan.cut_extents, static.serve_rows,
    ]  # fmt: skip
    with store.reader(memory="1MiB", engine=engine, static=[1, 2]) as reader:
        before = [len(kernel.signatures) for kernel in kernels]
        assert min(before) > 0
        for ids in ([1], np.arange(1000, dtype=np.uint8) % 200, np.arange(1000).repeat(30)):
            reader.read(ids)
        assert [len(kernel.signatures) for kernel in kernels] == before
