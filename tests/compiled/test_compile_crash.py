"""Compiling that is killed or fails, at any moment: the base store is as it was, a compiled trace of that
name is the old one or the new one, and going on gives what an undisturbed compilation gives, to the byte."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_support import Case, QuickDisk, make_case, placed, rows_of, skewed_batches
from processes import own_threads

import featstore
import featstore.layout.table
from featstore.compile import segment_plan, segments
from featstore.compile import write_table as packing
from featstore.compile.placement import Location, Placement
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CorruptionError,
    DeviceError,
    DiskFullError,
    FeatstoreError,
    FormatError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
    StoreLockedError,
)
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.plan.cost import DeviceModel, device_key, models_path, save_model
from featstore.storage.generations import collect, writer_lock
from featstore.trace.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
from disks import FailingDisk, Lost, RecordingDisk, crash_states, materialise

BATCHES = 9
BASE, PACKED, SHARED = (int(c) for c in Location)
MIXED = placed(Placement(4, (PACKED, SHARED, SHARED, BASE), 1, 0.3, SHARED))


class QuickFailing(FailingDisk):
    """Fails like its parent, and does not wait for the device."""

    def fsync(self, file: Any) -> None:
        self._wrap(file.path, lambda: None)

    def fsync_dir(self, path: Path) -> None:
        self._wrap(path, lambda: None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, slabs, checkpoints, episodes and buckets in a table of 60 kB."""

    class Buckets(packing._Buckets):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.rows_each = 70

    monkeypatch.setattr(packing, "_Buckets", Buckets)
    monkeypatch.setattr(featstore.layout.table, "CHUNK_BYTES", 8 * 1024)
    monkeypatch.setattr(segment_plan, "SLAB_BYTES_MAX", 12_000)
    monkeypatch.setattr(segments, "SEGMENTS_CHECKPOINT_BYTES", 10_000)
    monkeypatch.setattr(segment_plan, "BUFFER_BYTES_MIN", 9 * 2**20 // 10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A base store of two tables, with nothing compiled. Not to be written to: take ``case``."""
    rows = {"t": rows_of(600, (24,), np.float32, 1), "u": rows_of(40, (3,), np.uint8, 2)}
    return make_case(
        tmp_path_factory.mktemp("whole"),
        rows,
        skewed_batches({"t": 600, "u": 40}, BATCHES, 150, 3),
        permuted=True,
    )


@pytest.fixture
def case(whole: Case, tmp_path: Path) -> Iterator[Case]:
    yield from copied(whole, tmp_path / "copy")


def copied(whole: Case, path: Path) -> Iterator[Case]:
    shutil.copytree(whole.store.path, path)
    with featstore.open(path) as store:
        yield Case(store, whole.rows, whole.batches, whole.trace)


def compile_in(case: Case, door: Any = None, **options: Any) -> None:
    case.compile(
        "x",
        **({"policy": MIXED, "cache": 1000, "overwrite": False, "disk_door": door or QuickDisk()} | options),
    )


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def is_right(case: Case, round_count: int = 1) -> None:
    with case.store.compiled("x") as compiled, CompiledLoader(compiled, engine="threads") as loader:
        for _ in range(round_count):
            case.check(loader, range(BATCHES))


def finish(case: Case, over: str = "") -> None:
    """What a person does after a crash. ``over``: the residency of the compiled trace that was to be
    replaced."""
    root = case.store.path / "packs/x"
    try:
        compile_in(case, resume=True)
    except IncompleteStoreError:
        compile_in(case)  # stopped before anything worth going on with
    except StoreExistsError:
        with featstore.open(root) as there:
            replaced = there.manifest.compiled is not None and there.manifest.compiled.residency != over
        if not replaced:
            compile_in(case, overwrite=True)
        with writer_lock(root):  # what `featstore gc` does: nothing refers to what was left behind
            collect(root, QuickDisk())
    except FeatstoreError as error:  # a journal that did not reach the disk
        assert "resume" in str(error)
        compile_in(case, overwrite=True)


def test_the_compilation_is_in_many_steps(case: Case) -> None:
    """What the tests below stand on."""
    disk = RecordingDisk(case.store.path)
    compile_in(case, disk)
    journals = [op for op in disk.ops if op.kind == "rename" and op.target.endswith(".journal")]
    assert len(journals) > 8
    with case.store.compiled("x") as compiled:
        for table in ("t", "u"):
            limits = compiled.limits(table)
            assert min(limits.packed_rows, limits.shared_rows, limits.slots) > 0
        assert compiled.pack.tables["t.packed"].layout.chunks > 1
    is_right(case, 2)


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing before", "an earlier one"])
def test_killed_at_any_operation_and_resumed(case: Case, earlier: bool, tmp_path: Path) -> None:
    before = tmp_path / "before"
    if earlier:
        compile_in(case, residency="fixed")
    shutil.copytree(case.store.path, before)
    base = tree(before)
    stays = [k for k in base if not k.startswith("packs")]
    compile_in(case, overwrite=earlier)
    wanted = tree(case.store.path)
    at, resumed, finished = 0, 0, False
    while not finished:
        shutil.rmtree(case.store.path / "packs")
        if earlier:
            shutil.copytree(before / "packs", case.store.path / "packs")
        try:
            compile_in(case, QuickFailing(at), overwrite=earlier)
            finished = True
        except Lost:
            kept = tree(case.store.path)
            assert {k: kept[k] for k in stays} == {k: base[k] for k in stays}
            try:
                is_right(case)  # the earlier one or the new one
                assert earlier or "packs/x/featstore.json" in kept
            except IncompleteStoreError:
                assert not earlier
            resumed += any(k.endswith(".journal") for k in kept)
            finish(case, over="fixed" if earlier else "")
        assert tree(case.store.path) == wanted, at
        at += 1 if at < 5 else 89 if earlier else 97
    is_right(case, 2)
    assert resumed > 5


def test_every_crash_state_is_old_or_new_and_can_go_on(case: Case, tmp_path: Path) -> None:
    disk = RecordingDisk(case.store.path)
    compile_in(case, disk)
    wanted = tree(case.store.path / "packs")
    shutil.rmtree(case.store.path / "packs")
    ops = disk.ops
    committed = max(
        i for i, op in enumerate(ops) if op.kind == "rename" and op.target.endswith("featstore.json")
    )
    states = list(crash_states(ops))
    late = [k for k, (label, _) in enumerate(states) if int(label.split(":")[0]) > committed]
    random = np.random.default_rng(1)
    chosen = np.concatenate(
        [random.permutation(len(states) - len(late))[:12], random.permutation(late)[:4]]
    ).astype(int)
    resumed = opened = 0
    for turn, k in enumerate(chosen):
        label, kept = states[k]
        materialise(kept, tmp_path / "state")
        shutil.rmtree(case.store.path / "packs", ignore_errors=True)
        if (tmp_path / "state/packs").exists():
            shutil.move(tmp_path / "state/packs", case.store.path / "packs")
        try:
            is_right(case)
            opened += 1
            continue
        except IncompleteStoreError:
            assert int(label.split(":")[0]) <= committed + 1, label
        if turn % 2 == 0:
            resumed += 1
            finish(case)
            assert tree(case.store.path / "packs") == wanted, label
    assert opened > 2
    assert resumed > 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_of_any_operation_is_told_and_harms_nothing(case: Case, code: int, tmp_path: Path) -> None:
    compile_in(case, residency="fixed")
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    before = Path(shutil.copytree(case.store.path, tmp_path / "before"))
    base = {k: v for k, v in tree(before).items() if not k.startswith("packs")}
    compile_in(case, overwrite=True)
    wanted = tree(case.store.path)
    at = failures = 0
    while True:
        shutil.rmtree(case.store.path / "packs")
        shutil.copytree(before / "packs", case.store.path / "packs")
        try:
            compile_in(case, QuickFailing(at, code), overwrite=True)
            break
        except (DiskFullError, DeviceError) as error:
            failures += 1
            assert isinstance(error, DiskFullError) == (code == errno.ENOSPC)
            assert str(case.store.path) in str(error)
        assert {k: v for k, v in tree(case.store.path).items() if not k.startswith("packs")} == base
        is_right(case)
        with case.store.compiled("x") as compiled:
            if compiled.entry.residency == "fixed":
                unharmed = tree(before / "packs")
                kept = tree(case.store.path / "packs")
                assert {k: kept[k] for k in unharmed} == unharmed
        assert not own_threads()
        finish(case, over="fixed")
        assert tree(case.store.path) == wanted, at
        at += 1 if at < 4 else 113 if code == errno.EIO else 127
    is_right(case)
    assert failures > 6
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


def test_an_interrupt_can_be_resumed_and_an_early_one_leaves_nothing(case: Case) -> None:
    compile_in(case)
    wanted = tree(case.store.path)
    shutil.rmtree(case.store.path / "packs")
    stages: list[str] = []
    while True:
        count, resuming = 0, (case.store.path / "packs").exists()

        def interrupt(progress: Any) -> None:
            nonlocal count
            count += 1
            if count > len(stages):
                stages.append(progress.stage)
                raise KeyboardInterrupt

        try:
            compile_in(case, resume=resuming, progress=interrupt)
            break
        except KeyboardInterrupt:
            assert not own_threads()
            if stages[-1] == "deciding":
                assert not (case.store.path / "packs").exists()
    assert {"deciding", "read", "write"} <= set(stages)
    assert tree(case.store.path) == wanted


def test_what_is_resumed_must_be_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path / "cache"))
    stopped = 0

    def stop(progress: Any) -> None:
        nonlocal stopped
        stopped += progress.stage == "write"
        if stopped == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_in(case, progress=stop)
    with pytest.raises(StoreExistsError, match="--resume"):
        compile_in(case)
    for other in (
        {"cache": 4000},
        {"residency": "fixed"},
        {"memory": "17MiB"},
        {"seed": 1},
        {"disk": "1x"},
        {"device_memory": 500},
    ):
        with pytest.raises(SourceError, match="cannot resume"):
            compile_in(case, resume=True, **other)
    with (
        Trace.record([{"t": np.arange(3), "u": np.arange(3)}], tmp_path / "other") as other_trace,
        pytest.raises(SourceError, match="cannot resume"),
    ):
        featstore.compile_trace(case.store, other_trace, "x", memory="16MiB", resume=True)
    # Placement follows the device model: a device calibrated meanwhile would have rows go elsewhere.
    save_model(device_key(case.store.path, "uring", "direct"), DeviceModel(1e-4, 1e-9, 1e-4))
    with pytest.raises(SourceError, match=r"cannot resume: .*device model"):
        compile_in(case, resume=True)
    models_path().unlink()
    compile_in(case, resume=True)
    is_right(case)


def test_a_real_kill(case: Case, tmp_path: Path) -> None:
    """SIGKILL in the middle of packing some megabytes, then the same again with resume."""
    rows = rows_of(60_000, (64,), np.uint8, 4)
    ids = [np.random.default_rng(k).integers(0, 60_000, 20_000) for k in range(6)]
    store = featstore.pack(tmp_path / "base", rows, order="given", disk=QuickDisk())
    Trace.record(ids, tmp_path / "trace").close()
    program = (
        "import sys, featstore\nfrom featstore.compile import segment_plan, segments\n"
        "segment_plan.SLAB_BYTES_MAX, segments.SEGMENTS_CHECKPOINT_BYTES = 200_000, 400_000\n"
        "featstore.compile_trace(sys.argv[1], sys.argv[2], 'x', memory='64MiB', cache=100_000,\n    "
        "resume=sys.argv[3] == '1', progress=lambda p: print(p.stage, flush=True)).close()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "base"), str(tmp_path / "trace")]
    process = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += line.strip() == "write"
        if seen == 6:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(IncompleteStoreError, match="unfinished"):
        store.compiled("x")
    assert list((tmp_path / "base/packs/x").glob("*.journal"))
    subprocess.run([*command, "1"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    with store.compiled("x") as compiled, CompiledLoader(compiled) as loader:
        for batch, wanted in zip(loader, ids, strict=True):
            assert batch.x.tobytes() == rows[wanted].tobytes()
    store.close()


# Before anything is written.


def test_a_dry_run_leaves_nothing(case: Case) -> None:
    before = tree(case.store.path)
    forecast = case.compile("x", dry_run=True, overwrite=False, policy=MIXED, cache=1000)
    assert tree(case.store.path) == before
    assert not (case.store.path / "packs").exists()
    compile_in(case)
    with case.store.compiled("x") as compiled:
        assert compiled.entry.forecast["tables"] == forecast.tables
        limits = [compiled.limits(name) for name in ("t", "u")]
        bytes_on_disk = sum(
            (one.packed_rows + one.shared_rows) * compiled.row_bytes(n)
            for n, one in zip("tu", limits, strict=True)
        )
        assert forecast.disk_bytes == bytes_on_disk
    there = tree(case.store.path)
    case.compile("x", dry_run=True, overwrite=False)
    case.compile("y", dry_run=True, overwrite=False)
    with pytest.raises(SourceError):
        case.compile("z", dry_run=True, residency="none")
    with pytest.raises(BudgetError):
        case.compile("z", dry_run=True, memory="3MiB")
    with pytest.raises(ArgumentError, match="dry_run= writes nothing"):
        case.compile("z", dry_run=True, resume=True, overwrite=False)
    assert tree(case.store.path) == there
    assert sorted(p.name for p in (case.store.path / "packs").iterdir()) == ["x"]


def test_a_dry_run_lets_an_unfinished_compilation_be(case: Case) -> None:
    with pytest.raises(Lost):
        compile_in(case, QuickFailing(400))
    before = tree(case.store.path)
    assert [k for k in before if k.endswith(".journal")]
    case.compile("x", dry_run=True, overwrite=False)
    assert tree(case.store.path) == before
    compile_in(case, resume=True)
    is_right(case)


@pytest.mark.parametrize("what", ["memory", "train_memory"])
def test_too_little_memory_says_how_much_works(case: Case, what: str) -> None:
    given = {"memory": "64MiB", "train_memory": "64MiB"} | {what: "1MiB"}
    said = []
    while True:
        try:
            compile_in(case, **given)
            break
        except BudgetError as error:
            said.append(error.needed_bytes)
            assert error.given_bytes == (said[-2] if len(said) > 1 else 2**20)
            assert not (case.store.path / "packs").exists()
            given[what] = error.needed_bytes  # type: ignore[assignment]
    assert len(said) == 1, "what it said works does not"
    is_right(case)


def test_too_little_memory_for_everything_says_how_much_works(case: Case) -> None:
    with pytest.raises(BudgetError) as error:
        compile_in(case, memory="1MiB")
    compile_in(case, memory=error.value.needed_bytes)
    is_right(case)


def test_a_table_whose_name_is_too_long_is_refused_beforehand(tmp_path: Path) -> None:
    name = "n" * 125
    made = make_case(tmp_path, {name: rows_of(20, (3,), np.uint8, 0)}, [{name: np.arange(3)}])
    with pytest.raises(FormatError, match="not allowed"):
        made.compile()
    assert not (made.store.path / "packs").exists()


def test_the_disk_is_looked_at_beforehand(case: Case) -> None:
    class Full(QuickDisk):
        def free_bytes(self, path: Path) -> int:
            return 10_000

    stages: list[str] = []
    with pytest.raises(DiskFullError, match="10,000 available"):
        compile_in(case, Full(), progress=lambda p: stages.append(p.stage))
    assert set(stages) == {"deciding"}
    assert not (case.store.path / "packs").exists()


def test_failing_at_once_leaves_nothing(case: Case, tmp_path: Path) -> None:
    with pytest.raises(IncompleteStoreError, match="nothing to resume"):
        compile_in(case, resume=True)
    with (
        Trace.record([{"t": np.array([600]), "u": np.array([0])}], tmp_path / "t") as outside,
        pytest.raises(IndexError),
    ):
        featstore.compile_trace(case.store, outside, "x", memory="16MiB")
    assert not (case.store.path / "packs").exists()


def test_damage_of_what_is_read_is_found(case: Case, tmp_path: Path) -> None:
    chunk = next(case.store.path.glob("g*/tables/t/rows/c.0.0"))
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(CorruptionError, match=r"tables/t/rows/c\.0\.0"):
        compile_in(case)
    assert not (case.store.path / "packs").exists()
    chunk.write_bytes(whole)
    log = Path(shutil.copytree(case.trace.path, tmp_path / "trace")) / "trace.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(CorruptionError, match="trace"):
        featstore.compile_trace(case.store, tmp_path / "trace", "x", memory="16MiB")
    assert not (case.store.path / "packs").exists()


def test_one_writer_at_a_time(case: Case) -> None:
    compile_in(case)
    with writer_lock(case.store.path / "packs/x"), pytest.raises(StoreLockedError, match="being written"):
        compile_in(case, overwrite=True)
    with pytest.raises(StoreExistsError, match="--overwrite"):
        compile_in(case)
    with case.store.compiled("x") as compiled, CompiledLoader(compiled) as loader:
        walk = iter(loader)
        case.check_batch(next(walk), 0)
        compile_in(case, overwrite=True, residency="fixed")  # a loader that is open goes on with what it has
        case.check(walk, range(1, BATCHES))
    is_right(case)
