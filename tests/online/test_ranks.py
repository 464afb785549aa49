"""The ranks of a host, as torch.distributed makes them, read through one buffer: rank 0 owns it and
broadcasts its client.

All tests share one process group of two ranks, which do what they are sent through a pipe. Nothing waits
longer than :data:`SECONDS`.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from test_buffer import Watched, eventually, in_thread

import featstore
from featstore.errors import BudgetError, ClosedError, FeatstoreWarning
from featstore.loaders import ranks as ranks_module
from featstore.shared.client import BufferClient
from featstore.shared.owner import SharedBuffer

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

RANKS, ROWS, SECONDS = 2, 1000, 30.0
MEMORY = "8MiB"  # all rows fit


def be_rank(rank: int, meeting: str, pipe: Any) -> None:
    """What a rank's process does: join, then work as it is told until there is nothing more."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    try:
        for work, arguments in iter(pipe.recv, None):
            try:
                pipe.send((work(rank, *arguments), None))
            except BaseException:
                pipe.send((None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


class Ranks:
    """Two processes of one group."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")  # as torchrun: nothing is inherited
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=be_rank, args=(rank, str(folder / "meeting"), there), daemon=False)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, there in pipes:
            there.close()

    def do(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``work(rank, *arguments)`` returns in each rank. Fails as soon as one does."""
        for pipe in self._pipes:
            pipe.send((work, arguments))
        found: dict[int, Any] = {}
        end = time.monotonic() + SECONDS
        while len(found) < RANKS:
            missing = {self._pipes[rank]: rank for rank in range(RANKS) if rank not in found}
            ready = multiprocessing.connection.wait(list(missing), end - time.monotonic())
            assert ready, f"ranks {sorted(missing.values())} hang"
            for pipe in ready:
                rank = missing[pipe]  # type: ignore[index]
                found[rank], failure = self._pipes[rank].recv()
                assert failure is None, f"rank {rank}: {failure}"
        return [found[rank] for rank in range(RANKS)]

    def end(self) -> list[int | None]:
        """Exit codes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()  # where it hangs
            process.join()
        return [process.exitcode for process in self._processes]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        # whatever this host is called, and whether that name leads anywhere
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        yield made
    finally:
        codes = made.end()
    assert codes == [0] * RANKS


def broadcast(shared: SharedBuffer | None) -> BufferClient:
    """The client that rank 0 gives to all."""
    box = [shared.client() if shared is not None else None]
    dist.broadcast_object_list(box, src=0)
    client = box[0]
    assert client is not None
    return client


@contextlib.contextmanager
def one_buffer(rank: int, path: Path, **options: Any) -> Iterator[tuple[BufferClient, SharedBuffer | None]]:
    """Each rank's client of a buffer that rank 0 owns, and in rank 0 the buffer, which is closed when all are
    done."""
    with contextlib.ExitStack() as opened:
        shared = None
        if rank == 0:
            store = opened.enter_context(featstore.open(path))
            shared = opened.enter_context(SharedBuffer(store, **options))
        with broadcast(shared) as client:
            yield client, shared
            dist.barrier()


# Reading.


def batches(rank: int) -> list[np.ndarray]:
    """Mini-batches of a rank, skewed, so that the ranks want the same rows at the same time."""
    rng = np.random.default_rng(rank)
    return [(rng.random(120) ** 2 * ROWS).astype(np.int64) for _ in range(15)]


def bits(rows: Any) -> int:
    """A checksum of rows that ignores their order."""
    return int(np.asarray(rows).view(np.uint32).sum(dtype=np.int64))


def read_half(
    rank: int, path: Path, features: np.ndarray, options: dict[str, Any], through: str
) -> dict[str, int]:
    with one_buffer(rank, path, **options) as (client, shared):
        watched = Watched(shared._reader, features) if shared is not None else None
        box = [client]
        if through == "pyg":
            from featstore.adapters.pyg import FeatstoreFeatures

            box = [FeatstoreFeatures(client)]
            dist.broadcast_object_list(box, src=0)  # an adapter of a client travels as the client does
        source, checksum, wrong = box[0], 0, 0
        dist.barrier()
        for ids in batches(rank):
            wanted = torch.from_numpy(ids)
            rows = source.get_tensor(None, "x", index=wanted) if through == "pyg" else source.read(wanted)
            wrong += not np.array_equal(rows.numpy(), features[ids])
            checksum += bits(rows)
        total = torch.tensor([checksum])
        dist.all_reduce(total)  # all ranks have read
        found = {"wrong": wrong, "total": int(total), "misses": client.stats().misses}
        if watched is not None:
            assert watched.wrong == []  # no row was asked for while it was there or on its way
            found["rows read"] = watched.rows_read
    return found


@pytest.mark.parametrize("through", ["client", pytest.param("pyg", marks=pytest.mark.thorough)])
def test_each_row_is_read_once_for_all_ranks(
    ranks: Ranks, packed: Path, features: np.ndarray, through: str
) -> None:
    if through == "pyg":
        pytest.importorskip("torch_geometric")
    wanted = np.concatenate([ids for rank in range(RANKS) for ids in batches(rank)])
    owner, other = ranks.do(read_half, packed, features, {"memory": MEMORY}, through)
    assert owner["wrong"] == other["wrong"] == 0
    assert owner["total"] == other["total"] == bits(features[wanted])
    assert owner["misses"] == other["misses"] == owner["rows read"] == len(np.unique(wanted))


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_no_row_is_read_while_it_is_there(
    ranks: Ranks, packed: Path, features: np.ndarray, policy: str
) -> None:
    """In a buffer that has room for a tenth of the rows."""
    options = {"batch_rows": 100, "policy": policy}
    with featstore.open(packed) as store, pytest.raises(BudgetError) as caught:
        SharedBuffer(store, memory=1, **options)  # type: ignore[arg-type]
    wanted = np.concatenate([ids for rank in range(RANKS) for ids in batches(rank)])
    owner, other = ranks.do(
        read_half, packed, features, options | {"memory": caught.value.needed_bytes}, "client"
    )
    assert owner["wrong"] == other["wrong"] == 0
    assert owner["total"] == other["total"] == bits(features[wanted])
    assert len(np.unique(wanted)) < owner["misses"] == owner["rows read"] < len(wanted)


# Closing.


def read_for_ever(client: BufferClient, features: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    while True:
        ids = rng.integers(RANKS, ROWS, 40)
        assert np.array_equal(client.read(ids), features[ids])


def close_while_others_read(rank: int, path: Path, features: np.ndarray, stuck: bool) -> bool:
    """``stuck``: the other's rows are on their way when the owner closes, and do not arrive before it has
    been told."""
    with contextlib.ExitStack() as opened:
        shared = None
        if rank == 0:
            store = opened.enter_context(featstore.open(path))
            shared = opened.enter_context(SharedBuffer(store, memory="4MiB", batch_rows=50))
        client = broadcast(shared)
        assert np.array_equal(client.read([rank]), features[[rank]])
        dist.barrier()  # these rows have arrived
        gate = Gate(shared._reader) if shared is not None and stuck else None
        dist.barrier()
        if shared is not None:
            assert (
                gate.arrived.acquire(timeout=SECONDS)
                if gate
                else eventually(lambda: shared.stats().batches > 9)
            )
            closing = in_thread(shared.close)
            dist.barrier()  # the other has been told
            if gate is not None:
                assert not closing.done()  # it waits until nothing writes into the buffer any more
                gate.open()
            closing.result(SECONDS)
        else:
            with pytest.raises(ClosedError, match="has closed it"):
                read_for_ever(client, features)
            dist.barrier()
        for one in (client, pickle.loads(pickle.dumps(client))):
            with pytest.raises(ClosedError, match="has closed it"):
                one.read([1])
        dist.barrier()
    return True


@pytest.mark.parametrize("stuck", [False, True])
def test_the_owner_closes_while_another_rank_reads(
    ranks: Ranks, packed: Path, features: np.ndarray, stuck: bool
) -> None:
    assert ranks.do(close_while_others_read, packed, features, stuck) == [True, True]
    # the next buffer is as good as new
    found = ranks.do(read_half, packed, features, {"memory": MEMORY}, "client")
    assert [one["wrong"] for one in found] == [0, 0]


# Training.


class Collate:
    """Ids to (rows, targets), in a data loader's worker or the rank itself."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __call__(self, ids: list[int]) -> Any:
        nodes = torch.tensor(ids)
        if isinstance(self.source, BufferClient):
            rows = self.source.read(nodes)
        else:
            rows = torch.from_numpy(self.source[nodes.numpy()])
        return rows, (nodes % 3).float()[:, None] + rows[:, :1]


def losses(rank: int, source: Any, workers: int) -> list[float]:
    """Of each step of two epochs over this rank's half of the rows, in data parallel training."""
    torch.manual_seed(rank)  # rank 0's parameters are everybody's
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    half = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=RANKS, rank=rank, seed=7)  # type: ignore[arg-type]
    loader = torch.utils.data.DataLoader(
        range(ROWS), batch_size=50, sampler=half, collate_fn=Collate(source), num_workers=workers,
        # type: ignore[arg-type]
        multiprocessing_context="fork" if workers else None, timeout=SECONDS if workers else 0,
    )  # fmt: skip
    found = []
    for epoch in range(2):
        half.set_epoch(epoch)
        for rows, targets in loader:
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
    return found


def train(rank: int, path: Path, features: np.ndarray, workers: int) -> tuple[list[float], list[float], int]:
    expected = losses(rank, features.copy(), 0)
    with one_buffer(rank, path, memory=MEMORY) as (client, _):
        found = losses(rank, client, workers)
        dist.barrier()
        return expected, found, client.stats().misses


@pytest.mark.parametrize("workers", [0, 1])
def test_data_parallel_training(ranks: Ranks, packed: Path, features: np.ndarray, workers: int) -> None:
    for expected, found, misses in ranks.do(train, packed, features, workers):
        assert len(found) == 2 * ROWS // (50 * RANKS)
        assert found == expected  # to the last bit
        assert found[-1] < 0.8 * found[0]
        assert misses == ROWS  # of two epochs, all ranks and their workers


# Mini-batches that are given to a loader are divided among the ranks.


BATCHES = [np.arange(10 * k, 10 * k + 10) for k in range(2 * RANKS)]


def loaders_warn(rank: int, path: Path) -> tuple[list[str], list[int], list[str]]:
    """What a rank is warned of by two loaders, the seeds that it gets, and the warnings where a sampler
    divides."""
    with featstore.open(path) as store, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            with store.loader(BATCHES, memory="64MiB") as loader:
                seeds = [int(one) for batch in loader for one in batch.n_id]
        said = [str(one.message) for one in found if one.category is FeatstoreWarning]
        found.clear()
        half = torch.utils.data.DistributedSampler(range(ROWS))  # type: ignore[arg-type, var-annotated]
        ranks_module._said = False
        divided = torch.utils.data.DataLoader(range(ROWS), sampler=half, batch_size=50)  # type: ignore[arg-type]
        with store.loader(divided, memory="64MiB") as loader:
            assert loader.world_size == RANKS
            assert len(loader) == len(divided)
        return said, seeds, [str(one.message) for one in found]


def test_ranks_are_told_that_they_share(ranks: Ranks, packed: Path) -> None:
    for rank, (said, seeds, divided) in enumerate(ranks.do(loaders_warn, packed)):
        assert seeds == np.concatenate(BATCHES[rank::RANKS]).tolist(), "each its own"
        assert len(said) == 1
        assert f"one of {RANKS} ranks" in said[0]
        assert divided == []
