"""Modes compiled and rolling of a split store, on one host: rows are gathered, and laid out as of one store.
The files are what the specification says, and budgets and limits are what is said to be enough."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
import featstore.compile.gather as gather
from featstore.compile.gather import Gathering
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CorruptionError,
    DiskFullError,
    FeatstoreWarning,
    FormatError,
    IdError,
    SourceError,
    StaleError,
)
from featstore.storage.disk import Disk
from featstore.trace.trace import Trace

PAPERS, AUTHORS = 900, 500
V1 = Path(__file__).parents[2] / "formats/v1"
MEMORY = "48MiB"


def two_tables(path: Path, pack: Any, *hosts: int) -> dict[str, np.ndarray[Any, Any]]:
    """A store of two tables of two types, of which one has a graph and is permuted, split; its rows."""
    rng = np.random.default_rng(3)
    rows = {
        "paper": rng.standard_normal((PAPERS, 17), np.float32),
        "author": rng.standard_normal((AUTHORS, 3)).astype(np.float16),
    }
    graph = rng.integers(0, PAPERS, (2, 9 * PAPERS))
    arrays = {"train": np.arange(0, PAPERS, 4), "label": np.arange(PAPERS) % 7}
    pack(
        path / "two",
        rows,
        graph={"paper": graph},
        arrays=arrays,
        order={"paper": "ldg"},
        partitions={"paper": 12},
    ).close()
    for count in hosts:
        featstore.split(path / "two", count, path / f"two{count}")
    for name, values in rows.items():
        np.save(path / f"{name}.npy", values)
    return rows


def asked(epoch: int = 0) -> list[tuple[dict[str, np.ndarray[Any, Any]], int]]:
    """Mini-batches over both tables, some ids twice, and samples that say their numbers."""
    made = []
    for number in range(9):
        rng = np.random.default_rng([epoch, number])
        made.append(
            ({"paper": rng.integers(0, PAPERS, 120), "author": rng.integers(0, AUTHORS // 2, 40)}, number)
        )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    return tmp_path_factory.mktemp("gathered")


@pytest.fixture(scope="module")
def rows(folder: Path, pack: Any) -> dict[str, np.ndarray[Any, Any]]:
    return two_tables(folder, pack, 1)


def check(batch: Any, rows: dict[str, np.ndarray[Any, Any]]) -> None:
    for name, values in rows.items():
        found = np.asarray(batch.x[name])
        assert found.dtype == values.dtype
        assert found.tobytes() == values[batch.n_id[name]].tobytes()


def smallest(store: Any, **options: Any) -> int:
    """The memory that works, as errors say."""
    memory = 100_000
    for _ in range(4):
        try:
            with store.loader(asked, memory=memory, **options) as loader:
                next(iter(loader))
        except BudgetError as error:
            assert error.given_bytes == memory < error.needed_bytes
            memory = error.needed_bytes
        else:
            break
    return memory


@pytest.mark.parametrize("options", [{}, {"disk": "0.9x"}, {"residency": "fixed", "recorded_epochs": 2}])
def test_rows_are_those_of_the_whole(folder: Path, rows: Any, options: dict[str, Any]) -> None:
    """Whatever lies where: laid out for mini-batches, in memory, or left in the gathered tables."""
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        memory = smallest(store, mode="compiled", name="a") if "disk" in options else MEMORY
        with store.loader(asked, memory=memory, mode="compiled", name="a", **options) as loader:
            for epoch in range(2):
                wanted = asked(epoch % options.get("recorded_epochs", 1))
                for batch, (ids, number) in zip(loader, wanted, strict=True):
                    check(batch, rows)
                    assert batch.sample == number
                    for name in rows:
                        assert (batch.n_id[name] == ids[name]).all()
            state = loader.state_dict()
        again = {key: options[key] for key in options if key == "recorded_epochs"}
        with store.loader(mode="compiled", name="a", reuse=True, memory=memory, **again) as loader:
            loader.load_state_dict(state)
            assert [batch.sample for batch in loader] == list(range(9))
        with store.compiled("a") as compiled:
            assert compiled.gathered
            left = [compiled.entry.forecast["tables"][n]["base_rows"] for n in rows]
            assert bool(sum(left)) == ("disk" in options)
            epochs = range(options.get("recorded_epochs", 1))
            wanted = np.concatenate([ids["paper"] for epoch in epochs for ids, _ in asked(epoch)])
            assert compiled.pack.tables["paper"].rows == len(np.unique(wanted)) < PAPERS


def test_the_files_are_what_is_specified(folder: Path, rows: Any) -> None:
    spec = importlib.util.spec_from_file_location("gathered_reader", V1 / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    independent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(independent)
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        store.loader(asked(), memory=MEMORY, mode="compiled", name="files", disk="1.5x").close()
        part = store.part.path
    path = part / "packs/files"
    jsonschema = pytest.importorskip("jsonschema")
    text = json.loads((path / "featstore.json").read_text())
    schema = jsonschema.Draft202012Validator(json.loads((V1 / "manifest.schema.json").read_text()))
    assert schema.is_valid(text)
    assert featstore.verify(path).ok
    base, pack = independent.Store(part), independent.Store(path)
    for (found, _), (ids, _) in zip(pack.mini_batches(base), asked(), strict=True):
        for name in rows:
            assert found[name].tobytes() == rows[name][ids[name]].tobytes()
    for changed in (
        {"reader_features": ["compiled"]},
        {"compiled": None},
        {"tables": {n: t for n, t in text["tables"].items() if n != "paper"}},
    ):
        other = {key: value for key, value in (text | changed).items() if value is not None}
        if "compiled" not in other or "paper" not in other["tables"]:
            assert schema.is_valid(other) == ("compiled" in other)
            with pytest.raises(FormatError, match="gathered"):
                _parsed(other)


def _parsed(manifest: dict[str, Any]) -> Any:
    from featstore.storage.manifest_reading import parse

    return parse(json.dumps(manifest).encode(), Path("it"))


def test_what_it_was_compiled_for_has_changed(folder: Path, tmp_path: Path, pack: Any) -> None:
    two_tables(tmp_path, pack, 1)
    with featstore.open_split(tmp_path / "two1", memory="16MiB") as store:
        store.loader(asked(), memory=MEMORY, mode="compiled", name="a").close()
    featstore.split(tmp_path / "two", 1, tmp_path / "two1", seed=5, overwrite=True)
    with featstore.open_split(tmp_path / "two1", memory="16MiB") as store, pytest.raises(StaleError):
        store.loader(mode="compiled", name="a", reuse=True, memory=MEMORY)


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_rows_of_many_chunk_files(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Of which the last is not full."""
    rows = np.random.default_rng(0).standard_normal((PAPERS, 100), np.float32)
    pack(tmp_path / "one", rows).close()
    featstore.split(tmp_path / "one", 1, tmp_path / "one1")
    batches = [ids["paper"] for ids, _ in asked()]
    monkeypatch.setattr("featstore.layout.table.CHUNK_BYTES", 16 * 1024)
    with (
        featstore.open_split(tmp_path / "one1", memory="16MiB") as store,
        store.loader(lambda epoch: batches, memory=MEMORY, mode=mode, name="many") as loader,
    ):
        for batch, ids in zip(loader, batches, strict=True):
            assert batch.x.tobytes() == rows[ids].tobytes()


@pytest.mark.parametrize("mode", ["compiled", "rolling"])
def test_the_memory_that_is_said_to_work_works(folder: Path, rows: Any, mode: str) -> None:
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        memory = smallest(store, mode=mode, name="small")
        with store.loader(asked, memory=memory, mode=mode, name="small") as loader:
            for batch in loader:
                check(batch, rows)


def test_gathering_takes_no_more_than_it_is_given(
    folder: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest memory, and with more, in one block or in many."""
    seen = []
    blocks = gather._blocks

    def counted(source: Any, table: Any, block_bytes: int) -> Any:
        seen.append((source._reader.budget.memory_bytes, block_bytes))
        return blocks(source, table, block_bytes)

    monkeypatch.setattr(gather, "_blocks", counted)
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        for memory in (5_000_000, 40_000_000):
            seen.clear()
            store.loader(asked(), memory=memory, mode="compiled", name="m").close()
            for reader_bytes, block_bytes in seen:
                assert reader_bytes + gather._BLOCKS * block_bytes <= memory


def test_limits_of_the_disk(folder: Path, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        packs = store.part.path / "packs"
        with pytest.raises(SourceError, match=r"disk= allows 9,000 bytes, but the rows .* once"):
            store.loader(asked(), memory=MEMORY, mode="compiled", name="d", disk=9000)
        monkeypatch.setattr(Disk, "free_bytes", lambda *_: 10_000)
        with pytest.raises(DiskFullError):
            store.loader(asked(), memory=MEMORY, mode="compiled", name="d")
        assert not (packs / "d").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CorruptionError("f", None, "a", "b")])
@pytest.mark.parametrize("where", ["_write", "_opened"])
def test_what_is_broken_off_leaves_nothing_that_is_taken_for_whole(
    folder: Path, rows: Any, error: BaseException, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of gathering, or when all is there."""

    def broken(*_: Any) -> Any:
        raise error

    name = f"{where}{type(error).__name__}"
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        monkeypatch.setattr(Gathering, where, broken)
        with pytest.raises(type(error)):
            store.loader(asked(), memory=MEMORY, mode="compiled", name=name)
        monkeypatch.undo()
        left = {path.name for path in (store.part.path / "packs").glob(f"{name}*")}
        assert left <= {f"{name}.trace"}  # what was recorded; it is recorded anew
        with store.loader(asked(), memory=MEMORY, mode="compiled", name=name) as loader:
            for batch in loader:
                check(batch, rows)


def test_rolling_removes_what_it_has_made(folder: Path, rows: Any) -> None:
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        with store.loader(asked, memory=MEMORY, mode="rolling", name="r", disk="6x") as loader:
            for epoch in range(4):
                for batch, (ids, _) in zip(loader, asked(epoch), strict=True):
                    check(batch, rows)
                    assert (batch.n_id["author"] == ids["author"]).all()
        assert not list((store.part.path / "packs").glob("r*"))


def test_wrong_calls_say_what_to_do(folder: Path, rows: Any, tmp_path: Path) -> None:
    with featstore.open_split(folder / "two1", memory="16MiB") as store:
        with pytest.raises(IdError, match="mini-batch 1 of the trace has node id 900"):
            store.loader(
                [{"paper": np.array([1])}, {"paper": np.array([900])}], memory=MEMORY, mode="compiled"
            )
        with (
            Trace.record([np.arange(9)], tmp_path / "t") as trace,
            pytest.raises(ArgumentError, match="dry_run="),
        ):
            featstore.compile_trace(store, trace, dry_run=True)
        with pytest.raises(ArgumentError, match="loader_costs"):
            store.loader_costs(seeds="train", fanouts=(2,))
        options = {"seeds": "train", "fanouts": (2,), "graph": "paper", "memory": MEMORY}
        with pytest.warns(FeatstoreWarning, match="disk= has no effect"):
            store.loader(disk="9x", **options).close()
        with store.loader(**options) as loader:
            assert loader.mode == "online"
            assert "ask for another mode" in loader.mode_because
