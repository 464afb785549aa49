"""One buffer for several processes: the rows are the source's, each is read once for all, whoever dies leaves
nothing behind, and there is one copy of the cache.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from processes import child, exit_code
from test_buffer import Watched, eventually, in_thread

import featstore
from featstore import errors
from featstore.base import passed_errors
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CancelledError,
    ClosedError,
    CorruptionError,
    DeviceError,
    DiskFullError,
    FeatstoreError,
    FormatError,
    IdError,
    PeerError,
    SourceError,
)
from featstore.shared import client as shared_client
from featstore.shared import connection as shared_connection
from featstore.shared import protocol as shared_protocol
from featstore.shared.client import BufferClient, BufferRequest
from featstore.shared.owner import SharedBuffer
from featstore.shared.service import ROOM_BATCHES
from featstore.tiers.slots import layout

ROWS = 1000
MEMORY = "8MiB"  # all rows fit
METHODS = ("fork", "spawn")


def smallest(store: featstore.Store, batch_rows: int, **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        SharedBuffer(store, memory=1, batch_rows=batch_rows, **options)
    return caught.value.needed_bytes


def nothing_is_held(shared: SharedBuffer) -> bool:
    service = shared._service
    for buffer in shared._buffers.values():
        buffer.cached_ids()  # enters in the map which reads have ended
    return (
        not any(buffer._reading for buffer in shared._buffers.values())
        and all(int(b._map.counts[layout.UNPINNED]) == b.slots for b in shared._buffers.values())
        and service._room == ROOM_BATCHES * max(shared.batch_rows.values())
        and not any(service._pinned)
        and not (service._wanted or service._begun or service._ahead or service._held)
    )


@pytest.fixture
def shared(store: featstore.Store) -> Iterator[SharedBuffer]:
    with SharedBuffer(store, memory=MEMORY) as made:
        yield made


@pytest.fixture
def watched(shared: SharedBuffer, features: np.ndarray) -> Iterator[Watched]:
    made = Watched(shared._reader, features)
    yield made
    assert made.wrong == []


@pytest.fixture
def tight(store: featstore.Store) -> Iterator[SharedBuffer]:
    """A buffer that holds one request of eight rows."""
    with SharedBuffer(store, memory=smallest(store, 8), batch_rows=8) as made:
        assert 8 <= made.slots["features"] < 16
        yield made


# Reading.


def test_reads_as_a_reader_does(shared: SharedBuffer, features: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    with shared.client() as client:
        table = client.table("features")
        assert client.tables == ["features"]
        assert (table.rows, table.row_shape, table.dtype) == (ROWS, (100,), np.float32)
        for ids in ([5, 5, 0], 7, [], np.array([[1, 2], [999, 0]], np.uint16), range(10)):
            np.testing.assert_array_equal(client.read(ids), features[np.asarray(ids, np.int64)])
        wanted = torch.tensor([3, 1])
        rows = client.read(wanted)
        assert isinstance(rows, torch.Tensor)
        np.testing.assert_array_equal(rows.numpy(), features[[3, 1]])
        out = np.empty((2, 100), np.float32)
        assert client.read([8, 9], out=out) is out
        np.testing.assert_array_equal(out, features[[8, 9]])
        by_table = client.read({"features": [4]})
        np.testing.assert_array_equal(by_table["features"], features[[4]])
        with pytest.raises(KeyError, match="no table 'x'; it has 'features'"):
            client.read({"x": [4]})
        with pytest.raises(IdError, match="must be integers"):
            client.read([1.5])
        with pytest.raises(ValueError, match="out must be"):
            client.read([1], out=out)


def test_a_read_of_more_rows_than_fit_goes_in_pieces(tight: SharedBuffer, features: np.ndarray) -> None:
    ids = np.random.default_rng(0).integers(0, ROWS, 100)
    with tight.client() as client:
        np.testing.assert_array_equal(client.read(ids), features[ids])
        request = client.submit(ids)
        ids_before = ids.copy()
        ids[:] = 0
        np.testing.assert_array_equal(request.result(), features[ids_before])
        assert request.result() is not None
        assert eventually(lambda: nothing_is_held(tight))


@pytest.mark.parametrize("policy", sorted(set(layout.POLICIES) - {"static", "min"}))
def test_every_policy(store: featstore.Store, features: np.ndarray, policy: str) -> None:
    memory = smallest(store, 50, policy=policy)
    with (
        SharedBuffer(store, memory=memory, policy=policy, batch_rows=50) as shared,
        shared.client() as client,
    ):
        for seed in range(5):
            ids = (np.random.default_rng(seed).random(120) ** 2 * ROWS).astype(np.int64)
            np.testing.assert_array_equal(client.read(ids), features[ids])
    for wrong in ("static", "min", "best"):
        with pytest.raises(SourceError, match="policy of a shared buffer must be one of"):
            SharedBuffer(store, policy=wrong)


def test_what_is_asked_ahead_gives_way(tight: SharedBuffer, features: np.ndarray) -> None:
    """A process that asks ahead and then does something else keeps nobody from his rows, and gets its own
    later."""
    with tight.client() as idle, tight.client() as busy:
        requests = [idle.submit(np.arange(8 * k, 8 * k + 3 + k)) for k in range(5)]
        for begin in range(100, 200, 8):
            ids = np.arange(begin, begin + 8)
            np.testing.assert_array_equal(busy.read(ids), features[ids])
        for k, request in reversed(list(enumerate(requests))):
            np.testing.assert_array_equal(request.result(), features[8 * k : 8 * k + 3 + k])
        idle.submit([1, 2]).cancel()
        del request, requests
        forgotten = idle.submit([3])
        del forgotten
        gc.collect()
        cancelled = idle.submit([4])
        cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.result()
        idle.stats()  # what was cancelled is said with what is said next
        assert eventually(lambda: nothing_is_held(tight))


def test_asking_ahead_reads_ahead(shared: SharedBuffer, watched: Watched, features: np.ndarray) -> None:
    with shared.client() as client:
        request = client.submit(np.arange(50))
        assert eventually(lambda: len(watched.present) == 50)
        np.testing.assert_array_equal(request.result(), features[:50])
        assert watched.rows_read == 50


# Processes.


def work(client: BufferClient, jobs: Any, results: Any) -> None:
    """Of each job ask for the next one's rows before the present one's are waited for."""
    ids, request = jobs.get(), None
    while ids is not None:
        request = request or client.submit(ids)
        after = jobs.get()
        ahead = None if after is None else client.submit(after)
        results.put((ids, request.result()))
        ids, request = after, ahead
    results.put(None)


@pytest.mark.parametrize("method", METHODS)
def test_workers_read_each_row_once(
    shared: SharedBuffer, watched: Watched, features: np.ndarray, method: str
) -> None:
    context = multiprocessing.get_context(method)
    jobs, results = context.SimpleQueue(), context.SimpleQueue()
    client = shared.client()
    client.read([0])  # connected before the fork
    workers = [context.Process(target=work, args=(client, jobs, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    batches = [np.random.default_rng(k).integers(0, 400, 150) for k in range(10)]
    for batch in [*batches, None, None]:
        jobs.put(batch)
    for _ in range(len(batches) + 2):
        if (found := results.get()) is not None:
            np.testing.assert_array_equal(found[1], features[found[0]])
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    np.testing.assert_array_equal(client.read([1, 999]), features[[1, 999]])
    assert watched.rows_read == len(np.unique(np.concatenate([[0, 1, 999], *batches])))
    assert client.stats() == shared.stats()
    assert shared.stats().misses == watched.rows_read
    assert eventually(lambda: nothing_is_held(shared))


class Collate:
    """What a data loader's worker makes of the ids of a mini-batch."""

    def __init__(self, client: BufferClient) -> None:
        self.client = client

    def __call__(self, ids: list[int]) -> Any:
        import torch

        nodes = torch.tensor(ids)
        return nodes, self.client.read(nodes)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_in_workers_of_a_data_loader(shared: SharedBuffer, features: np.ndarray, method: str) -> None:
    torch = pytest.importorskip("torch")
    order = np.random.default_rng(0).permutation(ROWS).tolist()
    loader = torch.utils.data.DataLoader(
        order, batch_size=100, num_workers=2, collate_fn=Collate(shared.client()),
        multiprocessing_context=method, persistent_workers=True,
    )  # fmt: skip
    for _ in range(2):
        seen = []
        for nodes, rows in loader:
            np.testing.assert_array_equal(rows.numpy(), features[nodes.numpy()])
            seen.extend(nodes.tolist())
        assert seen == order
    assert shared.stats().misses == ROWS
    del loader


class Fill:
    """A PyG transform that gives a sampled subgraph its rows."""

    def __init__(self, client: BufferClient) -> None:
        self.client = client

    def __call__(self, data: Any) -> Any:
        data.x = self.client.read(data.n_id)
        return data


def test_as_a_transform_in_workers_of_pyg(shared: SharedBuffer, features: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from featstore.adapters.pyg import FeatstoreSampler
    from featstore.sampling.neighbors import NeighborSampler

    indptr, indices = np.arange(0, 3 * ROWS + 1, 3), np.random.default_rng(0).integers(0, ROWS, 3 * ROWS)
    edges = torch.from_numpy(np.stack([indices, np.repeat(np.arange(ROWS), 3)]))
    loader = NodeLoader(
        Data(edge_index=edges, num_nodes=ROWS), FeatstoreSampler(NeighborSampler(indptr, indices, [2, 2])),
        input_nodes=torch.arange(0, ROWS, 5), batch_size=50, num_workers=2, transform=Fill(shared.client()),
        filter_per_worker=True, multiprocessing_context="fork",
    )  # fmt: skip
    batches = 0
    for batch in loader:
        np.testing.assert_array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
        batches += 1
    assert batches == 4
    assert 0 < shared.stats().misses <= ROWS


def test_a_child_forked_in_the_middle_of_everything(shared: SharedBuffer, features: np.ndarray) -> None:
    """Other threads are connecting and reading while children are forked, which then read and close what they
    inherited."""
    stop = threading.Event()

    def keep_reading() -> int:
        done = 0
        while not stop.is_set():
            with shared.client() as client:
                np.testing.assert_array_equal(client.read([done % 9]), features[[done % 9]])
            done += 1
        return done

    used = shared.client()
    used.read([1])

    def in_child() -> bool:
        good = np.array_equal(used.read([5, 6]), features[[5, 6]])
        good &= np.array_equal(shared.client().read([7]), features[[7]])
        with pytest.raises(ClosedError, match="belongs to the process that made it"):
            shared.stats()
        shared.close()  # the parent's: nothing happens
        return bool(good)

    readers = [in_thread(keep_reading) for _ in range(2)]
    try:
        for _ in range(5):
            assert exit_code(child(in_child)) == 0
    finally:
        stop.set()
    assert all(reader.result(20) > 0 for reader in readers)
    np.testing.assert_array_equal(used.read([8]), features[[8]])
    assert eventually(lambda: nothing_is_held(shared))


# Death.


def hang_in_copy(client: BufferClient, holding: int, ids: list[int]) -> None:
    """Hold slots for ever: the rows are there, and are never copied."""

    def never(*_: Any) -> None:
        os.write(holding, b"!")
        time.sleep(100)

    shared_client.move_rows = never  # type: ignore[assignment]
    client.read(ids)


def test_a_client_that_is_killed_gives_its_slots_back(tight: SharedBuffer, features: np.ndarray) -> None:
    with tight.client() as other:
        heard, holding = os.pipe()
        pid = child(lambda: hang_in_copy(tight.client(), holding, list(range(8))))
        try:
            assert os.read(heard, 1) == b"!"
            waiting = in_thread(lambda: other.read(np.arange(100, 108)))
            with pytest.raises(TimeoutError):
                waiting.result(0.2)  # the buffer is too small for both
            assert not nothing_is_held(tight)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(heard)
            os.close(holding)
        np.testing.assert_array_equal(waiting.result(20), features[100:108])
    assert eventually(lambda: nothing_is_held(tight))


def test_a_client_that_is_gone_while_its_rows_are_read(shared: SharedBuffer, features: np.ndarray) -> None:
    gate = Gate(shared._reader)
    with shared.client() as other:
        other.stats()
        pid = child(lambda: shared.client().read([1, 2, 3]) is None)
        assert gate.arrived.acquire(timeout=20)
        waiting = in_thread(lambda: other.read([2, 3, 4]))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert eventually(lambda: len(shared._service._guests) == 1)
        gate.open()
        np.testing.assert_array_equal(waiting.result(20), features[[2, 3, 4]])
        assert shared.stats().misses == 4
    assert eventually(lambda: nothing_is_held(shared))


def test_a_client_is_closed_by_a_handler_while_it_reads(shared: SharedBuffer, features: np.ndarray) -> None:
    gate, client, said = Gate(shared._reader), shared.client(), []

    def interrupt(*_: Any) -> None:
        with pytest.raises(ArgumentError, match="can't ask through it") as caught:
            client.read([3])
        said.append(caught.value)
        client.close()
        gate.open()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        np.testing.assert_array_equal(client.read([1, 2]), features[[1, 2]])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(said) == 1
    assert client._connection is None
    with pytest.raises(ClosedError, match="this client of a shared buffer is closed"):
        client.read([1])
    assert eventually(lambda: nothing_is_held(shared))
    with shared.client() as other:
        np.testing.assert_array_equal(other.read([1, 2]), features[[1, 2]])


def test_a_client_that_is_gone_in_the_middle_of_a_word(shared: SharedBuffer, features: np.ndarray) -> None:
    for kind in (shared_protocol.ASK, shared_protocol.AHEAD):
        connection = shared_connection.Connection()
        connection.open(shared._service.address, shared._key, time.monotonic() + 20)
        connection._send(shared_protocol.HEADER.pack(kind, 0, 1, 1000) + bytes(4000))
        assert eventually(lambda: not nothing_is_held(shared))
        connection.close()
        assert eventually(lambda: nothing_is_held(shared))
    np.testing.assert_array_equal(shared.client().read([1]), features[[1]])


def read_at_random(client: BufferClient, features: np.ndarray) -> bool:
    rng = np.random.default_rng(os.getpid())
    while True:
        ids, ahead = (rng.integers(0, ROWS, rng.integers(30)) for _ in range(2))
        request = client.submit(ahead)
        assert np.array_equal(client.read(ids), features[ids])
        assert np.array_equal(request.result(), features[ahead])


def test_clients_are_killed_all_the_time(tight: SharedBuffer, features: np.ndarray) -> None:
    rng, client = np.random.default_rng(0), tight.client()
    running: list[int] = []
    try:
        for _ in range(25):
            running.append(child(lambda: read_at_random(tight.client(), features)))
            time.sleep(0.02)
            if len(running) > 3:
                pid = running.pop(rng.integers(len(running)))
                os.kill(pid, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL  # no other end
            ids = rng.integers(0, ROWS, 20)
            np.testing.assert_array_equal(client.read(ids), features[ids])
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert eventually(lambda: nothing_is_held(tight))
    assert tight._service.error is None


def test_without_descriptors_clients_wait_at_the_door(store: featstore.Store, features: np.ndarray) -> None:
    """In a process of its own, in which nothing but the buffer takes descriptors or gives them back."""

    def work() -> bool:
        with SharedBuffer(store, memory=MEMORY) as shared:
            shared.client().read([0])  # whatever is opened once is open
            waited = any(client_waits_at_the_door(shared, features) for _ in range(10))
            assert shared._service.error is None
            return waited

    assert exit_code(child(work), 60) == 0


def client_waits_at_the_door(shared: SharedBuffer, features: np.ndarray) -> bool:
    """Leave one descriptor to this process, which a client takes; whether it waited then for one for its
    connection."""
    gc.collect()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    holes = highest + 1 - len(os.listdir("/proc/self/fd"))  # but for one, that of the listing itself
    taken, limits = [os.dup(0) for _ in range(holes)], resource.getrlimit(resource.RLIMIT_NOFILE)
    reading = in_thread(lambda: time.sleep(0.1) or shared.client().read([1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        shut = eventually(lambda: shared._service._door.shut or reading.done())
        time.sleep(0.3)
        waits = shut and not reading.done()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    try:
        np.testing.assert_array_equal(reading.result(20), features[[1]])
    except errors.DeviceError:
        assert not waits
    return waits


def own_and_wait(store: featstore.Store, to_parent: Any, stuck: bool) -> None:
    shared = SharedBuffer(store, memory=MEMORY)
    client = shared.client()
    if stuck:
        Gate(shared._reader)
    bystander = child(lambda: time.sleep(60))  # has copies of what the owner has open
    client.stats()
    to_parent.send((pickle.dumps(client), bystander))
    time.sleep(60)


@pytest.mark.parametrize("stuck", [False, True])
def test_an_owner_that_is_killed(store: featstore.Store, features: np.ndarray, stuck: bool) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    owner = context.Process(target=own_and_wait, args=(store, there, stuck))
    owner.start()
    assert here.poll(20)
    pickled, bystander = here.recv()
    client, late = pickle.loads(pickled), pickle.loads(pickled)
    try:
        client.stats()
        if not stuck:
            np.testing.assert_array_equal(client.read([1, 2]), features[[1, 2]])
        reading = in_thread(lambda: [client.read([3]) for _ in iter(int, 1)])
        time.sleep(0.1)
        assert not reading.done()
        owner.kill()
        with pytest.raises(ClosedError, match="has died"):
            reading.result(5)
        for one in (client, late):
            with pytest.raises(ClosedError, match="has died"):
                one.read([3])
    finally:
        os.kill(bystander, signal.SIGKILL)
        owner.kill()
        owner.join(20)


def test_closing(store: featstore.Store) -> None:
    shared = SharedBuffer(store, memory=MEMORY)
    gate = Gate(shared._reader)
    client, other = shared.client(), shared.client()
    reading = in_thread(lambda: client.read([1, 2]))
    assert gate.arrived.acquire(timeout=20)
    gate.open()
    other.close()
    with pytest.raises(ClosedError, match="client of a shared buffer is closed"):
        other.read([1])
    shared.close()
    shared.close()
    with contextlib.suppress(ClosedError):  # it may have come before
        reading.result(20)
    with pytest.raises(ClosedError, match="has closed it"):
        client.read([1])
    assert not any(thread.name == "featstore-shared" for thread in threading.enumerate())
    with pytest.raises(TypeError, match="client"):
        pickle.dumps(shared)


def test_a_program_that_forgets_its_buffer_ends(store: featstore.Store) -> None:
    program = (
        "import sys, numpy as np, featstore\n"
        "from featstore.shared.owner import SharedBuffer\n"
        "shared = SharedBuffer(featstore.open(sys.argv[1]), memory='8MiB')\n"
        "client = shared.client()\n"
        "client.read(np.arange(100))\n"
        "requests = [client.submit(np.arange(1000)) for _ in range(4)]\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.path)], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(featstore.__file__).parent.parent)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_an_interrupt_in_the_middle_of_an_exchange(shared: SharedBuffer, features: np.ndarray) -> None:
    client = shared.client()
    ahead = client.submit([10, 11])
    connection = client._connection
    assert connection is not None

    def interrupted() -> Any:
        raise KeyboardInterrupt

    connection.hear = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        client.read([1, 2])
    assert eventually(lambda: nothing_is_held(shared))
    np.testing.assert_array_equal(client.read([1, 2]), features[[1, 2]])
    np.testing.assert_array_equal(ahead.result(), features[[10, 11]])


# Who may speak.


def test_a_wrong_key_is_refused(shared: SharedBuffer, features: np.ndarray) -> None:
    with pytest.raises(ClosedError, match="key"):
        BufferClient(shared._service.address, shared_protocol.new_key()).read([1])
    np.testing.assert_array_equal(shared.client().read([1]), features[[1]])
    assert shared._key not in pickle.dumps(repr(shared.client()))


def test_who_does_not_know_the_key_is_not_believed() -> None:
    address = "\0featstore-" + shared_protocol.new_nonce().hex()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()

        def impostor() -> bytes:
            with door.accept()[0] as guest:
                guest.sendall(shared_protocol.new_nonce())
                answer = guest.recv(64, socket.MSG_WAITALL)
                body = shared_protocol.proof(b"guess", b"owner", answer[32:]) + b"{}"
                guest.sendall(shared_protocol.HEADER.pack(shared_protocol.WELCOME, 0, 0, 2) + body)
                return answer

        listening = in_thread(impostor)
        key = shared_protocol.new_key()
        with pytest.raises(ClosedError, match="is not its owner"):
            BufferClient(address, key).read([1])
        assert key not in listening.result(20)


@pytest.mark.parametrize(
    "said",
    [
        shared_protocol.HEADER.pack(99, 0, 0, 0),
        shared_protocol.HEADER.pack(shared_protocol.ASK, 0, 0, 2**60),
        shared_protocol.HEADER.pack(shared_protocol.ASK, 1, 0, 1) + bytes(8),
        shared_protocol.HEADER.pack(shared_protocol.HOLDS, 0, 0, 2**60),
        2 * (shared_protocol.HEADER.pack(shared_protocol.AHEAD, 0, 5, 1) + bytes(8)),
        shared_protocol.HEADER.pack(shared_protocol.ASK, 0, 5, 1)
        + bytes(8)
        + shared_protocol.HEADER.pack(shared_protocol.WANT, 0, 5, 0),
    ],
)
def test_who_breaks_the_rules_is_shown_out(shared: SharedBuffer, features: np.ndarray, said: bytes) -> None:
    connection = shared_connection.Connection()
    connection.open(shared._service.address, shared._key, time.monotonic() + 20)
    connection._send(said)
    with pytest.raises(ClosedError):
        connection._receive(2**20)
    connection.close()
    np.testing.assert_array_equal(shared.client().read([1]), features[[1]])
    assert eventually(lambda: nothing_is_held(shared))


def test_clients_cannot_write(shared: SharedBuffer) -> None:
    client = shared.client()
    client.read([1])
    assert client._connection is not None
    assert not client._connection.x.flags.writeable
    with pytest.raises(PermissionError):
        mmap.mmap(shared._service._memory, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(shared._service._memory, 0)


# Errors.


class Odd(IdError):
    """A kind that this package does not know."""


@pytest.mark.parametrize(
    "error",
    [
        *(getattr(errors, name)("what, where, what to do") for name in sorted(passed_errors._OF_MESSAGE)),
        CorruptionError("/a/file", 4096, 1, 2),
        CorruptionError("/a/file", None, "x", b"y", "do this"),
        DeviceError(5, "/a/file", 512, "read"),
        DiskFullError("/a", 10, 5),
        BudgetError(10, 5, "do it"),
        PeerError(2, 5, "is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_they_were(error: FeatstoreError) -> None:
    arrived = passed_errors.decode_error(passed_errors.encode_error(error, "the owner"))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for field in ("path", "offset", "errno", "needed_bytes", "given_bytes", "what", "doing", "host", "rank"):
        assert getattr(arrived, field, None) == getattr(error, field, None)


def test_other_errors_arrive_as_the_nearest() -> None:
    for error, expected in ((Odd("odd"), IdError), (MemoryError("much"), FeatstoreError)):
        arrived = passed_errors.decode_error(passed_errors.encode_error(error, "the owner"))
        assert type(arrived) is expected
        assert str(error) in str(arrived)
    with pytest.raises(FormatError, match="unknown error"):
        passed_errors.decode_error(json.dumps({"type": "SystemExit", "arguments": []}).encode())


def test_errors_of_the_owner(shared: SharedBuffer, features: np.ndarray) -> None:
    with shared.client() as client:
        for bad in (ROWS, -1):
            with pytest.raises(
                IdError, match=f"node id {bad} is out of range: table 'features' has 1,000 rows"
            ):
                client.read([1, bad])
            request = client.submit([bad])
            with pytest.raises(IdError, match="out of range"):
                request.result()
        np.testing.assert_array_equal(client.read([1]), features[[1]])
        assert eventually(lambda: nothing_is_held(shared))


def test_corruption_arrives_with_its_place(own: Path) -> None:
    chunks = [path for path in own.rglob("*") if path.is_file() and path.stat().st_size > 90_000]
    for path in chunks:
        data = bytearray(path.read_bytes())
        data[40_000:40_010] = bytes(10)
        path.write_bytes(data)
    with (
        featstore.open(own) as store,
        SharedBuffer(store, memory=MEMORY) as shared,
        shared.client() as client,
    ):
        with pytest.raises(CorruptionError) as found:
            client.read(np.arange(ROWS))
        assert found.value.path in map(str, chunks)
        assert found.value.offset is not None
        assert eventually(lambda: nothing_is_held(shared))


# Memory.


def test_the_smallest_budget_works(store: featstore.Store, features: np.ndarray) -> None:
    for batch_rows in (1, 100, 5000):
        needed = smallest(store, batch_rows)
        with pytest.raises(BudgetError) as caught:
            SharedBuffer(store, memory=needed - 1, batch_rows=batch_rows)
        assert caught.value.needed_bytes == needed
        with SharedBuffer(store, memory=needed, batch_rows=batch_rows) as shared, shared.client() as client:
            parts = shared.memory()
            assert sum(parts.values()) == needed
            assert min(parts.values()) >= 0
            assert parts["rows"] == shared.slots["features"] * 400
            ids = np.arange(batch_rows) % ROWS
            np.testing.assert_array_equal(client.read(ids), features[ids])
    with pytest.raises(BudgetError):
        SharedBuffer(store, memory=1)
    with pytest.raises(ValueError, match="batch_rows"):
        SharedBuffer(store, memory=MEMORY, batch_rows=0)


def test_room_for_requests_is_kept_to(tight: SharedBuffer, features: np.ndarray) -> None:
    """More wanted at once than there is room for: all are served."""
    lows: list[int] = []
    barrier = threading.Barrier(12)

    def read(k: int) -> bool:
        with tight.client() as client:
            ids = np.arange(8 * k, 8 * k + 8)
            ahead = client.submit(ids)
            barrier.wait(20)
            good = all(np.array_equal(client.read(ids[::-1]), features[ids[::-1]]) for _ in range(5))
            lows.append(tight._service._room)
            return good and np.array_equal(ahead.result(), features[ids])

    with ThreadPoolExecutor(12) as pool:
        assert all(future.result(60) for future in [pool.submit(read, k) for k in range(12)])
    assert min(lows) >= 0
    assert eventually(lambda: nothing_is_held(tight))


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Resident bytes of a process: Rss and what is its alone; and its share of the buffer's rows."""
    found = {"rss": 0, "private": 0, "rows": 0}
    file = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *fields = line.split()
        if not first.endswith(":"):
            file = fields[4] if len(fields) > 4 else ""
            continue
        size = 1024 * int(fields[0]) if len(fields) == 2 else 0
        found["rss"] += size if first == "Rss:" else 0
        found["private"] += size if first in ("Private_Clean:", "Private_Dirty:") else 0
        found["rows"] += size if first == "Pss:" and "memfd:featstore-buffer" in file else 0
    return found


def read_everything(client: BufferClient, rows: int, to_parent: Any) -> None:
    out = np.empty((4000, 100), np.float32)
    client.read(np.arange(4000), out=out)
    before = memory_of()
    for begin in range(0, rows, 4000):
        client.read(np.arange(begin, begin + 4000), out=out)
    to_parent.send((before, memory_of()))
    to_parent.recv()


def test_there_is_one_copy_of_the_cache(tmp_path: Path, pack: Any) -> None:
    rows = 100_000  # 40 MB
    store = pack(tmp_path / "s", np.random.default_rng(0).standard_normal((rows, 100), np.float32))
    context = multiprocessing.get_context("spawn")  # a forked child copies what it touches of a large parent
    with SharedBuffer(store, memory="72MiB") as shared:
        cache_bytes = shared.memory()["rows"]
        assert shared.slots == {"features": rows}
        shared.client().read([0])
        pipes = [context.Pipe() for _ in range(2)]
        workers = [
            context.Process(target=read_everything, args=(shared.client(), rows, there)) for _, there in pipes
        ]
        for worker in workers:
            worker.start()
        grown = []
        for here, _ in pipes:
            assert here.poll(60)
            first, last = here.recv()
            grown.append({name: last[name] - first[name] for name in last})
        rows_bytes = sum(memory_of(pid)["rows"] for pid in ("self", *(worker.pid for worker in workers)))
        for here, _ in pipes:
            here.send(None)
        for worker in workers:
            worker.join(20)
        assert shared.stats().misses == rows  # once for both
    for one in grown:
        assert one["rss"] > 0.8 * cache_bytes  # it has seen all of it,
        assert one["private"] < 0.1 * cache_bytes  # and has nothing of it for itself
    assert 0.95 * cache_bytes < rows_bytes < 1.05 * cache_bytes  # shared out among all, it is there once
    store.close()


def test_as_a_feature_store_of_pyg(tmp_path: Path, pack: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import FeatstoreFeatures

    rows = np.arange(600, dtype=np.float32).reshape(200, 3)
    store = pack(tmp_path / "s", rows)
    ids = torch.tensor([7, 0, 199, 7])
    with SharedBuffer(store, memory="16MiB") as shared:
        features = FeatstoreFeatures(shared.client())
        for one in (features, pickle.loads(pickle.dumps(features))):
            found = one.get_tensor(None, "x", index=ids)
            np.testing.assert_array_equal(found.numpy(), rows[ids.numpy()])
    store.close()


# Any interleaving.


class Clients(RuleBasedStateMachine):
    """Clients ask, ask ahead, cancel, forget, close and vanish in any order, in a buffer of any size; see
    :class:`Watched` for what is asserted of the reads."""

    store: featstore.Store
    features: np.ndarray
    budgets: dict[int, int]

    @initialize(batch_rows=st.sampled_from([1, 3, 8]), policy=st.sampled_from(["fifo", "lru", "sieve"]))
    def start(self, batch_rows: int, policy: str) -> None:
        self.shared = SharedBuffer(
            self.store,
            memory=self.budgets[batch_rows],
            batch_rows=batch_rows,
            policy=policy,
            engine="threads",
        )
        self.watched = Watched(self.shared._reader, self.features)
        self.clients = [self.shared.client() for _ in range(3)]
        self.requests: list[tuple[BufferRequest, list[int]]] = []

    ids = st.lists(st.integers(0, 30), max_size=12)

    @rule(who=st.integers(0, 2), ids=ids)
    def read(self, who: int, ids: list[int]) -> None:
        np.testing.assert_array_equal(self.clients[who].read(ids), self.features[np.array(ids, np.int64)])

    @rule(who=st.integers(0, 2), ids=ids)
    def submit(self, who: int, ids: list[int]) -> None:
        self.requests.append((self.clients[who].submit(ids), ids))

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["result", "cancel", "forget"]))
    def finish(self, number: int, how: str) -> None:
        request, ids = self.requests.pop(number % len(self.requests))
        if how == "result":
            np.testing.assert_array_equal(request.result(), self.features[np.array(ids, np.int64)])
        elif how == "cancel":
            request.cancel()

    @rule(who=st.integers(0, 2))
    def break_off(self, who: int) -> None:
        with self.clients[who]._lock:
            self.clients[who]._drop()

    @rule(who=st.integers(0, 2), ids=ids)
    def fail(self, who: int, ids: list[int]) -> None:
        with pytest.raises(IdError):
            self.clients[who].read([*ids, ROWS])

    @invariant()
    def nothing_is_read_twice(self) -> None:
        assert not hasattr(self, "watched") or self.watched.wrong == []

    def teardown(self) -> None:
        if not hasattr(self, "shared"):
            return
        for request, ids in self.requests:
            np.testing.assert_array_equal(request.result(), self.features[np.array(ids, np.int64)])
        for client in self.clients:
            client.close()
        assert eventually(lambda: not self.shared._service._guests)
        assert eventually(lambda: nothing_is_held(self.shared))
        self.shared.close()
        assert self.watched.wrong == []
        assert self.shared._service.error is None


def test_any_interleaving_of_clients(store: featstore.Store, features: np.ndarray) -> None:
    budgets = {batch_rows: smallest(store, batch_rows) for batch_rows in (1, 3, 8)}
    machine = type("Machine", (Clients,), {"store": store, "features": features, "budgets": budgets})
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    case().runTest()


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_many_clients_at_once(store: featstore.Store, features: np.ndarray, policy: str) -> None:
    """Threads with a client each, in the smallest buffer: requests ahead, cancelled, forgotten, connections
    broken off."""

    def go(seed: int) -> int:
        rng, client, done = np.random.default_rng(seed), shared.client(), 0
        ahead: list[tuple[BufferRequest, np.ndarray]] = []
        for _ in range(40):
            ids = (rng.power(0.4, rng.integers(0, 61)) * 200).astype(np.int64)
            action = rng.integers(8)
            if action < 4:
                ahead.append((client.submit(ids), ids))
            elif action == 4 and ahead:
                ahead.pop(rng.integers(len(ahead)))[0].cancel()
            elif action == 5:
                client._drop()
            else:
                np.testing.assert_array_equal(client.read(ids), features[ids])
                done += 1
            while len(ahead) > 3:
                request, wanted = ahead.pop(0)
                np.testing.assert_array_equal(request.result(), features[wanted])
                done += 1
        client.close()
        return done

    memory = smallest(store, 20, policy=policy)
    with SharedBuffer(store, memory=memory, batch_rows=20, policy=policy) as shared:
        watched = Watched(shared._reader, features)
        with ThreadPoolExecutor(6) as pool:
            assert min(future.result(100) for future in [pool.submit(go, seed) for seed in range(6)]) > 5
        assert eventually(lambda: nothing_is_held(shared))
        assert watched.wrong == []


def test_notes_of_an_error_arrive_with_it() -> None:
    error = SourceError("what went wrong")
    error.add_note("on host 3 (rank 5)")
    arrived = passed_errors.decode_error(passed_errors.encode_error(error, "the owner"))
    assert arrived.__notes__ == ["on host 3 (rank 5)"]
    assert not hasattr(
        passed_errors.decode_error(passed_errors.encode_error(SourceError(""), "")), "__notes__"
    )
