"""Stores, traces and caches from strangers, whose digests and uuid fit: an error that says what is wrong,
never a crash, never wrong rows, and no more memory than what is there asks for. What the fuzzer (tests/fuzz)
has found, and what it should find."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BudgetError, CorruptionError, FeatstoreError, FormatError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.mega.sets import PartitionSets
from featstore.storage.manifest import MANIFEST_NAME, uuid_of
from featstore.storage.manifest_reading import parse
from featstore.trace import log_format as layout

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import corpus
from mutants import StoreMutant
from processes import in_child

WRAPPING = [2**62, -(2**62) - 2**61]  # the difference is 2**62 + 2**61: it wraps around, and is not negative


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.make(folder)
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "own"))


@pytest.fixture
def mutant(own: Path) -> StoreMutant:
    return StoreMutant(own / corpus.STORE)


def refused(use: Callable[[], Any], message: str, kind: type[FeatstoreError] = FormatError) -> None:
    """``use`` raises such an error, in a child: it might die of what it reads."""

    def work() -> bool:
        with pytest.raises(kind, match=message):
            use()
        return True

    assert in_child(work) == 0


def opened(path: Path, use: Callable[[featstore.Store], Any]) -> Callable[[], Any]:
    def work() -> Any:
        with featstore.open(path) as store:
            return use(store)

    return work


def sampled(store: featstore.Store) -> None:
    with store.sampler([4, 4], memory="8MiB") as sampler:
        sampler.sample(np.arange(40))


def mega(store: featstore.Store) -> None:
    with PartitionSets(store, memory="40MiB", resident=2) as batches:
        list(batches)


def proximity(store: featstore.Store) -> None:
    list(featstore.ProximityOrder(store, np.arange(corpus.ROWS), batch_size=16, sequences=4))


def rows_read(store: featstore.Store) -> None:
    with store.reader(memory="6MiB", tables=["features"], static=None) as reader:
        reader.read(np.arange(corpus.ROWS))


GRAPH_USES = [lambda store: store.graphs["features"].csc(), sampled, mega, proximity]
TABLE = ("tables", "features")


# Offsets.


@pytest.mark.parametrize("use", GRAPH_USES)
def test_offsets_of_a_graph_that_wrap_around(mutant: StoreMutant, use: Callable[..., Any]) -> None:
    at = ("graphs", "features", "offsets")
    offsets = mutant.rows(at).view("<i8").copy()
    offsets[100:102] = WRAPPING
    mutant.set_rows(at, offsets)
    mutant.seal()
    refused(
        opened(mutant.path, use), "the offsets of .*do not run from .* falls from 4,611,686,018,427,387,904"
    )


def test_partition_offsets_that_wrap_around(mutant: StoreMutant) -> None:
    offsets = np.array([0, *WRAPPING, corpus.ROWS], np.int64)
    mutant.set_array((*TABLE, "order", "partition_offsets"), offsets)
    mutant.seal()
    for use in (
        mega,
        lambda store: store.tables["features"].partition_offsets,
        lambda store: featstore.PartitionOrder(store, np.arange(9), batch_size=4, sequences=1),
    ):
        refused(opened(mutant.path, use), f"do not run from 0 to {corpus.ROWS}")
    assert any(problem.what == "map" for problem in featstore.verify(mutant.path).problems)


def test_offsets_of_hubs_that_wrap_around(mutant: StoreMutant) -> None:
    at = ("graphs", "features", "hubs", "offsets")
    offsets = mutant.read(mutant.document["graphs"]["features"]["hubs"]["offsets"]).copy()
    offsets[3:5] = WRAPPING
    mutant.set_array(at, offsets)
    mutant.seal()
    for use in (mega, lambda store: store.graphs["features"].hub_rows()):
        refused(opened(mutant.path, use), "offsets of the hubs")
    problems = featstore.verify(mutant.path).problems
    assert [problem.what for problem in problems] == ["graph"]


@pytest.mark.parametrize("name", corpus.PACKS)
def test_offsets_of_records_that_wrap_around(own: Path, name: str) -> None:
    pack = StoreMutant(own / corpus.BASE / "packs" / name)
    offsets = pack.read(pack.document["arrays"]["offsets"]).copy()
    offsets[3:5] = WRAPPING
    pack.set_array(("arrays", "offsets"), offsets)
    pack.seal()
    refused(
        opened(own / corpus.BASE, lambda store: CompiledLoader(store.compiled(name))),
        "offsets of the records",
    )


def test_a_turn_that_gives_a_slot_twice(own: Path) -> None:
    pack = StoreMutant(own / corpus.BASE / "packs/moving")
    for bad in (0, 20, -2):
        pack.set_array(("arrays", "features.turn"), np.array([0, bad, *range(2, 20)], np.int32))
        pack.seal()
        refused(
            opened(own / corpus.BASE, lambda store: CompiledLoader(store.compiled("moving"))),
            "the turn of table",
        )


# Maps.


@pytest.mark.parametrize("use", [rows_read, *GRAPH_USES])
def test_a_map_that_gives_two_nodes_one_row(mutant: StoreMutant, use: Callable[..., Any]) -> None:
    at = (*TABLE, "order", "row_of_node")
    rows = mutant.read(mutant.document["tables"]["features"]["order"]["row_of_node"]).copy()
    rows[17] = rows[3]
    mutant.set_array(at, rows)
    mutant.seal()
    refused(opened(mutant.path, use), "row_of_node.*(twice|belong together)")


@pytest.mark.parametrize("use", [sampled, mega, lambda store: store.graphs["features"].csc()])
def test_maps_that_are_not_each_others_inverse(mutant: StoreMutant, use: Callable[..., Any]) -> None:
    at = (*TABLE, "order", "node_of_row")
    nodes = mutant.read(mutant.document["tables"]["features"]["order"]["node_of_row"]).copy()
    nodes[[4, 9]] = nodes[[9, 4]]
    mutant.set_array(at, nodes)
    mutant.seal()
    refused(
        opened(mutant.path, use), "row_of_node and node_of_row of table 'features' .* do not belong together"
    )


def test_degrees_with_a_row_twice(mutant: StoreMutant) -> None:
    at = (*TABLE, "order", "rows_by_degree")
    rows = mutant.read(mutant.document["tables"]["features"]["order"]["rows_by_degree"]).copy()
    rows[2] = rows[1]
    mutant.set_array(at, rows)
    mutant.seal()
    for use in (
        lambda store: store.tables["features"].rows_by_degree(10),
        lambda store: store.reader(memory="6MiB", static="degree", tables=["features"]),
    ):
        refused(opened(mutant.path, use), "rows_by_degree of table 'features' .* twice")


# Sizes.


def sparse(mutant: StoreMutant, relative: str, size: int) -> None:
    """A file of that size which takes no room, listed."""
    mutant.write(relative, b"")
    path = mutant.path / relative
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("no file system for files of 4 TiB")
    next(f for f in mutant.document["files"] if f["path"] == relative)["bytes"] = size


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20


@pytest.mark.usefixtures("little_memory")
def test_more_partitions_than_there_can_be(mutant: StoreMutant) -> None:
    entry = mutant.document["tables"]["features"]["order"]["partition_offsets"]
    sparse(mutant, entry["path"] + "/c.0", 8 * 2**39)
    entry["shape"] = [2**39]
    mutant.seal()
    with pytest.raises(FormatError, match=r"partition offsets have the impossible shape \[549755813888\]"):
        featstore.open(mutant.path)


@pytest.mark.usefixtures("little_memory")
def test_arrays_and_graphs_that_no_memory_holds(mutant: StoreMutant) -> None:
    mutant.document["arrays"]["labels"]["shape"] = [2**39]
    sparse(mutant, "g000001/arrays/labels/c.0", 8 * 2**39)
    graph, edges = mutant.document["graphs"]["features"], 2**39
    graph["edges"] = graph["sources"]["rows"] = graph["sources"]["rows_per_chunk"] = edges
    graph["sources"]["page_checksums"]["shape"] = [edges // 1024]
    sparse(mutant, graph["sources"]["path"] + "/c.0", 4 * edges)
    sparse(mutant, graph["sources"]["page_checksums"]["path"] + "/c.0", edges // 256)
    mutant.seal()
    with featstore.open(mutant.path) as store:
        with pytest.raises(BudgetError, match=r"load the array .*labels"):
            store.arrays["labels"]
        with pytest.raises(BudgetError, match="load the sources of graph 'features'"):
            store.graphs["features"].csc()
        with pytest.raises(BudgetError):
            store.reader(memory="64MiB", tables=["features/sources"])
        assert len(store.arrays["train"]) == 60


@pytest.mark.parametrize("shape", [[2**47, 2**47], [2**47, 2**47, 0], [0, 2**48, 2]])
def test_shapes_that_no_array_has(mutant: StoreMutant, shape: list[int]) -> None:
    mutant.document["arrays"]["labels"]["shape"] = shape
    mutant.seal()
    with pytest.raises(FormatError, match=f"the impossible shape \\[{shape[0]}, {shape[1]}"):
        featstore.open(mutant.path)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("field", ["provenance", "reader_features", "files", "arrays"])
def test_a_long_manifest_of_little_lists(own: Path, field: str) -> None:
    document = json.loads((own / corpus.STORE / MANIFEST_NAME).read_bytes())
    document[field] = "HERE"
    little = "[" + ",".join(["[]"] * (7 * 2**20)) + "]"
    text = (
        json.dumps(document)
        .replace('"HERE"', f'{{"a":{little}}}' if field in ("provenance", "arrays") else little)
        .encode()
    )
    del little
    assert len(text) > 20 * 2**20
    with pytest.raises(FormatError, match=r"cannot be|malformed"):
        parse(text, Path("featstore.json"))


def test_a_long_list_of_files_takes_memory_by_its_length(own: Path) -> None:
    document = json.loads((own / corpus.STORE / MANIFEST_NAME).read_bytes())
    more = [{"path": f"g000001/{k:x}", "bytes": k, "digest": f"{k:064x}"} for k in range(20_000)]
    document["files"] += more
    document["uuid"] = ""
    document["uuid"] = uuid_of(json.dumps(document).encode(), "")
    text = json.dumps(document).encode()
    tracemalloc.start()
    manifest = parse(text, Path("featstore.json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(manifest.files) == len(document["files"])
    assert peak < 8 * len(text)


def test_a_compiled_trace_that_asks_for_any_memory(own: Path) -> None:
    pack = StoreMutant(own / corpus.BASE / "packs/moving")
    pack.document["compiled"]["tables"]["features"]["batch_rows_max"] = 2**47
    pack.seal()
    with featstore.open(own / corpus.BASE) as store, pytest.raises(FormatError, match="have no room in"):
        store.compiled("moving")
    pack.restore()
    features = pack.document["compiled"]["tables"]["features"]
    records = pack.document["tables"]["records"]["rows"]
    features["batch_rows_max"], pack.document["compiled"]["memory_bytes"] = records, 2**62
    resident = pack.document["tables"]["features.resident"]
    rows = resident["rows"] = resident["rows_per_chunk"] = 2**34
    resident["page_checksums"]["shape"] = [rows * resident["row_bytes"] // 4096]
    pack.set_array(("arrays", "features.turn"), np.zeros(0, np.int32))
    pack.document["arrays"]["features.turn"]["shape"] = [rows]
    sparse(pack, pack.document["arrays"]["features.turn"]["path"] + "/c.0", 4 * rows)
    sparse(pack, resident["path"] + "/c.0.0", rows * resident["row_bytes"])
    sparse(pack, resident["page_checksums"]["path"] + "/c.0", rows * resident["row_bytes"] // 1024)
    pack.seal()
    with (
        featstore.open(own / corpus.BASE) as store,
        store.compiled("moving") as compiled,
        pytest.raises(BudgetError, match="hold this compiled trace's slots"),
    ):
        CompiledLoader(compiled)


# Traces.


def sealed_trace(path: Path, change: Callable[[layout.FrameIndex], Any]) -> None:
    """Change a trace's index, and make its checksum, its digest and the number of ids in the tail fit."""
    data = np.fromfile(path, np.uint8)
    at = len(data) - layout.TAIL_BYTES
    begin, size, frames, _, digest, uuid = layout._get(data[at:], layout.START_BYTES, layout._TAIL)
    index = layout.decode_index(data[begin:at], frames, 1, path, begin)
    change(index)
    layout._seal(data[begin:at], layout.INDEX, 0)
    ids = int(index.counts.sum()) % 2**64
    layout._put(data[at:], layout.START_BYTES, layout._TAIL, begin, size, frames, ids, digest, uuid)
    layout._seal(data[at:], layout.TAIL, 0)
    data.tofile(path)


def compiled_again(own: Path) -> None:
    featstore.compile_trace(
        own / corpus.BASE, own / corpus.TRACE, "again", memory="16MiB", disk_door=corpus.QuickDisk()
    ).close()  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, 1, 2**31, 2**62])
def test_a_trace_with_wrong_counts(own: Path, count: int) -> None:
    def change(index: layout.FrameIndex) -> None:
        index.counts[0, 2] = count

    sealed_trace(own / corpus.TRACE / "trace.log", change)

    def use() -> None:
        with featstore.Trace(own / corpus.TRACE) as trace:
            trace.ids(2)

    refused(use, "ids of type|contradicts itself", FeatstoreError)
    refused(lambda: compiled_again(own), "ids of type|contradicts itself", FeatstoreError)


def test_a_trace_with_larger_ids_than_it_says(own: Path) -> None:
    def change(index: layout.FrameIndex) -> None:
        index.id_max[0] = 5

    sealed_trace(own / corpus.TRACE / "trace.log", change)
    refused(
        lambda: featstore.Trace(own / corpus.TRACE).ids(0), "node ids of type '' from 0 to 5", CorruptionError
    )


def test_a_trace_whose_head_is_no_text(own: Path) -> None:
    path = own / corpus.TRACE / "trace.log"
    data = np.fromfile(path, np.uint8)
    length = int(layout._get(data, 0, layout._START)[3])
    data[layout.START_BYTES + 8 + 3] = 0xFF
    layout._seal(data[:length], layout.HEAD, layout.VERSION)
    data.tofile(path)
    with pytest.raises(FormatError, match="malformed head"):
        featstore.Trace(own / corpus.TRACE)


# What is for people.


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((*TABLE, "statistics"), {"nan": 1}),
        ((*TABLE, "statistics"), {"nan": "many", "inf": None, "minimum": True, "cast_from": 7}),
        ((*TABLE, "order", "parameters"), {"edge_cut": "little"}),
        (("provenance",), {"sources": 7}),
        (("provenance",), {"sources": {"features": {"name": 1, "dtype": [], "shape": 5}}}),
    ],
)
def test_inspect_shows_what_other_writers_say(
    mutant: StoreMutant, where: tuple[str, ...], value: Any
) -> None:
    from click.testing import CliRunner
    from featstore_cli.main import cli

    outer = mutant.document
    for key in where[:-1]:
        outer = outer[key]
    outer[where[-1]] = value
    mutant.seal()
    result = CliRunner().invoke(cli, ["inspect", str(mutant.path)])
    assert result.exit_code == 0, result.output
    assert f"{corpus.ROWS} rows" in result.output
