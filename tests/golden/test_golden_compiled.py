"""The compiled trace among the golden stores, read by featstore and by the reader that was written from the
specification alone."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import (
    GOLDEN,
    V1,
    VALIDATOR,
    _inner,
    _paths,
    _reseal,
    independent,
    make_golden,
    manifest_of,
    same,
)

import featstore
from featstore.engine import ENGINES
from featstore.errors import CorruptionError, FeatstoreError, FormatError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.trace.sample_decoder import decode

BASE, PACK = GOLDEN / "compiled", "compiled/packs/default"
TABLES = ("paper", "author")


def mini_batches() -> list[tuple[dict[str, np.ndarray[Any, Any]], Any]]:
    """What each mini-batch must be: rows by table, and the sample."""
    golden = make_golden.compiled()
    return [
        ({name: golden.tables[name][ids[name]] for name in TABLES}, sample) for ids, sample in golden.batches
    ]


def same_sample(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    assert found["number"] == wanted["number"]
    same(found["edges"], wanted["edges"])


def test_the_compiled_trace_is_awkward() -> None:
    """What it is for."""
    with featstore.open(BASE) as store, store.compiled() as compiled:
        assert set(store.tables) > set(compiled.entry.tables) == set(TABLES)
        assert store.tables["paper"].row_of_node() is not None
        for name in TABLES:
            limits = compiled.limits(name)
            assert min(limits.packed_rows, limits.shared_rows, limits.slots, limits.device_slots) > 0
            assert compiled.entry.forecast["tables"][name]["base_rows"] > 0
        assert compiled.pack.tables["paper.packed"].layout.chunks > 1
        assert (compiled.turn("paper") == -1).any()
        assert (compiled.turn("paper") != np.arange(compiled.limits("paper").slots)).any()
        assert compiled.entry.residency == "min"
        ids = [batch["paper"] for batch, _ in make_golden.compiled().batches]
        assert any(len(i) == 0 for i in ids)
        assert any(len(np.unique(i)) < len(i) for i in ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_featstore_reads_it(engine: str) -> None:
    pytest.importorskip("torch")
    with featstore.open(BASE) as store, store.compiled() as compiled:
        try:
            loader = CompiledLoader(compiled, engine=engine, device="cpu", tensors=True)
        except OSError:
            assert engine == "uring", "only io_uring may be missing"
            return
        with loader:
            for _ in range(3):
                for batch, (rows, sample) in zip(loader, mini_batches(), strict=True):
                    for name in TABLES:
                        same(batch.x[name].numpy(), rows[name])
                    same_sample(batch.sample, sample)


def test_the_independent_reader_assembles_it() -> None:
    base, pack = independent.Store(BASE), independent.Store(GOLDEN / PACK)
    assert pack.compiled["batches"] == len(mini_batches())
    for (found, sample), (rows, wanted) in zip(pack.mini_batches(base), mini_batches(), strict=True):
        assert found.keys() == rows.keys()
        for name in TABLES:
            same(found[name], rows[name])
        told: Any = decode(np.frombuffer(sample, np.uint8))
        assert told.keys() == {"featstore.n_id", "sample"}
        for name, ids in told["featstore.n_id"].items():
            same(make_golden.compiled().tables[name][ids], rows[name])
        same_sample(told["sample"], wanted)
    with pytest.raises(independent.Refused, match="another base store"):
        next(pack.mini_batches(independent.Store(GOLDEN / "order")))


def test_the_independent_reader_at_the_prompt(tmp_path: Path) -> None:
    command = [sys.executable, str(V1 / "reader.py")]
    done = subprocess.run([*command, str(BASE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiled trace default: 8 mini-batches" in done.stdout
    copied = Path(shutil.copytree(BASE, tmp_path / "compiled"))
    chunk = copied / "packs/default/g000001/tables/author.shared/rows/c.0.0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    done = subprocess.run([*command, str(copied)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "author.shared" in done.stderr


def test_verify() -> None:
    report = featstore.verify(GOLDEN / PACK)
    assert report.ok, report
    assert report.unlisted == ()
    assert report.files == len(manifest_of(PACK)["files"])
    assert featstore.verify(BASE).unlisted == ()


# What neither may accept.

_FILES = ["featstore.json", *(f["path"] for f in manifest_of(PACK)["files"])]


@settings(max_examples=15, deadline=None)
@given(file=st.sampled_from(_FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit(tmp_path_factory: pytest.TempPathFactory, file: str, where: float, bit: int) -> None:
    pack = Path(shutil.copytree(GOLDEN / PACK, tmp_path_factory.mktemp("flip") / "default"))
    data = bytearray((pack / file).read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    (pack / file).write_bytes(data)
    with pytest.raises((ValueError, KeyError, TypeError)):
        independent.Store(pack)
    shutil.rmtree(pack)


def test_schema_accepts_the_manifest() -> None:
    VALIDATOR.validate(manifest_of(PACK))


_AT = [
    p
    for p in _paths(manifest_of(PACK))
    if p[:1] == ("compiled",) and "forecast" not in p and "placement" not in p
]


@pytest.mark.parametrize("at", _AT, ids=str)
def test_unknown_and_missing_fields(at: tuple[Any, ...], tmp_path: Path) -> None:
    def refused(manifest: dict[str, Any]) -> None:
        assert not VALIDATOR.is_valid(manifest)
        (tmp_path / "featstore.json").write_text(json.dumps(manifest))
        with pytest.raises(FormatError):
            featstore.open(tmp_path)

    original = manifest_of(PACK)
    named = at == ("compiled", "tables")
    more = copy.deepcopy(original)
    _inner(more, at)["bad name" if named else "surplus"] = {}
    refused(more)
    for key in [] if named else sorted(_inner(original, at)):
        less = copy.deepcopy(original)
        del _inner(less, at)[key]
        refused(less)


_C, _PAPER = ("compiled",), ("compiled", "tables", "paper")
_WRONG = [
    (("reader_features",), []), (("reader_features",), ["compiled", "holes"]), (_C, []),
    ((*_C, "residency"), "lru"), ((*_C, "batches"), -1), ((*_C, "batches"), 8.5), ((*_C, "memory_bytes"), -1),
    ((*_C, "records"), 5), ((*_C, "offsets"), None), ((*_C, "forecast"), []), ((*_C, "base_uuid"), 7),
    ((*_C, "trace_uuid"), None), ((*_PAPER, "packed"), 3), ((*_PAPER, "turn"), []),
    ((*_PAPER, "base_rows"), -1), ((*_PAPER, "base_rows"), 2**41), ((*_PAPER, "batch_rows_max"), -1),
    ((*_PAPER, "placement"), "p"),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value"), _WRONG, ids=lambda v: str(v)[:60])
def test_wrong_values(at: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    manifest = manifest_of(PACK)
    _inner(manifest, at[:-1])[at[-1]] = value
    assert not VALIDATOR.is_valid(manifest)
    (tmp_path / "featstore.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError):
        featstore.open(tmp_path)


_RECORDS, _OFFSETS, _TURN = (
    f"g000001/{p}" for p in ("tables/records/rows/c.0", "arrays/offsets/c.0", "arrays/paper.turn/c.0")
)


@pytest.mark.parametrize(
    ("path", "dtype", "place", "value"),
    [
        (_OFFSETS, "<i8", 0, 64),
        (_OFFSETS, "<i8", 3, 0),
        (_OFFSETS, "<i8", -1, 0),
        (_TURN, "<i4", 0, 10**6),
        (_TURN, "<i4", 1, -2),
        (_TURN, "<i4", 2, None),
        (_RECORDS, "<i8", 0, 0),
        (_RECORDS, "<i8", 1, 8),
        (_RECORDS, "<i8", 2, -1),
        (_RECORDS, "<i8", 2, 2**62),
        (_RECORDS, "<i8", 3, 0),
        (_RECORDS, "<i8", 4, -1),
        (_RECORDS, "<i8", 5, 10**6),
        (_RECORDS, "<i8", 6, -1),
        (_RECORDS, "<i8", 8, 2**60),
        (_RECORDS, "<i4", 2 * 37, 10**6),
        (_RECORDS, "<i4", 2 * 37, -1),
        (_RECORDS, "<i4", 2 * 37 + 1, None),
    ],
)
def test_numbers_that_break_a_promise(
    tmp_path: Path, path: str, dtype: str, place: int, value: int | None
) -> None:
    """Every checksum fits; what the numbers say does not. ``value`` None: that of the element before."""
    base = Path(shutil.copytree(BASE, tmp_path / "compiled"))
    data = np.frombuffer((base / "packs/default" / path).read_bytes(), dtype).copy()
    data[place] = data[place - 1] if value is None else value
    _reseal(base / "packs/default", path, data.tobytes())
    with pytest.raises(ValueError):
        list(independent.Store(base / "packs/default").mini_batches(independent.Store(base)))
    with featstore.open(base) as store, pytest.raises((CorruptionError, FormatError)):
        read_all(store)


def read_all(store: featstore.Store) -> None:
    with store.compiled() as compiled, CompiledLoader(compiled, device="cpu") as loader:
        list(loader)


def test_what_the_independent_reader_follows_featstore_follows(tmp_path: Path) -> None:
    """Numbers of records set to others (not in samples, which one of them does not look into): what one of
    them refuses, the other one does not read as if it were right."""
    base = Path(shutil.copytree(BASE, tmp_path / "compiled"))
    good = np.frombuffer((base / "packs/default" / _RECORDS).read_bytes(), "<i4").copy()
    random, refused, independent_base = np.random.default_rng(0), 0, independent.Store(base)
    numbers = np.ones(len(good), bool)
    for begin in np.frombuffer((base / "packs/default" / _OFFSETS).read_bytes(), "<i8")[:-1] // 4:
        if begin + 6 <= len(good):
            _, at, size = good[begin : begin + 6].view("<i8") // 4
            numbers[begin + at : begin + at + size] = False
    for _ in range(30):
        data, place = good.copy(), int(random.choice(np.flatnonzero(numbers)))
        data[place] = random.choice([0, 1, -1, 500, good[place] + 1])
        _reseal(base / "packs/default", _RECORDS, data.tobytes())
        try:
            list(independent.Store(base / "packs/default").mini_batches(independent_base))
            sound = True
        except ValueError:
            sound, refused = False, refused + 1
        try:
            with featstore.open(base) as store:
                read_all(store)
        except FeatstoreError:
            assert not sound, place
    assert refused > 5


def test_the_reader_uses_nothing_of_featstore() -> None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", (V1 / "reader.py").read_text(), re.M))
    assert imported - set(sys.stdlib_module_names) == {"numpy"}
