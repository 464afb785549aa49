"""A pack that is killed, at any moment and with whatever the disk had made of it, leaves the old store or the
new one; and going on from there gives the same store, to the byte."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.errors import DeviceError, DiskFullError, FeatstoreError, IncompleteStoreError
from featstore.layout import table as table_module
from featstore.packing import permute, spill, spill_files
from featstore.storage.disk import Disk

sys.path.insert(0, str(Path(__file__).parent))
from disks import FailingDisk, Lost, RecordingDisk, crash_states, materialise

ROWS, COLUMNS = 600, 25  # rows of 100 bytes, which straddle pages
rng = np.random.default_rng(7)
FEATURES = rng.random((ROWS, COLUMNS)).astype(np.float32)
OTHER = rng.integers(0, 255, (50, 3)).astype(np.uint8)
PERMUTATION = rng.permutation(ROWS)
LABELS = rng.integers(0, 5, ROWS)
SOURCES, TARGETS = rng.integers(0, ROWS, (2, 9_000))


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Several chunks, buckets, flushes and checkpoints in a table of 60 kB."""
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 16 * 1024)
    monkeypatch.setattr(table_module.TableLayout.choose.__func__, "__defaults__", (16 * 1024,))
    monkeypatch.setattr(permute, "SOURCE_BLOCK_BYTES", 4096)
    monkeypatch.setattr(spill, "PIECE_BYTES", 4096)
    monkeypatch.setattr(spill_files, "FLUSH_BYTES_MAX", 4096)
    monkeypatch.setattr(spill_files, "FLUSH_BYTES_MIN", 4096)
    for module in (permute, spill, spill_files):
        monkeypatch.setattr(module, "CHECKPOINT_BYTES", 20_000)


def do_pack(path, disk=None, way="spill", **options):
    if way == "graph":
        options |= {"graph": {"features": np.stack([SOURCES, TARGETS])}, "hubs": 0.1, "hub_rank": "external"}
    memory = {"spill": 184_000, "memory": "1MiB", "given": "1MiB", "graph": "32MiB"}[way]
    order = {"features": "given" if way == "given" else "permutation", "other": "given"}
    permutation = None if way == "given" else {"features": PERMUTATION}
    return featstore.pack(
        path, {"features": FEATURES, "other": OTHER}, arrays={"labels": LABELS}, order=order,
        permutation=permutation, memory=memory, disk=disk, **options,
    )  # fmt: skip


def is_right(path) -> bool:
    with featstore.open(path) as store, store.reader(memory="4MiB", engine="threads") as reader:
        got = reader.read({"features": np.arange(ROWS), "other": np.arange(50)})
        assert np.array_equal(got["features"], FEATURES)
        assert np.array_equal(got["other"], OTHER)
        assert np.array_equal(store.arrays["labels"], LABELS)
        for graph in store.graphs.values():
            order = np.lexsort((SOURCES, TARGETS))
            indptr, indices = graph.csc()
            assert np.array_equal(indptr, np.cumsum([0, *np.bincount(TARGETS, minlength=ROWS)]))
            assert np.array_equal(indices, SOURCES[order])
            assert graph.hubs == 60
            assert featstore.verify(path).ok
    return True


def is_the_same(path: Path, wanted: dict[str, bytes]) -> bool:
    """It opens, and is a store that is right, to the byte. Where something else lies beside what it consists
    of, it is read as well."""
    with featstore.open(path):
        pass
    found = tree(path)
    assert {k: v for k, v in found.items() if ".journal" not in k} == wanted
    return len(found) == len(wanted) or is_right(path)


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


@pytest.mark.parametrize("way", ["given", "memory", "spill", "graph"])
def test_every_crash_state_is_old_or_new_and_can_go_on(tmp_path, way):
    root = tmp_path / "recorded"
    disk = RecordingDisk(tmp_path)
    do_pack(root, disk, way)
    assert is_right(root)
    wanted = tree(root)
    ops = [op for op in disk.ops if op.path.split("/")[0] in ("recorded", ".")]
    assert len(ops) > 60
    states = list(crash_states(ops))
    committed = max(
        i for i, op in enumerate(ops) if op.kind == "rename" and op.target.endswith("featstore.json")
    )
    late = [k for k, (label, _) in enumerate(states) if int(label.split(":")[0]) > committed]
    chosen = np.concatenate(
        [np.random.default_rng(1).permutation(len(states) - len(late))[:44], late]
    ).astype(int)
    resumed = opened = 0
    for turn, k in enumerate(chosen):
        label, kept = states[k]
        where = tmp_path / "state"
        materialise(kept, where)
        store = where / "recorded"
        try:
            with featstore.open(store):
                pass
            if tree(store) != wanted:
                is_right(store)
            opened += 1
            continue
        except IncompleteStoreError:
            # After the manifest's rename was made durable, the new store must be there.
            assert int(label.split(":")[0]) <= committed + 1, label
        if turn % 4 == 0 and store.exists():
            try:
                do_pack(store, way=way, resume=True)
                resumed += 1
            except (IncompleteStoreError, FeatstoreError) as error:
                assert "resume" in str(error), label
                do_pack(store, way=way, overwrite=True)
            assert tree(store) == wanted, label  # which is right, to the byte
            with featstore.open(store):
                pass
    assert opened > 3
    assert resumed > 5


@pytest.mark.parametrize("way", ["given", "memory", "spill", "graph"])
def test_killed_at_any_operation_then_resumed(tmp_path, way):
    reference = tmp_path / "reference"
    do_pack(reference, way=way)
    assert is_right(reference)
    wanted = tree(reference)
    at, finished = 0, False
    while not finished:
        path = tmp_path / "killed"
        shutil.rmtree(path, ignore_errors=True)
        try:
            do_pack(path, FailingDisk(at), way)
            finished = True
        except Lost:
            try:
                do_pack(path, way=way, resume=True)
            except IncompleteStoreError:
                do_pack(path, way=way)  # killed before anything worth resuming
            except FeatstoreError as error:
                assert "nothing to resume" in str(error)  # killed after the commit
        assert is_the_same(path, wanted)
        at += 1 if at < 8 else 13
    assert at > 60


class HalfRemoving(Disk):
    """Killed while it removes a directory."""

    def rmtree(self, path, own):
        for entry in [entry for entry in sorted(path.rglob("*")) if entry.is_file()][:3]:
            entry.unlink()
        raise Lost("killed")


@pytest.mark.parametrize("at", [100, 150, 200])
def test_what_is_half_removed_is_not_gone_on_with(tmp_path, at):
    """An unfinished pack that another begins to remove: going on with it would commit what is not there, and
    take the old store away."""
    path = tmp_path / "store"
    do_pack(path, way="graph")
    with pytest.raises(Lost):
        do_pack(path, FailingDisk(at), "graph", overwrite=True)
    assert list(path.glob("g*.journal"))
    with pytest.raises(Lost):
        do_pack(path, HalfRemoving(), "graph", overwrite=True)
    with pytest.raises(FeatstoreError, match="nothing to resume"):
        do_pack(path, way="graph", resume=True)
    assert is_right(path)
    do_pack(path, way="graph", overwrite=True)
    assert is_right(path)


@pytest.mark.parametrize("way", ["spill", "graph"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failure_of_any_operation_is_reported_and_the_old_store_stays(tmp_path, code, way):
    path = tmp_path / "store"
    featstore.pack(path, {"features": FEATURES * 2, "other": OTHER}, memory="1MiB")
    at, failures = 0, 0
    while True:
        try:
            do_pack(path, FailingDisk(at, code), way, overwrite=True)
            break
        except (DiskFullError, DeviceError) as error:
            failures += 1
            assert isinstance(error, DiskFullError) == (code == errno.ENOSPC)
            assert str(path) in str(error)
        with featstore.open(path) as store, store.reader(memory="4MiB", engine="threads") as reader:
            got = reader.read({"features": np.arange(ROWS)})["features"]
            assert np.array_equal(got, FEATURES * 2) or np.array_equal(got, FEATURES)
            if np.array_equal(got, FEATURES):  # the failure came after the commit: that pack did happen
                shutil.rmtree(path)
                featstore.pack(path, {"features": FEATURES * 2, "other": OTHER}, memory="1MiB")
        at += 1 if at < 6 else 17 if code == errno.EIO else 19
    assert is_right(path)
    assert failures > 6


def test_a_real_kill_leaves_a_pack_that_resumes(tmp_path):
    """SIGKILL in the middle of a pack of 64 MB, three times at different moments."""
    import signal
    import subprocess
    import time

    program = (
        "import numpy as np, featstore, sys\nfrom featstore.packing import spill, spill_files\n"
        "spill.CHECKPOINT_BYTES = spill_files.CHECKPOINT_BYTES = 8 << 20\nx = (np.arange(1_000_000, "
        "dtype=np.int64).reshape(-1, 1) * np.ones(8, np.int64))\np = "
        "np.random.default_rng(0).permutation(len(x))\nprint('go', "
        "flush=True)\nfeatstore.pack(sys.argv[1], x, order='permutation', permutation=p, "
        "memory='40MiB', resume=sys.argv[2] == '1',\n               progress=lambda e: print(e.stage, "
        "flush=True))\nprint('done', flush=True)\n"
    )
    path = tmp_path / "store"
    killed = 0
    for stage in ("spill", "spill", "write"):
        resume = "1" if (path.exists() and list(path.glob("*.journal"))) else "0"
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), resume], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.strip() == stage
            if seen == 2:
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
        process.stdout.close()
        process.wait()
        time.sleep(0.05)
        if not killed:
            break
        with pytest.raises(IncompleteStoreError, match="unfinished"):
            featstore.open(path)
    assert killed == 3
    subprocess.run(
        [sys.executable, "-c", program, str(path), "1"], check=True, stdout=subprocess.DEVNULL, timeout=100
    )
    with featstore.open(path) as store, store.reader(memory="64MiB") as reader:
        ids = np.random.default_rng(1).integers(0, 1_000_000, 20_000)
        assert (reader.read(ids) == ids[:, None]).all()
