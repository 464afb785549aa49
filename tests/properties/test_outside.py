"""Whatever lies in and around a store, no command and no loader writes or deletes anything that is not
featstore's own.

A store is surrounded and riddled with what people and programs leave: directories, files of odd names, pipes,
sockets, links to directories elsewhere (which hold what looks like featstore's). Then commands run, and
loaders. What they answer is their matter; all foreign things, and all outside the store, must be what they
were, but for what was asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import FeatstoreError
from featstore.storage.disk import Disk
from featstore.storage.packs import rolling

cli = pytest.importorskip("featstore_cli.main").cli

ROWS = 60
FEATURES = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)

#: Where foreign things are put, "" being the store, and which names they get.
PLACES = [
    "",
    "packs",
    "packs/ours",
    "packs/ours/g000001",
    "packs/train-0",
    "caches",
    "g000001",
    "g000001/tables",
    "new",
    "new/g000001",
]
NAMES = [
    "notes.txt", "g000003", "g000004.journal", "g000005.spill", "g000001.journal", "packs", "caches", "lock",
    "featstore.json", "train-0", "train-1", "train-0.trace", "train.trace", "train.rolling",
    "train.preparing", "ours", "ours.forecast", "c.cache", "other", "my.trace", "trace.log", "recording.log",
    "-rf", "*", "new\nline", "\udcff\udcfe", "ü\u202e", " ", "c.0~", "tables",
]  # fmt: skip
KINDS = [
    "file",
    "lock",
    "folder",
    "store",
    "link to folder",
    "link to file",
    "dangling",
    "loop",
    "pipe",
    "socket",
]

things = st.tuples(st.sampled_from(PLACES), st.sampled_from(NAMES), st.sampled_from(KINDS), st.booleans())


def episode(number: int) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng([number, k]).integers(0, ROWS, 10) for k in range(2)]


class QuickDisk(Disk):
    def fsync(self, file: Any) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a graph, a compiled trace, a saved cache, an unfinished pack, and what a killed loader has
    left."""
    path = tmp_path_factory.mktemp("template") / "s"
    edges = np.random.default_rng(0).integers(0, ROWS, (2, 200))
    train = {"train": np.arange(20)}
    with featstore.pack(path, FEATURES, graph=edges, order="degree", arrays=train) as store:
        with featstore.Trace.record(episode(0), path.parent / "t") as trace:
            for name in ("ours", "train-0"):
                made = featstore.compile_trace(store, trace, name, memory="64MiB")
                assert isinstance(made, featstore.Store)
                made.close()
        with store.loader(episode(0), mode="online", memory="64MiB") as loader:
            list(loader)
            loader.save_cache("c")
    kept = path / "packs/kept"
    shutil.move(path / "packs/train-0", kept)
    lock = rolling(path / "packs", "train")
    lock.release()
    shutil.move(kept, path / "packs/train-0")
    return path


def put(path: Path, kind: str, outside: Path) -> None:
    """Make a foreign thing. Its directory is there."""
    if kind == "file":
        path.write_text("mine")
    elif kind == "lock":
        path.write_text("")
    elif kind == "folder":
        (path / "deep").mkdir(parents=True)
        # where tables are, that would be the name of a chunk of one
        named = re.search(r"/g\d{6}/(tables|arrays|graphs|keys)/", f"{path}/")
        (path / "deep" / ("mine" if named else "c.0")).write_text("mine")
    elif kind == "store":
        shutil.copytree(outside / "s", path, symlinks=True)
    elif kind == "link to folder":
        path.symlink_to(outside / "s")
    elif kind == "link to file":
        path.symlink_to(outside / "s/lock")
    elif kind == "dangling":
        path.symlink_to(outside / "nothing")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        where = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as bound, suppress(OSError):
            bound.bind(f"/proc/self/fd/{where}/{path.name}")
        os.close(where)


def listing(path: Path) -> dict[str, Any]:
    """Everything at and below a path: kind, and content."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(path):
        for name in [*folders, *files]:
            full = os.path.join(folder, name)
            found[full] = seen(full)
    return found


def seen(path: str) -> Any:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return os.readlink(path)
    return Path(path).read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)


def command(*arguments: Any) -> Callable[[Path], None]:
    def run(root: Path) -> None:
        given = [
            str(a).format(s=root / "s", new=root / "s/new", asked=root / "asked", rows=root / "rows.npy")
            for a in arguments
        ]
        result = CliRunner().invoke(cli, given, prog_name="featstore")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        # a pack that has replaced the store has no training nodes
        assert result.exit_code != 2 or "no array 'train'" in result.stderr, result.stderr

    return run


def loader(make: Callable[[featstore.Store], Any]) -> Callable[[Path], None]:
    def run(root: Path) -> None:
        with suppress(FeatstoreError), featstore.open(root / "s") as store, make(store) as made:
            for _ in islice(made, 3):
                pass
            if made.mode == "online":
                made.save_cache("c")
                made.save_cache("d")

    return run


ACTIONS: dict[str, Callable[[Path], None]] = {
    "gc": command("gc", "{s}"),
    "gc all": command("gc", "{s}", "--unfinished", "--stale", "--json"),
    "gc dry": command("gc", "{s}", "--unfinished", "--stale", "--dry-run"),
    "gc new": command("gc", "{new}", "--unfinished", "--stale"),
    "inspect": command("inspect", "{s}"),
    "verify": command("verify", "{s}"),
    "explain": command("explain", "{s}", "--random", "5"),
    "pack": command("pack", "{s}", "--features", "{rows}", "--overwrite", "--memory", "64MiB"),
    "pack new": command("pack", "{new}", "--features", "{rows}", "--memory", "64MiB"),
    "resume": command("pack", "{s}", "--features", "{rows}", "--resume", "--memory", "64MiB"),
    "split": command("split", "{s}", "--hosts", "2", "--out", "{asked}/parts", "--memory", "96MiB"),
    "split anew": command(
        "split", "{s}", "--hosts", "3", "--out", "{asked}/parts", "--overwrite", "--halo-disk", "1x",
    ),
    "split inside": command("split", "{s}", "--hosts", "2", "--out", "{s}/packs/parts"),
    "export": command("export", "{s}", "features", "--to", "{asked}/parts.npy", "--overwrite"),
    "export inside": command("export", "{s}", "features", "--to", "{s}/packs/parts.zarr"),
    "sample": command(
        "sample", "{s}", "--out", "{asked}/t", "--train", "train", "--fanouts", "2", "--batch-size", "30",
        "--overwrite", "--memory", "64MiB",
    ),
    "sample inside": command(
        "sample", "{s}", "--out", "{s}/packs/my.trace", "--train", "train", "--fanouts", "2",
        "--batch-size", "30", "--overwrite",
    ),
    "compile": command(
        "pack", "{s}", "--trace", "{asked}/t0", "--name", "ours", "--overwrite", "--memory", "64MiB"
    ),
    "forecast": command(
        "pack", "{s}", "--trace", "{asked}/t0", "--name", "ours", "--dry-run", "--memory", "64MiB"
    ),
    "train": loader(lambda s: s.loader(episode, mode="compiled", memory="64MiB", name="train")),
    "fresh": loader(lambda s: s.loader(episode, mode="rolling", memory="64MiB", name="train")),
    "fresh elsewhere": loader(
        lambda s: s.loader(episode, mode="rolling", memory="64MiB", name="../../outside/s")
    ),
    "online": loader(lambda s: s.loader(episode(0), mode="online", memory="64MiB", warm="c")),
}  # fmt: skip


@pytest.fixture(scope="module")
def _quick() -> Iterator[None]:
    """Nothing here is about power cuts."""
    patch = pytest.MonkeyPatch()
    for name in ("fsync", "fsync_dir"):
        patch.setattr(Disk, name, getattr(QuickDisk, name))
    yield
    patch.undo()


def surrounded(template: Path, root: Path) -> None:
    for place in ("outside", "tmp", "cache", "home", "asked"):
        (root / place).mkdir(parents=True)
    shutil.copytree(template, root / "s", symlinks=True)
    shutil.copytree(template, root / "outside/s", symlinks=True)
    shutil.copytree(template.parent / "t", root / "asked/t0")
    (root / "outside/file").write_text("mine")
    np.save(root / "rows.npy", FEATURES)


@pytest.mark.usefixtures("_quick")
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
@given(
    foreign=st.lists(things, min_size=1, max_size=6),
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=3),
)
def test_what_is_not_ours_stays_as_it_is(
    template: Path, foreign: list[tuple[str, str, str, bool]], actions: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder).resolve()
        surrounded(template, root)
        patch.setattr(tempfile, "tempdir", str(root / "tmp"))
        patch.setenv("TMPDIR", str(root / "tmp"))
        patch.setenv("FEATSTORE_CACHE", str(root / "cache"))
        patch.setenv("HOME", str(root / "home"))
        mine = {}
        for place, name, kind, instead in foreign:
            path = root / "s" / place / name
            if not os.path.isdir(path.parent) or path.parent.resolve() != path.parent:
                if place.startswith("new") and not os.path.lexists(root / "s" / place):
                    path.parent.mkdir(parents=True)
                else:
                    continue
            if os.path.lexists(path):
                if not instead:
                    continue
                aside(path)
                mine = {p: v for p, v in mine.items() if p != str(path) and not p.startswith(f"{path}/")}
            put(path, kind, root / "outside")
            if kind != "lock" and os.path.lexists(path):  # an empty file may well be a lock
                mine[str(path)] = seen(str(path))
                if not path.is_symlink():
                    mine |= {p: v for p, v in listing(path).items() if kind != "store" or p.endswith("/mine")}
        around = {
            k: v
            for k, v in listing(root).items()
            if not k.startswith((f"{root}/s/", f"{root}/asked/t/", f"{root}/asked/parts"))
        }
        around.pop(f"{root}/asked/t", None)
        for name in actions:
            ACTIONS[name](root)
        there = listing(root)
        for path, value in mine.items():
            assert there.get(path) == value, (path, actions)
        now = {
            k: v
            for k, v in there.items()
            if not k.startswith((f"{root}/s/", f"{root}/asked/t/", f"{root}/asked/parts"))
        }
        now.pop(f"{root}/asked/t", None)
        assert now == around, actions


#: Commands that measure or train, and what they may write beside the store: nothing but what they are asked
#: to keep.
LONGER: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "bench": (("bench", "{s}", "--seconds", "0.02"), set()),
    "calibrate": (("calibrate", "{s}", "--seconds", "0.1"), {"cache/devices.json"}),
    "calibrate a directory": (("calibrate", "{root}", "--seconds", "0.1", "--dry-run"), set()),
    "tune": (
        ("tune", "{root}/graph", "--fanouts", 2, "--batch-size", 20, "--memory", "16MiB", "--seconds", 1,
         "--trials", 1, "--step-ms", 1),
        set(),
    ),
    "plan-memory": (("plan-memory", "{root}/graph"), set()),
    "completion": (("completion", "bash"), set()),
    "loader-costs": (
        ("loader-costs", "{root}/graph", "--fanouts", 2, "--batch-size", 20, "--memory", "16MiB",
         "--seconds", 1, "--share", 1),
        set(),
    ),
}  # fmt: skip
ELSEWHERE = {"demo"}  # tests/test_demo.py: it starts processes that train


def test_every_command_runs_here() -> None:
    """A new command needs its row."""
    longer = {str(arguments[0]) for arguments, _ in LONGER.values()}
    short = {"export", "gc", "inspect", "verify", "explain", "pack", "sample", "split"}
    assert short <= {name.split()[0] for name in ACTIONS}
    assert longer | short | ELSEWHERE == set(cli.list_commands(click.Context(cli)))


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("name", LONGER)
def test_longer(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What measures or trains leaves nothing, either. (A short name: workers' sockets lie below, and their
    paths may have 107 bytes.)"""
    import featstore.measure.calibrate

    real = featstore.measure.calibrate.measure
    monkeypatch.setattr(
        featstore.measure.calibrate, "measure", lambda *a, **k: real(*a, **k, data_bytes_min=4 << 20)
    )
    root = tmp_path / "root"
    surrounded(template, root)
    edges = np.random.default_rng(0).integers(0, ROWS, (2, 200))
    featstore.pack(root / "graph", FEATURES, graph=edges, topology=True).close()
    for place in ("s", "outside/s", "asked", "cache", "tmp", "."):
        (root / place / "notes.txt").write_text("mine")
        (root / place / ".featstore-calibrate-mine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root / "tmp"))
    monkeypatch.setenv("TMPDIR", str(root / "tmp"))
    monkeypatch.setenv("FEATSTORE_CACHE", str(root / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # which torch makes by itself
    arguments, kept = LONGER[name]
    before = listing(root)
    given = [str(a).format(root=root, s=root / "s", asked=root / "asked") for a in arguments]
    result = CliRunner().invoke(cli, given, prog_name="featstore")
    assert result.exit_code == 0, result.stderr
    after = {
        path: what
        for path, what in listing(root).items()
        if not any(f"{path}/".startswith(f"{root}/{one}/") for one in kept)
    }
    assert after == before
    assert all(os.path.lexists(root / one) for one in kept), "it did what it was asked for"


def test_a_demo_leaves_a_store_alone(template: Path, tmp_path: Path) -> None:
    surrounded(template, tmp_path)
    (tmp_path / "s").rename(tmp_path / "store")
    before = listing(tmp_path)
    for mode in ("online", "partitions"):
        result = CliRunner().invoke(cli, ["demo", "--mode", mode, "--workdir", str(tmp_path)])
        assert result.exit_code == 1
        assert "would write its own store there" in result.stderr
    assert listing(tmp_path) == before


def aside(path: Path) -> None:
    """Take away what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
