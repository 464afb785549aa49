"""A compiled trace serves the base store that it was made for, wherever that is, and no other; and nothing
that contradicts itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_support import Case, QuickDisk, make_case, placed, rows_of, skewed_batches

import featstore
from featstore.compile.placement import Location, Placement
from featstore.errors import CorruptionError, FeatstoreError, FormatError, IncompleteStoreError, StaleError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.storage.manifest import uuid_of

SIZES = {"paper": 200, "author": 90}
BASE, PACKED, SHARED = (int(c) for c in Location)
MIXED = placed(Placement(3, (BASE, SHARED, PACKED), 1, 0.5, PACKED))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A base store with the compiled trace ``default``. Not to be written to: take ``base``."""
    rows = {"paper": rows_of(200, (5,), np.float32, 1), "author": rows_of(90, (7,), np.uint8, 2)}
    made = make_case(tmp_path_factory.mktemp("whole"), rows, skewed_batches(SIZES, 5, 60, 3))
    made.compile(policy=MIXED, cache=600)
    return made


@pytest.fixture
def base(whole: Case, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.store.path, tmp_path / "copy"))


def go_through(case: Case, base: Path) -> None:
    with featstore.open(base) as store, store.compiled() as compiled, CompiledLoader(compiled) as loader:
        for _ in range(2):
            case.check(loader, range(5))


def pack(path: Path, case: Case, **options: Any) -> None:
    featstore.pack(
        path, dict(case.rows), disk=QuickDisk(), memory="64MiB", **({"order": "given"} | options)
    ).close()


def test_a_copy_elsewhere_works(whole: Case, base: Path) -> None:
    go_through(whole, base)
    moved = base.rename(base.parent / "moved")
    go_through(whole, moved)


def test_a_base_store_that_has_changed_is_refused(whole: Case, base: Path) -> None:
    changed = {name: rows.copy() for name, rows in whole.rows.items()}
    changed["author"][17, 3] ^= 1
    featstore.pack(base, changed, order="given", overwrite=True, disk=QuickDisk(), memory="64MiB").close()
    with (
        featstore.open(base) as store,
        pytest.raises(StaleError, match=r"compile the trace again with --overwrite"),
    ):
        store.compiled()
    with featstore.open(base) as store:
        featstore.compile_trace(
            store, whole.trace, memory="16MiB", overwrite=True, disk_door=QuickDisk()
        ).close()
        with store.compiled() as compiled, CompiledLoader(compiled) as loader:
            for number, batch in enumerate(loader):
                for name, ids in whole.batches[number].items():
                    assert batch.x[name].tobytes() == changed[name][ids].tobytes()


def test_another_order_or_seed_of_the_same_rows_is_another_store(whole: Case, base: Path) -> None:
    shutil.rmtree(base / "packs", ignore_errors=True)
    random = np.random.default_rng(0)
    other = base.parent / "other"
    pack(
        other,
        whole,
        order="permutation",
        permutation={name: random.permutation(n) for name, n in SIZES.items()},
    )
    shutil.copytree(whole.store.path / "packs", other / "packs")
    with featstore.open(other) as store, pytest.raises(StaleError):
        store.compiled()


def test_the_same_rows_packed_anew_are_the_same_store(whole: Case, tmp_path: Path) -> None:
    pack(tmp_path / "again", whole)
    shutil.copytree(whole.store.path / "packs", tmp_path / "again/packs")
    go_through(whole, tmp_path / "again")


def test_an_open_compiled_trace_outlives_a_new_base_store(whole: Case, base: Path) -> None:
    """It holds both generations; only who comes later is refused."""
    with featstore.open(base) as store, store.compiled() as compiled, CompiledLoader(compiled) as loader:
        walk = iter(loader)
        whole.check_batch(next(walk), 0)
        featstore.pack(
            base,
            {n: r[::-1].copy() for n, r in whole.rows.items()},
            order="given",
            overwrite=True,
            memory="64MiB",
        ).close()
        whole.check(walk, range(1, 5))
        whole.check(loader, range(5))
        with CompiledLoader(compiled) as late:
            whole.check(late, range(5))
    with featstore.open(base) as store, pytest.raises(StaleError):
        store.compiled()


@pytest.fixture
def read_only(base: Path) -> Iterator[Path]:
    paths = [base, *base.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield base
    for path in paths:
        path.chmod(0o755)


def as_nobody(work: Callable[[], None]) -> int:
    """The exit code of a child that does this without the superuser's rights, for whom nothing is
    read-only."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_read_only_directory_can_be_trained_from(whole: Case, read_only: Path) -> None:
    for parent in read_only.parents:
        if parent.owner() == Path.home().owner() and parent != Path("/") and len(parent.parts) > 2:
            parent.chmod(parent.stat().st_mode | 0o055)
    go_through(whole, read_only)

    def work() -> None:
        os.environ["FEATSTORE_CACHE"] = str(read_only)
        assert not os.access(read_only, os.W_OK)
        go_through(whole, read_only)
        with featstore.open(read_only) as store, pytest.raises(FeatstoreError, match="Permission denied"):
            featstore.compile_trace(store, whole.trace, "other", memory="16MiB")

    assert as_nobody(work) == 0


# Names and places.


def test_what_is_no_compiled_trace_is_named(whole: Case, base: Path) -> None:
    with featstore.open(base) as store:
        with pytest.raises(IncompleteStoreError, match=r"has no compiled trace 'train'; it has 'default'"):
            store.compiled("train")
        pack(base / "packs/plain", whole)
        with pytest.raises(FormatError, match="holds no compiled trace"):
            store.compiled("plain")
        (base / "packs/empty").mkdir()
        with pytest.raises(IncompleteStoreError, match=r"no featstore|not a featstore"):
            store.compiled("empty")


# A manifest that was tampered with, sealed anew so that its uuid fits.


def sealed(base: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = base / "packs/default/featstore.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    path.write_bytes(text.replace(manifest["uuid"].encode(), uuid_of(text, manifest["uuid"]).encode(), 1))


def put(*at: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        inner = manifest
        for step in at[:-1]:
            inner = inner[step]
        if to is KeyError:
            del inner[at[-1]]
        else:
            inner[at[-1]] = to

    return change


_C = "compiled"
_PAPER = (_C, "tables", "paper")
MUTATIONS: list[tuple[tuple[Any, ...], Any]] = [
    (("reader_features",), []), (("reader_features",), ["compiled", "holes"]), ((_C,), 5),
    ((_C, "surplus"), 1), ((_C, "residency"), "lru"), ((_C, "batches"), -1), ((_C, "batches"), 6),
    ((_C, "batches"), 2**62), ((_C, "batches"), 4.5), ((_C, "memory_bytes"), -1),
    ((_C, "memory_bytes"), "1GiB"), ((_C, "records"), "paper.packed"), ((_C, "records"), "nothing"),
    ((_C, "records"), "../records"), ((_C, "offsets"), "paper.turn"), ((_C, "offsets"), ""),
    ((_C, "tables"), []), ((*_PAPER, "packed"), "author.packed"), ((*_PAPER, "shared"), "records"),
    ((*_PAPER, "resident"), "author.resident"), ((*_PAPER, "device"), KeyError),
    ((*_PAPER, "turn"), "author.turn"), ((*_PAPER, "turn"), "offsets"), ((*_PAPER, "base_rows"), -1),
    ((*_PAPER, "base_rows"), 199), ((*_PAPER, "base_rows"), 2**41), ((*_PAPER, "batch_rows_max"), -1),
    ((*_PAPER, "batch_rows_max"), None), ((*_PAPER, "batch_rows_max"), 0), ((*_PAPER, "batch_rows_max"), 7),
    ((*_PAPER, "placement"), []), ((_C, "base_uuid"), None), ((_C, "forecast"), None),
    ((_C, "trace_uuid"), KeyError), ((_C, "tables", "../x"), {}), ((_C, "tables", "paper"), KeyError),
    (("tables", "paper.packed"), KeyError),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value"), MUTATIONS, ids=lambda v: str(v)[:50])
def test_a_manifest_that_contradicts_itself_is_refused(base: Path, at: tuple[Any, ...], value: Any) -> None:
    sealed(base, put(*at, to=value))
    with featstore.open(base) as store, pytest.raises((FormatError, CorruptionError)):
        go_and_close(store)


def go_and_close(store: featstore.Store) -> None:
    with store.compiled() as compiled, CompiledLoader(compiled) as loader:
        list(loader)


def test_another_base_uuid_is_stale(base: Path) -> None:
    sealed(base, put(_C, "base_uuid", to="00000000-0000-8000-8000-000000000000"))
    with featstore.open(base) as store, pytest.raises(StaleError, match="00000000"):
        store.compiled()


def test_a_change_without_a_new_uuid_is_refused(base: Path) -> None:
    path = base / "packs/default/featstore.json"
    path.write_text(path.read_text().replace('"residency": "min"', '"residency": "fixed"'))
    with featstore.open(base) as store, pytest.raises(FormatError, match="uuid"):
        store.compiled()


@pytest.mark.parametrize(
    "forecast", [{}, {"tables": {}}, {"tables": {"paper": {}}, "seconds": "soon"}, {"tables": 7}]
)
def test_the_forecast_is_advice(whole: Case, base: Path, forecast: Any) -> None:
    """Nothing that a reader does may depend on it."""
    sealed(base, put(_C, "forecast", to=forecast))
    go_through(whole, base)
    with featstore.open(base) as store, store.compiled() as compiled, CompiledLoader(compiled) as loader:
        list(loader)
        assert loader.report().batches == 5


def test_rows_of_the_base_store_where_none_were_announced_are_refused(base: Path) -> None:
    for table in SIZES:
        sealed(base, put(_C, "forecast", "tables", table, "base_rows", to=0))
    with featstore.open(base) as store, pytest.raises(CorruptionError, match="no rows of the base store"):
        go_and_close(store)


# Numbers that make no sense, with all checksums right.


def resealed(base: Path, path: str, data: bytes) -> None:
    """Replace a file of the compiled trace so that every checksum fits."""
    from featstore.base.checksum import crc_pages, digest_of_checksums

    root = base / "packs/default"
    manifest = json.loads((root / "featstore.json").read_text())

    def write(path: str, data: bytes) -> None:
        (root / path).write_bytes(data)
        entry = next(f for f in manifest["files"] if f["path"] == path)
        assert entry["bytes"] == len(data)
        entry["digest"] = digest_of_checksums(crc_pages(np.frombuffer(data, np.uint8)))

    write(path, data)
    folder = path.rpartition("/")[0]
    if folder.endswith("/rows"):
        sums = crc_pages(np.frombuffer(data, np.uint8))
        write(f"{folder.removesuffix('/rows')}/page_checksums/c.0", sums.astype("<u4").tobytes())
    sealed(base, lambda m: m.update(files=manifest["files"]))


def numbers(base: Path, path: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer((base / "packs/default" / path).read_bytes(), dtype).copy()


@pytest.mark.parametrize("value", [-2, 10**6, 2**31 - 1, "twice"])
def test_a_turn_that_points_nowhere_is_refused(base: Path, value: Any) -> None:
    path = "g000001/arrays/paper.turn/c.0"
    turn = numbers(base, path, "<i4")
    known = np.flatnonzero(turn >= 0)
    turn[known[0]] = turn[known[1]] if value == "twice" else value
    resealed(base, path, turn.tobytes())
    with featstore.open(base) as store, pytest.raises(FormatError, match="turn"):
        go_and_close(store)


@pytest.mark.parametrize("change", [(0, 8), (-1, -64), (2, -(2**40)), (1, 10**6)])
def test_offsets_of_records_that_point_nowhere_are_refused(base: Path, change: tuple[int, int]) -> None:
    path = "g000001/arrays/offsets/c.0"
    offsets = numbers(base, path, "<i8")
    offsets[change[0]] += change[1]
    resealed(base, path, offsets.tobytes())
    with featstore.open(base) as store, pytest.raises(FormatError, match="offsets"):
        go_and_close(store)


def test_records_of_any_nonsense_are_refused_and_never_obeyed(whole: Case, base: Path) -> None:
    """Every number in the head of a record, and many elsewhere, set to others: an error, or rows that are
    right all the same."""
    path = "g000001/tables/records/rows/c.0"
    good = numbers(base, path, "<u1")
    offsets = numbers(base, "g000001/arrays/offsets/c.0", "<i8")
    random = np.random.default_rng(0)
    head = int(offsets[2])
    places = [(head + 8 * i, "<i8") for i in range(3 + 17 * 2)]
    places += [
        (int(head + 8 * 37 + 4 * k), "<i4") for k in random.integers(0, (offsets[3] - head - 8 * 37) // 4, 40)
    ]
    refused = 0
    for number, (place, dtype) in enumerate(places):
        size = np.dtype(dtype).itemsize
        bad = good.copy()
        values = bad[place : place + size].view(dtype)
        values[0] = [values[0] + 1, values[0] - 1, -1, 2**31 - 1, 2**62 if size == 8 else -(2**31), 0][
            number % 6
        ]
        resealed(base, path, bad.tobytes())
        try:
            with (
                featstore.open(base) as store,
                store.compiled() as compiled,
                CompiledLoader(compiled) as loader,
            ):
                for batch in loader:
                    assert set(batch.x) == set(SIZES)
        except FeatstoreError:
            refused += 1
    assert refused > 30
