"""On an accelerator (CUDA), where there is one: rows are the source's in every mode and every tier, whatever
stream they are used in and however late its kernels run, and memory is given back."""

from __future__ import annotations

import gc
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no accelerator here", allow_module_level=True)

import featstore  # noqa: E402
from featstore.base.transfers import Transfer  # noqa: E402
from featstore.loaders.options import MODES  # noqa: E402
from featstore.testing import check_source, check_tier  # noqa: E402

NODES, WIDTH, CLASSES = 4000, 33, 7
FEATURES = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, CLASSES, NODES)
TRAIN = np.arange(1, NODES, 4)
SLEEP = 40_000_000  # cycles: some 20 ms
HOW: dict[str, Any] = {"seeds": TRAIN, "fanouts": (4, 3), "batch_size": 100, "memory": "64MiB"}
MORE: dict[str, dict[str, Any]] = {"partitions": {"resident": 4, "replaced": 2}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Iterator[featstore.Store]:
    edges = np.random.default_rng(2).integers(0, NODES, (2, 30_000))
    path = tmp_path_factory.mktemp("accelerator") / "s"
    with pack(path, FEATURES, graph=edges, order="ldg", partitions=10, arrays={"y": LABELS}) as made:
        yield made


def streams() -> Any:
    return pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])


@streams()
@pytest.mark.parametrize("device_memory", [None, "300KiB"], ids=["", "with rows on the device"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_are_the_source_s_however_late_they_are_used(
    store: featstore.Store, tmp_path: Path, mode: str, device_memory: Any, own_stream: bool
) -> None:
    """The loop's kernels run long after it has taken further mini-batches, in whose memory these lie if it
    was given away too early."""
    options = HOW | MORE.get(mode, {})
    if mode in ("compiled", "rolling"):
        options["name"] = f"{mode}-{device_memory}-{own_stream}"
    if device_memory is not None:
        options["device_memory"] = device_memory
    scope: Any = torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()
    with store.loader(mode=mode, device="cuda", attach=["y"], **options) as loader, scope:
        for _ in range(2):
            found, ids, edges = [], [], []
            for batch in loader:
                assert batch.x.is_cuda
                assert batch.edge_index.is_cuda
                assert batch.y.is_cuda
                torch.cuda._sleep(SLEEP // 10)
                found.append((batch.x * 2, batch.edge_index.clone(), batch.y.clone()))
                ids.append(batch.n_id)
                edges.append(np.stack([batch.row, batch.col]))
            torch.cuda.synchronize()
            for (x, edge_index, y), n_id, edge in zip(found, ids, edges, strict=True):
                np.testing.assert_array_equal(x.cpu().numpy(), FEATURES[n_id] * 2)
                np.testing.assert_array_equal(edge_index.cpu().numpy(), edge)
                np.testing.assert_array_equal(y.cpu().numpy(), LABELS[n_id])
        if device_memory is not None and mode in ("online", "partitions"):
            assert sum(one.hits for one in loader.report().devices.values()) > 0


@pytest.mark.parametrize("mode", ["online", "compiled"])
def test_the_device_may_be_said_in_every_way(store: featstore.Store, mode: str) -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        with store.loader(mode=mode, device=device, **HOW) as loader:
            batch = next(iter(loader))
            assert batch.x.device == torch.device("cuda:0")
            np.testing.assert_array_equal(batch.x.cpu().numpy(), FEATURES[batch.n_id])
    with pytest.raises(featstore.errors.FeatstoreError, match="cannot be used here"):
        store.loader(mode=mode, device=f"cuda:{torch.cuda.device_count()}", **HOW)


def test_a_mini_batch_comes_while_the_device_is_busy(store: featstore.Store) -> None:
    """Rows are brought beside the loop's kernels, not after them."""
    with store.loader(mode="online", device="cuda", device_memory="300KiB", **HOW) as loader:
        for batch in loader:  # memory is asked for, which waits for the device
            del batch
        mini_batches = iter(loader)
        next(mini_batches)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(100 * SLEEP)
        end = torch.cuda.Event()
        end.record()
        for _ in range(3):
            next(mini_batches)
        assert not end.query(), "the loop has its mini-batches before its kernels have run"
        assert time.perf_counter() - begin < 1.5
        end.synchronize()


def dtypes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "floats": rng.standard_normal((3000, 20), np.float32),
        "bytes": rng.integers(0, 255, (700, 3), np.uint8),
        "halves": rng.standard_normal((90, 2, 150)).astype(ml_dtypes.bfloat16),
        "numbers": rng.integers(0, 2**60, 1),
        "wide": rng.standard_normal((300, 5000)),
    }


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return dtypes()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: Any) -> Iterator[featstore.Store]:
    with pack(tmp_path_factory.mktemp("tables") / "s", arrays) as made:
        yield made


@pytest.mark.parametrize("device", ["cuda", ["cuda", "cuda"], ["cuda", "cpu"], ["cpu", "cuda"]])
def test_a_device_keeps_the_contract_of_tiers(tables: featstore.Store, arrays: Any, device: Any) -> None:
    check_tier(featstore.Device(device, "1MiB"), tables, arrays, 80 << 20)
    tiers = [featstore.Device(device, "1MiB", "lru"), featstore.Buffer("s3-fifo", "1MiB")]
    with tables.reader(tiers=tiers, memory="64MiB") as reader:
        check_source(reader, arrays, seed=5, requests=20, ids_max=500)


@streams()
def test_a_reader_s_rows_wait_for_what_their_memory_is_used_for(
    tables: featstore.Store, arrays: Any, own_stream: bool
) -> None:
    """``out`` is read by kernels that have not run yet when the next rows are asked for."""
    rng = np.random.default_rng(4)
    scope: Any = torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext()
    with (
        tables.reader(device="cuda", device_memory="64KiB", tables=["floats"], memory="64MiB") as reader,
        scope,
    ):
        out = torch.empty((200, 20), device="cuda")
        sums, wanted = [], []
        for _ in range(8):
            ids = rng.integers(0, 3000, 200)
            rows = reader.read(torch.from_numpy(ids).to("cuda"), out=out)
            assert rows.data_ptr() == out.data_ptr()
            torch.cuda._sleep(SLEEP)
            sums.append(out.clone())
            wanted.append(arrays["floats"][ids])
        fresh = [reader.read(ids) for ids in (rng.integers(0, 3000, 50) for _ in range(3))]
        torch.cuda.synchronize()
        for found, rows in zip(sums, wanted, strict=True):
            np.testing.assert_array_equal(found.cpu().numpy(), rows)
        assert all(one.device == torch.device("cuda:0") for one in fresh)


def test_a_reader_is_not_held_up_by_the_loop(tables: featstore.Store, arrays: Any) -> None:
    with tables.reader(device="cuda", device_memory="64KiB", tables=["floats"], memory="64MiB") as reader:
        ids = np.arange(300)
        kept = np.empty((300, 20), np.float32)
        for _ in range(3):
            reader.read(ids)
            reader.read(ids, out=kept)
        torch.cuda._sleep(100 * SLEEP)
        end = torch.cuda.Event()
        end.record()
        reader.read(ids, out=kept)
        fresh = reader.read(ids)
        assert not end.query()
        end.synchronize()
        for rows in (kept, fresh.cpu().numpy()):
            np.testing.assert_array_equal(rows, arrays["floats"][ids])


def test_ids_on_the_device(tables: featstore.Store, arrays: Any) -> None:
    ids = np.array([5, 5, 2999, 0])
    with tables.reader(memory="32MiB", tables=["floats"]) as reader:
        rows = reader.read(torch.from_numpy(ids).to("cuda"))
        np.testing.assert_array_equal(rows.cpu().numpy(), arrays["floats"][ids])
    with tables.table("halves", memory="64MiB", device="cuda", device_memory="1MiB") as array:
        rows = array[torch.arange(90, device="cuda")]
        assert rows.dtype == torch.bfloat16
        np.testing.assert_array_equal(rows.float().cpu().numpy(), arrays["halves"].astype(np.float32))


def test_pinned_memory_is_as_large_as_was_asked_and_goes_back() -> None:
    transfer = Transfer("cuda")
    asked = 150 * 2**20  # torch's own pinned memory would be 256 MiB
    transfer.memory(4096)
    before = rss()
    memory = transfer.memory(asked)
    memory[:] = 1
    assert torch.from_numpy(memory[17:99]).is_pinned()
    assert asked * 0.95 <= rss() - before <= asked * 1.1
    del memory
    gc.collect()
    assert rss() - before <= asked * 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # it has not died


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_settled(read: Callable[[], int], limit: int) -> int:
    """The least of what is read for a while."""
    end = time.monotonic() + 5
    while (found := read()) > limit and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_the_device_is_given_back(store: featstore.Store, mode: str) -> None:
    def used() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())

    gc.collect()
    before = used()
    options = HOW | MORE.get(mode, {})
    with store.loader(mode=mode, device="cuda", device_memory="300KiB", **options) as loader:
        most = before
        for batch in loader:
            del batch
            most = max(most, used())
        assert most > before
    assert memory_settled(used, before) <= before


def test_a_loop_that_breaks_off_and_goes_on(store: featstore.Store) -> None:
    with store.loader(mode="online", device="cuda", device_memory="300KiB", **HOW) as loader:
        for _ in zip(range(3), loader, strict=False):
            torch.cuda._sleep(SLEEP)
        state = loader.state_dict()
        rest = [(batch.n_id, batch.x.clone()) for batch in loader]
    with store.loader(mode="online", device="cuda", **HOW) as other:
        other.load_state_dict(state)
        for batch in other:
            np.testing.assert_array_equal(batch.x.cpu().numpy(), FEATURES[batch.n_id])
    for n_id, x in rest:
        np.testing.assert_array_equal(x.cpu().numpy(), FEATURES[n_id])


def test_two_loops_in_threads_of_their_own(store: featstore.Store) -> None:
    errors: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            with (
                store.loader(
                    mode="online", device="cuda", device_memory="300KiB", seed=seed, **HOW
                ) as loader,
                torch.cuda.stream(torch.cuda.Stream()),
            ):
                for batch in loader:
                    torch.cuda._sleep(SLEEP // 10)
                    copied = batch.x.clone()
                    np.testing.assert_array_equal(copied.cpu().numpy(), FEATURES[batch.n_id])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
        assert not one.is_alive()
    if errors:
        raise errors[0]


def test_pyg_s_objects_are_on_the_device(store: featstore.Store) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg_loader import NeighborLoader

    with store.loader(mode="online", device="cuda", attach=["y"], **HOW) as loader:
        data = next(iter(loader)).pyg()
        for name in ("x", "edge_index", "n_id", "y"):
            assert data[name].is_cuda, name
        np.testing.assert_array_equal(data.x.cpu().numpy(), FEATURES[data.n_id.cpu().numpy()])
    with NeighborLoader(
        store, [4, 3], input_nodes=TRAIN, batch_size=100, memory="64MiB", device="cuda"
    ) as pyg:
        for data in pyg:
            assert data.x.is_cuda
            assert data.edge_index.is_cuda
            np.testing.assert_array_equal(data.x.cpu().numpy(), FEATURES[data.n_id.cpu().numpy()])
