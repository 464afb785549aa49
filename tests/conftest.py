"""What all tests share: isolation from the user's calibration, small chunk files, and small stores to
read."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import TemporaryFolders, memory_folder
from hypothesis import HealthCheck, settings

import featstore
import featstore.layout.table
from featstore.base.threads import closed_later
from featstore.engine import ENGINES
from featstore.storage.disk import Disk, File

# Until all tests are known: what is imported is no garbage, and looking for it takes a fifth of the time.
gc.disable()

# Tests start many programs that import PyTorch: without bytecode that takes twice as long, and PyG thrice.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests run in parallel as it is: threads of torch, here and in what tests start, would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_ROOT = Path(__file__).resolve().parents[1]
_CHILDREN = str(Path(__file__).parent / "children")
_paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if _CHILDREN not in _paths:  # a worker has it of who started it
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *_paths])

settings.register_profile(
    "featstore",
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("featstore")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background so
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Tests that are about files on a device, where fsync waits for it as ever; or that install programs.
WAITING = ("engine", "measure", "storage", "test_demo.py", "test_files.py", "test_packages.py")
_fsync, _fstat = os.fsync, os.fstat
_waits = True


def fsync_unless_quick(descriptor: int) -> None:
    """fsync, or only what it says of descriptors that are none: no test cuts the power, those of crashes
    record what is asked of the disk, and where other programs write, each waits for all that they have
    written."""
    if _waits:
        _fsync(descriptor)
    else:
        _fstat(descriptor)


os.fsync = fsync_unless_quick


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``: more workers than cores, as many tests wait for a disk, a timeout or other programs."""
    return max(2, 2 * len(os.sched_getaffinity(0)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-disk", action="store_true", help="no temporary folders in memory")
    parser.addoption("--thorough", action="store_true", help="also what is marked so")


#: Files that take longest, or wait longest, for a worker. All others take seconds. The first worker compiles
#: kernels that most others would wait for, but for the next three.
LONG = (
    "test_examples.py", "docs/test_types_of_users.py", "docs/test_site.py", "test_packages.py",
    "hosts/test_faults.py", "crash/test_pack_crash.py", "hosts/test_split_training.py", "fuzz/test_fuzz.py",
    "properties/test_outside.py", "hosts/test_modes.py",
    "tiers/test_chosen.py", "faults/test_refusals.py", "packing/test_split.py",
    "base/test_compilation.py", "cli/test_cli_split.py", "compiled/test_segments.py",
    "adapters/test_pyg.py", "online/test_little_memory.py", "test_interrupts.py",
    "loaders/test_training.py", "compiled/test_compile_crash.py", "cli/test_cli_tune.py",
    "hosts/test_exchange.py", "arguments/test_arguments.py", "docs/test_notebooks.py", "test_demo.py",
    "packing/test_split_features.py", "properties/test_typed_modes.py", "hosts/test_hosts_memory.py",
    "online/test_online_memory.py", "mega/test_mega_memory.py",
)  # fmt: skip


#: Where each case of a product of parameters is tried: what engines, files and faults do hangs on them all.
EVERY_CASE = (
    "engine/", "storage/", "faults/test_read_errors.py", "properties/test_roundtrip.py", "golden/",
)  # fmt: skip

#: Which cases are left out changes from hour to hour; a run is repeated by the number that it says.
TURN = int(os.environ.setdefault("TEST_TURN", str(int(time.time() // 3600))))  # the same in all workers

#: Tests of many cases that are much alike, and take a second of a core each: half of them are tried.
MUCH_ALIKE = {
    "test_they_are_the_same_and_sampled_once", "test_what_is_written_must_pay", "test_another_memory_goes_on",
    "test_they_are_those_of_the_whole_store", "test_split_topology_gives_what_the_whole_gives",
    "test_the_choice_is_near_the_best_of_a_full_simulation", "test_their_number_is_known_beforehand",
    "test_equals_the_sampler_in_memory", "test_resumed_anywhere_the_rest_is_the_same", "test_what_is_in_them",
    "test_equal_seeds_give_equal_batches", "test_copies_of_all_types_have_one_limit",
    "test_each_is_where_its_target_is", "test_graphs_that_do_not_fit_are_sampled_from_disk",
    "test_owners_of_more_nodes_than_are_counted_together", "test_rows_of_any_size",
    "test_close_to_brute_force_and_never_above_the_paper", "test_the_budget_that_the_error_names_works",
    "test_no_mini_batch_is_larger_than_the_budget_says",
}  # fmt: skip


#: Tests that take seconds, by file and name, the longest first: where all tests are run, each has its turn
#: once in so many hours.
TURNS = 7
LONG_TESTS = Path(__file__).with_name("long_tests.txt").read_text().split()


def pytest_report_header() -> str:
    return f"TEST_TURN={TURN} says which of many cases, and of long tests, are tried; --thorough tries all"


def pytest_configure(config: pytest.Config) -> None:
    """xdist begins the files of most tests first, and would leave those to the end that take a minute for
    one."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that at the end no worker waits for another; what is marked thorough, and all
    examples of properties, only where it is asked for."""
    if not config.getoption("--thorough"):
        left_out = pytest.mark.skip(reason="much the same as another, and long: --thorough")
        by_test: dict[str, list[pytest.Item]] = {}
        named = config.option.keyword or config.option.markexpr
        if not named and [Path(one).resolve() for one in config.args] == [Path(__file__).parent]:
            another_hour = pytest.mark.skip(
                reason="long, and of another hour's run: --thorough, or name its file"
            )
            left = {name for place, name in enumerate(LONG_TESTS) if place % TURNS != TURN % TURNS}
            for item in items:
                if name_of(item) in left:
                    item.add_marker(another_hour)
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(left_out)
            elif hasattr(item, "callspec"):
                by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for name, cases in by_test.items():
            if any("::" in argument for argument in config.args):
                break  # whoever names a test means all of it
            for item in set(cases) - set(some_of(name, cases)):
                item.add_marker(left_out)
        tests = [getattr(item, "obj", None) for item in items]
        for test in {getattr(test, "__func__", test) for test in tests}:
            try_fewer(test)
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
    gc.enable()


def name_of(item: pytest.Item) -> str:
    """A test's file and name, whatever its case."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    return f"{file}::{getattr(item, 'originalname', None) or item.name}"


def some_of(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test's cases those that are tried: of a product of parameters as many as have each value once; of
    cases that are much alike half."""
    path = name.partition("::")[0].removeprefix("tests/")
    found = cases if path.startswith(EVERY_CASE) else []
    if not found:
        values = {item: set(enumerate(item.callspec._idlist)) for item in cases}  # type: ignore[attr-defined]
        order = random.Random(f"{TURN} {name}").sample(cases, len(cases))
        left: set[tuple[int, str]] = set().union(*values.values())
        while left:
            found.append(most := max(order, key=lambda item: len(values[item] & left)))
            left -= values[most]
    if getattr(cases[0], "originalname", None) in MUCH_ALIKE and len(found) > 1:
        half = TURN // TURNS % 2
        found = [item for number, item in enumerate(found) if number % 2 == half]
    return found


def try_fewer(test: object) -> None:
    """A third of the examples of a property: each run draws others."""
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > 3:
        test._hypothesis_internal_use_settings = settings(own, max_examples=(own.max_examples + 2) // 3)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _waits
    _waits = item.path.relative_to(Path(__file__).parent).parts[0] in WAITING


@pytest.fixture(autouse=True, scope="module")
def _collections_look_at_what_is_new() -> None:
    """A full collection looks at all that has been imported, a second each time: from here on it passes that
    over, and what earlier files have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tmp_path_factory(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[TemporaryFolders]:
    """In memory, unless a test is about files on a device."""
    memory = None if pytestconfig.getoption("--on-disk") else memory_folder()
    yield TemporaryFolders(tmp_path_factory, memory, lambda: _waits)
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)  # threads may still write, which end with the process


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: TemporaryFolders) -> Path:
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])


#: Chunk files of this size make tables of many chunks out of little data.
SMALL_CHUNK_BYTES = 16 * 1024

PackSmall = Callable[..., "featstore.Store"]


@pytest.fixture(autouse=True, scope="session")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that tests start import what is tested, also where that is installed: not the sources from
    the folder where they start, nor from where modules of benchmarks look first. (Each would compile its
    kernels anew.)"""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    if Path(featstore.__file__).parents[1] != _ROOT:
        sys.path[:] = [path for path in sys.path if path != str(_ROOT)]
    yield
    os.chdir(before)


@pytest.fixture(autouse=True, scope="session")
def _what_is_dropped_is_closed() -> None:
    """The thread that does so is there from the start, for tests that count threads."""
    closed_later()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans must not depend on what this machine's user has calibrated."""
    patch = pytest.MonkeyPatch()
    for name in ("FEATSTORE_ENGINE", "FEATSTORE_MEMORY"):
        patch.delenv(name, raising=False)
    patch.setenv("FEATSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _little_is_written_to_measure() -> Iterator[None]:
    """A calibration packs stores of these sizes in turns: half a gigabyte each time, as they are."""
    import featstore.measure.calibrate

    patch = pytest.MonkeyPatch()
    patch.setattr(featstore.measure.calibrate, "WRITTEN_BYTES", (1 << 20, 5 << 20))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _prices_are_measured_in_a_moment() -> Iterator[None]:
    """What a read costs is measured for a second, where a forecast is to come true; no test asks that."""
    import featstore.loaders.costs.prices as prices

    patch = pytest.MonkeyPatch()
    shorter = {"_ROUND_SECONDS": 0.005, "_SETTLING_SECONDS": 0.01, "_SETTLING_SECONDS_MAX": 0.05}
    for name, seconds in shorter.items():
        patch.setattr(prices, name, seconds)
    yield
    patch.undo()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of this test cut tables into chunk files of about 16 KiB."""
    monkeypatch.setattr(featstore.layout.table, "CHUNK_BYTES", SMALL_CHUNK_BYTES)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine's name in turn."""
    return str(request.param)


def rows_of(rows: int, width: int = 100, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [rows, width] of normal numbers."""
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32)


class QuickDisk(Disk):
    """The real disk without durability, for tests that are not about crashes."""

    def fsync(self, file: File) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


@pytest.fixture(scope="session")
def pack() -> PackSmall:
    """featstore.pack on a disk that does not wait."""
    return functools.partial(featstore.pack, disk=QuickDisk())


@pytest.fixture(scope="session")
def features() -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [1000, 100]: rows of 400 B, which straddle pages. Not to be written to."""
    made = rows_of(1000)
    made.flags.writeable = False
    return made


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, pack: PackSmall, features: Any) -> Path:
    """A store of ``features`` in four chunk files of 256 rows, permuted. Not to be written to: take
    ``own``."""
    path = tmp_path_factory.mktemp("packed") / "store"
    permutation = np.random.default_rng(1).permutation(len(features))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(featstore.layout.table, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
        pack(path, features, order="permutation", permutation=permutation).close()
    return path


@pytest.fixture
def store(packed: Path) -> Iterator[featstore.Store]:
    """The store of ``features``, open."""
    with featstore.open(packed) as opened:
        yield opened


@pytest.fixture
def own(packed: Path, tmp_path: Path) -> Path:
    """A copy of ``packed`` to spoil."""
    return Path(shutil.copytree(packed, tmp_path / "own", symlinks=True))
