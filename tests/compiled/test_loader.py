"""The loader: breaking off, resuming, closing, and what it says of itself; and that nothing of it is left
behind."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_support import Case, QuickDisk, make_case, placed, rows_of, skewed_batches
from processes import in_child, own_threads

import featstore
from featstore.compile.placement import Location, Placement
from featstore.errors import (
    BudgetError,
    ClosedError,
    CorruptionError,
    DeviceError,
    FeatstoreError,
    FormatError,
    SourceError,
)
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.sources import none_goes_on
from featstore.reader.reader import Reader
from featstore.trace.trace import Trace

BATCHES, ROWS = 11, 400
SIZES = {"paper": ROWS, "author": 150}
BASE, PACKED, SHARED = (int(c) for c in Location)
MIXED = placed(Placement(3, (BASE, SHARED, PACKED), 1, 0.5, PACKED))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two tables; compiled traces ``min`` and ``fixed`` with rows from everywhere. Not to be written to."""
    rows = {"paper": rows_of(ROWS, (25,), np.float32, 1), "author": rows_of(150, (600,), np.float16, 2)}
    made = make_case(
        tmp_path_factory.mktemp("case"), rows, skewed_batches(SIZES, BATCHES, 120, 3), permuted=True
    )
    for residency in ("min", "fixed"):
        made.compile(residency, residency=residency, policy=MIXED, cache=30_000)
    made.compile("device", policy=MIXED, cache=30_000, device_memory=20_000)
    return made


@pytest.fixture(params=["min", "fixed"])
def loader(request: pytest.FixtureRequest, case: Case) -> Iterator[Any]:
    with case.store.compiled(request.param) as compiled, CompiledLoader(compiled) as opened:
        yield opened


def test_rows_come_from_everywhere(case: Case) -> None:
    """What the other tests stand on."""
    for name in ("min", "fixed"):
        with case.store.compiled(name) as compiled:
            for table in SIZES:
                limits = compiled.limits(table)
                forecast = compiled.entry.forecast["tables"][table]
                assert (
                    min(
                        limits.packed_rows,
                        limits.shared_rows,
                        limits.slots,
                        forecast["base_rows"],
                        forecast["hit_rows"],
                    )
                    > 0
                )


# Iterating.


def test_breaking_off_and_beginning_again(case: Case, loader: Any) -> None:
    for end in (1, 4, BATCHES):
        for number, batch in enumerate(loader):
            case.check_batch(batch, number)
            if number == end - 1:
                break
        case.check(loader, range(BATCHES))


def test_an_exception_in_the_loop(case: Case, loader: Any) -> None:
    class Mistake(Exception):
        pass

    for number in (0, 5, BATCHES - 1):
        with pytest.raises(Mistake):  # noqa: PT012
            for batch in loader:
                if batch.index == number:
                    raise Mistake
        assert "featstore-compiled" not in own_threads()
        case.check(loader, range(BATCHES))


def test_a_second_iteration_ends_the_first(case: Case, loader: Any) -> None:
    """Slots are given away as mini-batches go by, so there is one iteration at a time."""
    first = iter(loader)
    case.check_batch(next(first), 0)
    case.check_batch(next(first), 1)
    second = iter(loader)
    case.check_batch(next(second), 0)
    with pytest.raises(FeatstoreError, match="another iteration"):
        next(first)
    first.close()
    case.check(second, range(1, BATCHES))
    case.check(loader, range(BATCHES))


def test_loaders_side_by_side_and_mini_batches_that_outlive_them(case: Case) -> None:
    with case.store.compiled("min") as compiled:
        with CompiledLoader(compiled) as one, CompiledLoader(compiled, queue_depth=1, verify=False) as other:
            kept = list(one)
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                case.check_batch(a, number)
                case.check_batch(b, number)
        left = CompiledLoader(compiled, tensors=True)
    case.check(kept, range(BATCHES))
    with left:  # the compiled trace was closed, its files are the loader's
        for _ in range(2):
            case.check(left, range(BATCHES))


def test_a_read_that_fails_ends_the_round_and_no_more(case: Case, tmp_path: Path) -> None:
    base = Path(shutil.copytree(case.store.path, tmp_path / "base"))
    with featstore.open(base) as store, store.compiled("min") as compiled, CompiledLoader(compiled) as loader:
        case.check(loader, range(BATCHES))
        path = base / "packs/min" / compiled.pack.tables["paper.packed"].entry.chunk_path(0)
        whole = path.read_bytes()
        for _ in range(2):
            path.write_bytes(bytes(len(whole)))
            with pytest.raises(CorruptionError, match=r"paper\.packed"):
                list(loader)
            path.write_bytes(whole)
            case.check(loader, range(BATCHES))


def test_what_one_store_refuses_ends_what_the_other_reads() -> None:
    """Nothing is left that writes into memory which is used again."""
    begun: list[Any] = []

    class Begun:
        def abandon(self) -> None:
            begun.append("abandoned")

    with pytest.raises(DeviceError), none_goes_on([Begun(), Begun()]):  # type: ignore[list-item]
        raise DeviceError(5, "there", 0)
    assert begun == ["abandoned"] * 2
    with pytest.raises(KeyboardInterrupt), none_goes_on([Begun()]):  # type: ignore[list-item]
        raise KeyboardInterrupt
    assert len(begun) == 3
    with none_goes_on([Begun()]):  # type: ignore[list-item]
        pass
    assert len(begun) == 3


def test_two_threads_get_right_rows_or_an_error(case: Case, loader: Any) -> None:
    errors: list[BaseException] = []
    finished: list[int] = []

    def go() -> None:
        try:
            for number, batch in enumerate(loader):
                case.check_batch(batch, number)
            finished.append(1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert finished
    assert all(isinstance(e, FeatstoreError) and "another iteration" in str(e) for e in errors), errors
    case.check(loader, range(BATCHES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_loader_in_a_forked_child_is_an_error_and_a_compiled_trace_is_not(case: Case, loader: Any) -> None:
    walk = iter(loader)
    next(walk)

    def use() -> None:
        with pytest.raises(ClosedError, match="process"):
            next(walk)
        with pytest.raises(ClosedError, match="process"):
            next(iter(loader))
        loader.close()

    assert in_child(lambda: use() is None) == 0

    def anew() -> None:
        with CompiledLoader(loader.compiled) as own:
            case.check(own, range(BATCHES))

    assert in_child(lambda: anew() is None) == 0
    case.check(walk, range(1, BATCHES))


def test_a_compiled_trace_can_be_pickled(case: Case) -> None:
    with case.store.compiled("min") as compiled:
        copy = pickle.loads(pickle.dumps(compiled))
    with copy, CompiledLoader(copy) as own:
        case.check(own, range(BATCHES))


# Order.


def test_orders_of_a_fixed_residency(case: Case) -> None:
    with case.store.compiled("fixed") as compiled:
        for order in (
            np.random.default_rng(0).permutation(BATCHES),
            [3, 1, 8],
            [2, 2, 0],
            range(BATCHES - 1, -1, -1),
        ):
            with CompiledLoader(compiled, order=order) as loader:
                assert len(loader) == len(order)
                for _ in range(2):
                    case.check(loader, list(order))
        for wrong in ([BATCHES], [-1], [0.5], [[1, 2]], ["a"]):
            with pytest.raises(SourceError, match="order must be numbers of mini-batches"):
                CompiledLoader(compiled, order=wrong)
    with case.store.compiled("min") as compiled, pytest.raises(SourceError, match="residency='fixed'"):
        CompiledLoader(compiled, order=range(BATCHES))


def test_an_order_of_its_own_for_every_round(case: Case) -> None:
    def order(round_: int) -> Any:
        return np.random.default_rng(round_).permutation(BATCHES)[: 7 + (round_ == 3)]

    with case.store.compiled("fixed") as compiled, CompiledLoader(compiled, order=order) as loader:
        assert len(loader) == 7
        for round_ in range(3):
            case.check(loader, order(round_).tolist())
        with pytest.raises(SourceError, match="order gave 8 mini-batches for round 3, 7 for round 0"):
            list(loader)
    with case.store.compiled("min") as compiled, pytest.raises(SourceError, match="residency='fixed'"):
        CompiledLoader(compiled, order=order)


def test_small_mini_batches_lie_together_and_begin_aligned(tmp_path: Path) -> None:
    """Rows of 6 and of 1,000 bytes; a number of mini-batches that no group divides, some of them empty."""
    rows = {"a": rows_of(300, (3,), np.float16, 1), "b": rows_of(200, (250,), np.float32, 2)}
    case = make_case(tmp_path, rows, skewed_batches({"a": 300, "b": 200}, 41, 30, 3))
    for residency in ("min", "fixed"):
        case.compile(residency, residency=residency, cache=20_000)
        with case.store.compiled(residency) as compiled, CompiledLoader(compiled) as loader:
            assert loader.depth > 3
            owners = set()
            for _ in range(2):
                for number, batch in enumerate(loader):
                    case.check_batch(batch, number)
                    for x in batch.x.values():
                        assert x.ctypes.data % 64 == 0 or not x.size
                    owners.add(owner(batch.x["b"]).ctypes.data)
                assert number == 40
            assert len(owners) < 41


@pytest.mark.parametrize("epochs", [[[0, 41]], [1, 41], [0, 50, 41], [0.0, 41.0], [0]])
def test_epochs_that_are_none(case: Case, monkeypatch: pytest.MonkeyPatch, epochs: Any) -> None:
    with case.store.compiled("min") as compiled:
        assert compiled.epochs().tolist() == [0, BATCHES]
        monkeypatch.setattr(compiled.pack, "arrays", {"epochs": np.array(epochs)})
        with pytest.raises(FormatError, match="epochs of the mini-batches"):
            compiled.epochs()


# Resuming.


@pytest.mark.parametrize(("name", "finished_rounds"), [("min", 0), ("min", 2), ("fixed", 1), ("device", 1)])
def test_resuming_at_every_mini_batch(case: Case, name: str, finished_rounds: int) -> None:
    device = "cpu" if name == "device" else None
    with case.store.compiled(name) as compiled:
        with CompiledLoader(compiled, device=device) as loader:
            for _ in range(finished_rounds):
                case.check(loader, range(BATCHES))
            states = [loader.state()]
            for number, batch in enumerate(loader):
                case.check_batch(batch, number)
                states.append(loader.state())
            states.append(loader.state())
        with CompiledLoader(compiled, device=device) as loader:
            for done, state in enumerate(states):
                loader.load_state(pickle.loads(pickle.dumps(state)))
                left = range(done, BATCHES) if done < BATCHES else range(BATCHES)
                case.check(loader, left)
                assert loader.state()["epoch"] == finished_rounds + (done >= BATCHES)
            case.check(loader, range(BATCHES))
            assert loader.state() == {**states[-1], "epoch": finished_rounds + 2}


def test_rows_for_a_device_are_in_host_memory_a_few_at_a_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featstore.loaders.compiled.assembly._STAGED_BYTES", 1000)
    read = []
    with case.store.compiled("device") as compiled:
        own = Reader.read_runs

        def watched(self: Any, runs: Any, **options: Any) -> Any:
            found = own(self, runs, **options)
            if any("device" in name for name in runs):
                read.extend(found.values())
            return found

        monkeypatch.setattr(Reader, "read_runs", watched)
        with CompiledLoader(compiled, device="cpu") as loader:
            case.check(loader, range(BATCHES))
    assert len(read) > 4
    assert all(len(rows) <= 1 or rows.nbytes <= 1000 for rows in read)


def test_resuming_in_the_middle_of_an_order(case: Case) -> None:
    order = np.random.default_rng(4).permutation(BATCHES)
    with case.store.compiled("fixed") as compiled, CompiledLoader(compiled, order=order) as loader:
        walk = iter(loader)
        case.check((next(walk) for _ in range(4)), order[:4].tolist())
        state = loader.state()
        walk.close()
        with CompiledLoader(compiled, order=order) as other:
            other.load_state(state)
            case.check(other, order[4:].tolist())


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError(5, "no")])
def test_loading_that_fails_leaves_no_wrong_rows(
    case: Case, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """After a whole round slots hold what its end has left: what was loaded in part is loaded anew."""
    with case.store.compiled("min") as compiled, CompiledLoader(compiled) as loader:
        state = loader.state()
        case.check(loader, range(BATCHES))
        own, slots = type(loader._slots).load, loader._slots

        def half(self: Any) -> None:
            own(self)
            for block in self.blocks:
                block[: len(block) // 2] = 255
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(type(slots), "load", half)
            with pytest.raises(error if isinstance(error, type) else type(error)):
                loader.load_state(state)
        case.check(loader, range(BATCHES))
        case.check(loader, range(BATCHES))


def test_a_state_that_is_loaded_ends_the_iteration(case: Case, loader: Any) -> None:
    walk = iter(loader)
    next(walk)
    state = loader.state()
    next(walk)
    loader.load_state(state)
    with pytest.raises(FeatstoreError, match=r"another iteration|state"):
        next(walk)
    case.check(loader, range(1, BATCHES))


def test_states_that_do_not_fit(case: Case, loader: Any) -> None:
    state = loader.state()
    with pytest.raises(SourceError, match="the state has compiled = 'nothing'"):
        loader.load_state(state | {"of": {"compiled": "nothing"}})
    for wrong in (-1, BATCHES + 1):
        with pytest.raises(SourceError, match="next of the state must"):
            loader.load_state(state | {"next": wrong})


# Memory.


def test_the_smallest_memory_is_said_and_works(case: Case) -> None:
    with case.store.compiled("min") as compiled:
        with pytest.raises(BudgetError) as error:
            CompiledLoader(compiled, memory="1MiB")
        with pytest.raises(BudgetError):
            CompiledLoader(compiled, memory=error.value.needed_bytes - 1)
        with CompiledLoader(compiled, memory=error.value.needed_bytes) as loader:
            assert loader.depth == 2
            for _ in range(2):
                case.check(loader, range(BATCHES))


@pytest.mark.parametrize("memory", ["smallest", "plenty"])
def test_a_slow_loop_has_a_bounded_number_of_mini_batches(case: Case, memory: str) -> None:
    """All rows of all rounds lie in the memory of as many mini-batches as there may be at once."""
    with case.store.compiled("min") as compiled:
        smallest = compiled.needed_bytes(2) if memory == "smallest" else None
        with CompiledLoader(compiled, memory=smallest) as loader:
            groups = {"smallest": 2, "plenty": 4}[memory]
            assert (loader.depth > 3) == (memory == "plenty")
            assert compiled.needed_bytes(loader.depth) <= (smallest or compiled.memory_bytes)
            places = set()
            for _ in range(3):
                for number, batch in enumerate(loader):
                    time.sleep(0.005)
                    places.add(owner(batch.x["paper"]).ctypes.data)
                    case.check_batch(batch, number)
            assert (
                len(places) <= groups + 2
            )  # the loop lets go of one as it takes the next, and keeps one between rounds


def owner(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that has the memory of this one."""
    return owner(rows.base) if isinstance(rows.base, np.ndarray) else rows


def test_memory_is_used_again_and_never_while_somebody_looks_at_it(case: Case) -> None:
    torch = pytest.importorskip("torch")
    looks = [
        lambda x: np.asarray(memoryview(x)), lambda x: x[3:9], lambda x: x.T,
        lambda x: x.reshape(-1).view(np.uint8)[5:], np.from_dlpack, torch.from_numpy,
        lambda x: torch.from_numpy(x)[2:], lambda x: torch.from_dlpack(x).flatten()[1:], lambda x: x,
    ]  # fmt: skip
    with case.store.compiled("min") as compiled, CompiledLoader(compiled) as loader:
        for look in looks:
            kept = [(look(batch.x["paper"]), batch.index) for batch in loader]
            gc.collect()
            for found, number in kept:
                wanted = look(case.rows["paper"][case.batches[number]["paper"]])
                assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
        del kept, found, wanted
        owners = [weakref.ref(owner(batch.x["paper"])) for batch in list(loader)]
        case.check(loader, range(BATCHES))
        gc.collect()
        assert sum(o() is not None for o in owners) <= loader.depth + 2, (
            "what the loop held for once is given back"
        )


def test_nothing_is_left_after_closing(case: Case) -> None:
    gc.collect()
    threads = own_threads()
    files = len(os.listdir("/proc/self/fd"))
    with case.store.compiled("min") as compiled:
        loader = CompiledLoader(compiled)
        walk = iter(loader)
        rows = weakref.ref(owner(next(walk).x["paper"]))
        slots = [weakref.ref(s.base) for s in loader._slots.blocks]
        next(walk)
        loader.close()
        loader.close()
        assert own_threads() == threads
        with pytest.raises(ClosedError):
            next(walk)
        with pytest.raises(ClosedError):
            next(iter(loader))
        with pytest.raises(ClosedError):
            loader.load_state(loader.state())
        del walk
        gc.collect()
        assert rows() is None
        assert all(s() is None for s in slots)
        assert loader.report().batches == 2, "a report can be had afterwards"
    del loader, compiled
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_in_another_thread_ends_the_loop(case: Case) -> None:
    """Wherever the loader is just then: an error, and never rows that are not right."""
    for turn in range(8):
        with case.store.compiled("min") as compiled:
            loader = CompiledLoader(compiled)
            closing = threading.Timer(0.002 * turn, loader.close)
            closing.start()
            with pytest.raises(ClosedError):  # noqa: PT012
                while True:
                    for number, batch in enumerate(loader):
                        case.check_batch(batch, number)
            closing.join()
            loader.close()


def test_an_interrupt_leaves_nothing_hanging(case: Case, loader: Any) -> None:
    import _thread

    for delay in (0.0, 0.003, 0.01):
        timer = threading.Timer(delay, _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            while True:
                for number, batch in enumerate(loader):
                    case.check_batch(batch, number)
        timer.join()
        assert "featstore-compiled" not in own_threads()
        case.check(loader, range(BATCHES))


# Reports.


@pytest.mark.parametrize("name", ["min", "fixed", "device"])
def test_a_report_adds_up(case: Case, name: str) -> None:
    with case.store.compiled(name) as compiled:
        with CompiledLoader(compiled, device="cpu" if name == "device" else None) as loader:
            for _ in range(2):
                for _ in loader:
                    time.sleep(0.001)
            report = loader.report()
        assert report.batches == 2 * BATCHES
        asked = {t: 2 * sum(len(b[t]) for b in case.batches) for t in SIZES}
        assert sum(report.row_bytes.values()) == sum(
            n * case.store.tables[t].row_bytes for t, n in asked.items()
        )
        forecast = compiled.entry.forecast["tables"]
        for source, key in (
            ("hit", "hit_rows"),
            ("packed", "packed_rows"),
            ("shared", "shared_reads_rows"),
            ("base", "base_rows"),
        ):
            rows = {t: forecast[t][key] for t in SIZES}
            assert report.row_bytes[source] == 2 * sum(
                n * case.store.tables[t].row_bytes for t, n in rows.items()
            ), source
        assert (report.row_bytes["device"] > 0) == (name == "device")
        assert report.bytes_read >= report.reads * 4096 > 0
        assert report.forecast_seconds == pytest.approx(2 * compiled.entry.forecast["seconds"])
        assert report.seconds["train"] > 2 * BATCHES * 0.001
        assert all(seconds >= 0 for seconds in report.seconds.values())
        assert {"read", "read wait", "assemble", "graph", "hand over", "wait"} <= report.seconds.keys()
        assert report.slowest in report.seconds
        assert report.to_dict()["batches"] == report.batches


def test_rows_on_a_device_need_one(case: Case) -> None:
    with case.store.compiled("device") as compiled:
        with pytest.raises(SourceError, match="device="):
            CompiledLoader(compiled)
        with CompiledLoader(compiled, device="cpu") as loader:
            for _ in range(2):
                case.check(loader, range(BATCHES))


# Samples.


def test_graphs_of_pyg_come_back_filled(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    rows = {"paper": rows_of(200, (8,), np.float32, 1), "author": rows_of(90, (3,), np.int64, 2)}
    ids = skewed_batches({"paper": 200, "author": 90}, 4, 40, 1)

    def edges(a: int, b: int) -> Any:
        return torch.from_numpy(random.integers(0, max(1, min(a, b)), (2, 7)))

    plain = [
        pyg.Data(
            n_id=torch.from_numpy(b["paper"]), x=torch.ones(3), edge_index=edges(9, 9), y=torch.arange(5)
        )
        for b in ids
    ]
    hetero = []
    for b in ids:
        one = pyg.HeteroData()
        for name in rows:
            one[name].n_id = torch.from_numpy(b[name])
        one["paper", "by", "author"].edge_index = edges(len(b["paper"]), len(b["author"]))
        hetero.append(one)
    for name, batches, tables in (("plain", plain, ["paper"]), ("hetero", hetero, ["paper", "author"])):
        folder = tmp_path / name
        folder.mkdir()
        with featstore.pack(
            folder / "s", {t: rows[t] for t in tables}, order="given", disk=QuickDisk()
        ) as store:
            trace = Trace.record(batches, folder / "trace")
            featstore.compile_trace(store, trace, memory="16MiB", cache=2000, disk_door=QuickDisk()).close()
            with store.compiled() as compiled, CompiledLoader(compiled) as loader:
                for _ in range(2):
                    for found, was, b in zip(loader, batches, ids, strict=True):
                        assert type(found) is type(was)
                        for t in tables:
                            own, before = (found, was) if name == "plain" else (found[t], was[t])
                            assert own.x.numpy().tobytes() == rows[t][b[t]].tobytes()
                            assert own.x.shape == (len(b[t]), *rows[t].shape[1:])
                            assert torch.equal(own.n_id, before.n_id)
                        if name == "plain":
                            assert torch.equal(found.y, was.y)
                            assert torch.equal(found.edge_index, was.edge_index)
                        else:
                            edge = ("paper", "by", "author")
                            assert torch.equal(found[edge].edge_index, was[edge].edge_index)


def test_tensors_of_what_torch_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = {"t": rows_of(50, (2,), "M8[s]", 0)}
    case = make_case(tmp_path, rows, skewed_batches({"t": 50}, 3, 20, 1))
    case.compile()
    with case.store.compiled() as compiled:
        with CompiledLoader(compiled) as loader:
            case.check(loader, range(3))
        with (
            pytest.raises((TypeError, SourceError), match="torch has no dtype"),
            CompiledLoader(compiled, tensors=True) as loader,
        ):
            list(loader)


# Damage.


def test_a_flipped_bit_is_found_wherever_it_is(case: Case, tmp_path: Path) -> None:
    """Every file of the compiled trace: what is read is refused, and a scrub names it, read or not."""
    base = Path(shutil.copytree(case.store.path, tmp_path / "base"))
    unread = 0
    for name in ("min", "device"):
        root = base / "packs" / name
        files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.name != "lock"]
        for number, path in enumerate(files):
            if "paper." in str(path) or (name == "device" and ".device" not in str(path)):
                continue  # one table's files are as good as the other's
            whole, file = path.read_bytes(), str(path.relative_to(root))
            data = bytearray(whole)
            data[len(data) * 2 // 3] ^= 1 << (number % 8)
            path.write_bytes(data)
            try:
                go_through(base, name, case)
                unread += 1
                assert path.name == "zarr.json" or "partition_offsets" in file, file
            except CorruptionError as error:
                assert file in str(error), file
            except FormatError:
                assert file == "featstore.json"
            if file != "featstore.json":
                assert file in {p.path for p in featstore.verify(root).problems}, file
            path.write_bytes(whole)
    assert unread


def go_through(base: Path, name: str, case: Case) -> None:
    device = "cpu" if name == "device" else None
    with (
        featstore.open(base) as store,
        store.compiled(name) as compiled,
        CompiledLoader(compiled, device=device) as loader,
    ):
        case.check(loader, range(BATCHES))


@pytest.mark.parametrize("edges", [1, 4, 12])
def test_what_was_compiled_opens_in_the_memory_that_it_was_compiled_for(tmp_path: Path, edges: int) -> None:
    """Whatever share of it samples take, of which several are read beforehand."""
    nodes, rng = 20_000, np.random.default_rng(2)
    rows = rng.standard_normal((nodes, 4)).astype(np.float32)

    def batch() -> Any:
        ids = rng.choice(nodes, 3000, replace=False)
        return {"n_id": ids, "row": rng.integers(0, 3000, 3000 * edges), "col": np.arange(3000 * edges)}

    batches = [batch() for _ in range(12)]
    with featstore.pack(tmp_path / "s", rows) as store:
        memory = 1 << 20
        while True:
            try:
                loader = store.loader(batches, mode="compiled", name=f"own-{memory}", memory=memory)
                break
            except featstore.errors.BudgetError as error:
                assert error.needed_bytes > memory
                assert not (store.path / "packs" / f"own-{memory}").exists(), "it is known beforehand"
                memory = error.needed_bytes
        with loader:
            for made, given in zip(loader, batches, strict=True):
                np.testing.assert_array_equal(made.x, rows[given["n_id"]])
