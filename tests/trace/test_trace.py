"""Traces against a list of mini-batches; mini-batches of every kind; damage anywhere."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import pickle
import struct
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_support import batches_of, record

import featstore
from featstore.errors import (
    ClosedError,
    CorruptionError,
    FeatstoreError,
    FormatError,
    SourceError,
    StaleError,
)
from featstore.sampling.neighbors import NeighborSampler
from featstore.scrub.report import Progress
from featstore.scrub.trace import verify_trace
from featstore.trace import recorder
from featstore.trace.filling import TraceProgress
from featstore.trace.log_file import how_far
from featstore.trace.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
from disks import RecordingDisk

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, when PyG scripts its own classes
    import torch
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput

    from featstore.adapters.pyg import FeatstoreSampler


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Trace]:
    with record(batches_of(12), tmp_path / "t", fingerprint={"seed": 3}) as made:
        yield made


# What is recorded comes back.

ids_lists = st.lists(st.integers(0, 2**31 + 5) | st.integers(0, 20), max_size=6)
plain = (
    st.none()
    | st.integers()
    | st.lists(st.integers(0, 9), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.booleans(), max_size=2)
)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(ids_lists, ids_lists, plain), min_size=1, max_size=8),
    st.sampled_from(["int64", "uint32", "int64 tensor"]),
)
def test_a_trace_is_a_list_of_mini_batches(
    tmp_path_factory: pytest.TempPathFactory, model: list[Any], kind: str
) -> None:
    def made(ids: list[int]) -> Any:
        return torch.tensor(ids, dtype=torch.int64) if "tensor" in kind else np.array(ids, kind)

    path = tmp_path_factory.mktemp("t")
    batches = [({"paper": made(p), "author": made(a)}, sample) for p, a, sample in model]
    with record(batches, path / "t") as trace:
        assert len(trace) == len(model)
        assert trace.node_types == ("paper", "author")
        for place, name in enumerate(trace.node_types):
            lists = [row[place] for row in model]
            assert trace.counts[name].tolist() == [len(one) for one in lists]
            assert trace.counts[name].dtype == np.int64
            assert trace.id_max[name] == max(itertools.chain(*lists), default=-1)
            for number, one in enumerate(lists):
                found = trace.ids(number)[name]
                assert found.tolist() == one
                assert found.dtype == (np.int64 if max(one, default=0) >= 2**31 else np.int32)
        for number, (batch, (_, _, sample)) in enumerate(zip(trace, model, strict=True)):
            ids, kept = batch
            assert kept == sample == trace.sample(number)
            assert (trace.sample_sizes[number] == 0) == (sample is None)
            assert len(trace.sample_bytes(number)) == trace.sample_sizes[number]
            assert {n: one.tolist() for n, one in ids.items()} == {
                n: one.tolist() for n, one in trace.ids(number).items()
            }
        assert trace.bytes == (path / "t" / "trace.log").stat().st_size
        report = featstore.verify(trace.path)
        assert report.ok
        assert (report.batches, report.uuid) == (len(model), trace.uuid)
        with record(trace, path / "of it") as copy:
            assert copy.uuid == trace.uuid, "a trace gives what can be recorded"
    with record(batches, path / "again") as again:
        assert again.uuid == trace.uuid
        assert (path / "again" / "trace.log").read_bytes() == (path / "t" / "trace.log").read_bytes()


def test_the_bytes_are_those_of_the_description(trace: Trace) -> None:
    """A reader made from formats/v1/trace.md alone, with another CRC-32C."""
    raw = (trace.path / "trace.log").read_bytes()

    def block(at: int, kind: bytes) -> tuple[bytes, int]:
        magic, crc, word, length = struct.unpack_from("<8sIIQ", raw, at)
        assert magic == kind
        assert length % 64 == at % 64 == 0
        assert google_crc32c.value(raw[at + 12 : at + length]) == crc
        return raw[at : at + length], word

    head, version = block(0, b"fst-head")
    (length,) = struct.unpack_from("<Q", head, 24)
    assert version == 1
    assert json.loads(head[32 : 32 + length]) == {
        "node_types": [""],
        "fingerprint": {"seed": 3},
        "drop": ["x"],
    }
    tail, _ = block(len(raw) - 128, b"fst-tail")
    index_at, index_bytes, frames, ids_total = struct.unpack_from("<4Q", tail, 24)
    index, _ = block(index_at, b"fst-indx")
    assert index_at + index_bytes == len(raw) - 128
    numbers = np.frombuffer(index, "<i8", 4 * frames + 2, 24)
    crcs = np.frombuffer(index, "<u4", 2 * frames, 24 + numbers.nbytes)
    assert numbers[frames] == index_at
    largest, at, seen = -1, len(head), 0
    for number, (ids, _) in enumerate(batches_of(12)):
        front, sample_crc = block(at, b"fst-fram")
        found, sample_bytes, count, width = struct.unpack_from("<4Q", front, 24)
        assert (found, count, width) == (number, len(ids), 4)
        assert np.array_equal(np.frombuffer(front, "<i4", count, 56), ids)
        sample = raw[at + len(front) : at + len(front) + sample_bytes]
        assert google_crc32c.value(sample) == sample_crc == crcs[frames + number]
        assert sample[:4] == b"fss1"
        assert crcs[number] == struct.unpack_from("<I", front, 8)[0]
        said = (
            numbers[number],
            numbers[frames + 1 + number],
            numbers[2 * frames + 1 + number],
            numbers[3 * frames + 1 + number],
        )
        assert said == (at, len(front), sample_bytes, count)
        at += len(front) + sample_bytes
        seen, largest = seen + count, max([largest, *ids])
    assert (at, seen, frames, largest) == (index_at, ids_total, 12, numbers[-1])
    digest = hashlib.sha256(head + crcs[:frames].tobytes()).digest()
    assert tail[56:88] == digest
    uuid = bytearray(digest[:16])
    uuid[6], uuid[8] = uuid[6] & 15 | 128, uuid[8] & 63 | 128
    assert tail[88:104] == bytes(uuid)
    assert trace.uuid.replace("-", "") == uuid.hex()


def test_what_a_trace_says(trace: Trace) -> None:
    assert trace.fingerprint == {"seed": 3}
    assert trace.drop == ("x",)
    for bad in (-1, 12, 10**9):
        with pytest.raises(IndexError, match="none of this trace's 12"):
            trace.ids(bad)
        with pytest.raises(IndexError, match="none of this trace's 12"):
            trace.expect(bad)
    trace.expect(11)
    with pytest.raises(TypeError):
        trace.batch("1")  # type: ignore[arg-type]
    array = trace.sample(3)["edge"]  # type: ignore[index]
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0
    with Trace.open(trace.path) as other:
        assert other.uuid == trace.uuid
    for closed in (other.ids, other.expect):
        with pytest.raises(ClosedError):
            closed(0)
    other.close()
    assert featstore.Trace is Trace


def test_copies_of_a_trace(trace: Trace) -> None:
    copy = pickle.loads(pickle.dumps(trace))
    assert np.array_equal(copy.ids(5)[""], trace.ids(5)[""])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(trace.ids, range(12))
    wanted = [ids for ids, _ in batches_of(12)]
    assert all(np.array_equal(f[""], w) for f, w in zip(found, wanted, strict=True))
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append([ids[""].tolist() for ids, _ in trace]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[w.tolist() for w in wanted]] * 4
    text = pickle.dumps(trace)
    record(batches_of(3), trace.path, overwrite=True).close()
    with pytest.raises(StaleError, match="anew"):
        pickle.loads(text)


def test_another_content_is_another_trace(tmp_path: Path) -> None:
    one = batches_of(4)
    variants = [
        one,
        one[::-1],
        one[:3],
        [(ids, None) for ids, _ in one],
        [({"": i, "b": i[:0]}, s) for i, s in one],
    ]
    uuids = [record(v, tmp_path / f"{k}").uuid for k, v in enumerate(variants)]
    uuids.append(record(one, tmp_path / "f", fingerprint={"a": 1}).uuid)
    assert len(set(uuids)) == len(uuids)
    assert (
        record(one, tmp_path / "g", fingerprint={"b": 2, "a": 1}).uuid
        == record(one, tmp_path / "h", fingerprint={"a": 1, "b": 2}).uuid
    )


# Finding node ids.


class _Object:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


IDS = np.array([4, 0, 7])


@pytest.mark.parametrize(
    ("batch", "ids", "has_sample"),
    [
        (IDS, {"": IDS}, False),
        (torch.tensor(IDS), {"": IDS}, False),
        (IDS.astype(np.uint8), {"": IDS}, False),
        (np.empty(0, np.float32), {"": []}, False),
        ({"a": IDS, "b": torch.tensor(IDS)}, {"a": IDS, "b": IDS}, False),
        ((IDS, [1]), {"": IDS}, True),
        ([torch.tensor(IDS), "x"], {"": IDS}, True),
        ((IDS, None), {"": IDS}, False),
        (({"a": IDS}, {"k": 1}), {"a": IDS}, True),
        ({"n_id": IDS, "edge_index": IDS}, {"": IDS}, True),
        ({"input_nodes": {"a": IDS}, "y": 1}, {"a": IDS}, True),
        (Data(n_id=torch.tensor(IDS)), {"": IDS}, True),
        (HeteroData({"a": {"n_id": torch.tensor(IDS)}, "b": {}}), {"a": IDS, "b": []}, True),
        (NeighborSampler(np.arange(9), np.arange(8), [1]).sample(np.array([3])), {"": [3]}, True),
    ],
)  # fmt: skip
def test_ids_are_found(tmp_path: Path, batch: Any, ids: dict[str, Any], has_sample: bool) -> None:
    with record([batch, batch], tmp_path / "t") as trace:
        assert {name: found.tolist() for name, found in trace.ids(1).items()} == {
            name: list(one) for name, one in ids.items()
        }
        assert bool(trace.sample_sizes[1]) == has_sample


def test_ids_are_found_by_the_callers_function(tmp_path: Path) -> None:
    batches = [{"mine": [3, 1], "more": np.arange(2)}, {"mine": [], "more": np.arange(1)}]
    with record(batches, tmp_path / "t", nodes=lambda b: b["mine"]) as trace:
        assert [ids[""].tolist() for ids, _ in trace] == [[3, 1], []]
        assert trace.sample(0)["mine"] == [3, 1]  # type: ignore[index]
    with record(batches, tmp_path / "u", nodes=lambda b: {"q": b["more"]}) as trace:
        assert trace.ids(0)["q"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ("text", "pass nodes="), ([1, 2, 3], "pass nodes="), ((IDS, IDS, IDS), "pass nodes="),
        ({}, "pass nodes="), ({"a": 1}, "pass nodes="), (_Object(x=1), "pass nodes="),
        (Data(x=torch.ones(2, 1)), "pass nodes="),
        (HeteroData({"a": {"x": torch.ones(2, 1)}}), "pass nodes="), (None, "pass nodes="),
        (np.array([1.5]), "integers in one dimension, not float64"), (np.array([[1]]), "one dimension"),
        (np.array([True]), "not bool"), (np.ma.array([1, 2], mask=[True, False]), "mask would be lost"),
        ({"a": np.ma.array([1])}, "mask would be lost"), (np.array([3, -1]), "from -1 to 3"),
        (np.array([2**63], np.uint64), "from 0 to 2"), ({"a": IDS, "b": -IDS}, "type 'b' must be from 0"),
        ({1: IDS}, "node types are printable text"),
        ((IDS, {"q": [object()]}), r"batch\['q'\]\[0\] is a object"), (_Object(n_id=IDS), "record pairs"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_named(tmp_path: Path, batch: Any, text: str) -> None:
    path = tmp_path / "t"
    with pytest.raises(SourceError, match=f"^mini-batch 0: .*{text}"):
        record([batch], path)
    assert not (path / "recording.log").exists(), "nothing was recorded, and nothing stays"
    good = {"a": IDS, "b": IDS} if isinstance(batch, dict) and "b" in batch else IDS
    with pytest.raises(SourceError, match=r"^mini-batch 2: "):
        record([good, good, batch], path)
    assert how_far(path).batches == 2, "what came before it is kept"
    record([good, good], path, resume=True).close()


def test_node_types_are_those_of_the_first(tmp_path: Path) -> None:
    with record([{"a": IDS, "b": IDS}, {"b": IDS}, {"b": IDS, "c": IDS[:0]}], tmp_path / "t") as trace:
        assert [len(ids["a"]) for ids, _ in trace] == [3, 0, 0]
    with pytest.raises(SourceError, match="mini-batch 1: there are nodes of type 'c'"):
        record([{"a": IDS}, {"c": IDS}], tmp_path / "u")


def test_an_iterable_without_mini_batches(tmp_path: Path) -> None:
    for nothing in ([], iter([]), (b for b in ())):
        with pytest.raises(SourceError, match="nothing to record"):
            record(nothing, tmp_path / "t")
    record([IDS], tmp_path / "t").close()


class Fewer:
    """Says that it has five mini-batches, and gives three."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return (np.array([number]) for number in range(3))


class Stops(Sequence[Any]):
    """Has five mini-batches, of which the fourth raises what ends an iteration."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise StopIteration
        return np.array([index])


@pytest.mark.parametrize("batches", [Fewer(), Stops()])
def test_fewer_mini_batches_than_there_are_said_to_be(tmp_path: Path, batches: Any) -> None:
    with pytest.raises(SourceError, match="gave 3 mini-batches, and says that it has 5"):
        record(batches, tmp_path / "t")
    with pytest.raises(FeatstoreError):  # it is not finished
        Trace(tmp_path / "t")
    with record(batches_of(5), tmp_path / "t", overwrite=True) as trace:
        assert len(trace) == 5
    with record(batches, tmp_path / "u", limit=3) as trace:
        assert len(trace) == 3


def test_limit_and_progress(tmp_path: Path) -> None:
    def endless() -> Iterator[Any]:
        for number in itertools.count():
            assert number < 5, "no more is asked for than is recorded"
            yield np.array([number])

    seen: list[TraceProgress] = []
    with record(endless(), tmp_path / "t", limit=5, progress=seen.append) as trace:
        assert len(trace) == 5
    assert [(p.done_batches, p.total_batches) for p in seen] == [(n, 5) for n in range(1, 6)]
    seen.clear()
    record(batches_of(3), tmp_path / "u", progress=seen.append).close()
    assert [p.total_batches for p in seen] == [3, 3, 3]
    assert seen[0].bytes < seen[-1].bytes < trace.bytes * 100
    with pytest.raises(SourceError, match="limit"):
        record(endless(), tmp_path / "v", limit=0)


@pytest.mark.parametrize("value", [float("nan"), 2**63, [1], b"x", {}], ids=repr)
def test_fingerprints_are_plain(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SourceError, match="a fingerprint is"):
        record([IDS], tmp_path / "t", fingerprint={"k": value})


# Real loaders.


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_pygs_loader(tmp_path: Path, workers: int) -> None:
    rng = np.random.default_rng(5)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 200))])
    indices = rng.integers(0, 200, indptr[-1])
    data = Data(
        x=torch.rand(200, 3),
        y=torch.arange(200),
        edge_index=torch.tensor(np.stack([indices, np.repeat(np.arange(200), np.diff(indptr))])),
    )

    def loader() -> Any:
        numbers = torch.arange(len(indices))
        sampler = FeatstoreSampler(NeighborSampler(indptr, indices, [3, 2], seed=1), edge_permutation=numbers)
        return NodeLoader(
            data, sampler, input_nodes=torch.arange(0, 200, 3), batch_size=16, num_workers=workers
        )

    with record(loader(), tmp_path / "t") as trace:
        assert len(trace) == 5
        for kept, batch in zip(trace, loader(), strict=True):
            sample: Any
            ids, sample = kept
            assert ids[""].tolist() == batch.n_id.tolist()
            assert type(sample) is Data
            assert "x" not in sample
            assert sample.batch_size == batch.batch_size
            for name in ("edge_index", "y", "n_id", "e_id", "input_id"):
                assert torch.equal(sample[name], batch[name])
            assert sample.num_sampled_nodes == batch.num_sampled_nodes


class _TypedSampler(BaseSampler):  # type: ignore[misc]
    """Each paper's first author: enough of a sampler for a real loader of HeteroData (PyG's own needs a
    compiled extension)."""

    def sample_from_nodes(self, inputs: Any, **_: Any) -> Any:
        papers = inputs.node
        authors, local = torch.unique(papers % 7, return_inverse=True)
        relation = ("author", "writes", "paper")
        return HeteroSamplerOutput(
            node={"paper": papers, "author": authors}, row={relation: local},
            col={relation: torch.arange(len(papers))}, edge={relation: papers},
            metadata=(inputs.input_id, inputs.time),
        )  # fmt: skip

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    @property
    def edge_permutation(self) -> Any:
        return None


def test_hetero_batches_of_pygs_loader(tmp_path: Path) -> None:
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.rand(40, 2), torch.rand(7, 5)
    data["author", "writes", "paper"].edge_index = torch.stack([torch.arange(40) % 7, torch.arange(40)])

    def loader() -> Any:
        return NodeLoader(data, _TypedSampler(), input_nodes=("paper", torch.arange(40)), batch_size=16)

    with record(loader(), tmp_path / "t") as trace:
        assert set(trace.node_types) == {"paper", "author"}
        assert trace.counts["paper"].tolist() == [16, 16, 8]
        for kept, batch in zip(trace, loader(), strict=True):
            sample: Any
            ids, sample = kept
            assert type(sample) is HeteroData
            assert "x" not in sample["paper"]
            for name in trace.node_types:
                assert ids[name].tolist() == batch[name].n_id.tolist() == sample[name].n_id.tolist()
            relation = ("author", "writes", "paper")
            assert torch.equal(sample[relation].edge_index, batch[relation].edge_index)


# Memory.


def test_recording_and_reading_hold_one_mini_batch(tmp_path: Path) -> None:
    batch_bytes, count = 2**20, 64

    def many() -> Iterator[Any]:
        for number in range(count):
            yield np.full(batch_bytes // 16, number), np.full(batch_bytes // 16, number, np.int64)

    tracemalloc.start()
    try:
        with record(many(), tmp_path / "t") as trace:
            assert featstore.verify(trace.path).ok
            assert [int(ids[""][0]) for ids, _ in trace] == list(range(count))
            size = trace.bytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 40 * 2**20
    assert peak < 8 * 2**20


def test_recording_many_small_mini_batches_holds_no_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_HOLD_BYTES", 2**14)
    disk = RecordingDisk(tmp_path)
    with Trace.record((np.array([n]) for n in range(2000)), tmp_path / "t", disk=disk) as trace:
        assert len(trace) == 2000
    sizes = [len(op.data) for op in disk.ops if op.kind == "write"]
    assert max(sizes[:-2]) <= 2**14 + 256, "but for index and tail"
    assert len(sizes) > 8


# Damage.


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    record([(ids[:9], {"e": np.arange(5)}) for ids, _ in batches_of(4)], tmp_path / "t").close()
    log = tmp_path / "t" / "trace.log"
    raw = log.read_bytes()
    for place in range(len(raw)):
        spoilt = bytearray(raw)
        spoilt[place] ^= 1 << place % 8
        log.write_bytes(spoilt)
        try:
            report = verify_trace(tmp_path / "t", access="buffered")
        except FormatError:
            continue  # a version of the far future
        assert not report.ok, place
        assert report.problem_count >= 1


def test_a_bad_mini_batch_is_named_and_the_others_are_served(trace: Trace) -> None:
    log = trace.path / "trace.log"
    raw = bytearray(log.read_bytes())
    offset = int(trace.index.offsets[7] + trace.index.front_bytes[7])  # the first byte of a sample
    raw[offset] ^= 0x10
    with open(log, "r+b") as file:
        file.write(raw)
    with pytest.raises(CorruptionError, match="expected checksum") as error:
        trace.sample(7)
    assert (error.value.path, error.value.offset) == (str(log), offset)
    with pytest.raises(CorruptionError):
        trace.batch(7)
    assert np.array_equal(trace.ids(7)[""], batches_of(12)[7][0]), "ids have a checksum of their own"
    assert trace.batch(8)[1]["number"] == 8  # type: ignore[index]
    report = featstore.verify(trace.path)
    assert [p.batch for p in report.problems] == [7]
    assert "mini-batch 7 (byte" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["problem_count"] == 1


def test_verifying_tells_how_many_bytes_are_done(trace: Trace) -> None:
    seen: list[Progress] = []
    assert featstore.verify(trace.path, progress=seen.append).ok
    done = [p.done_bytes for p in seen]
    assert len(done) == 12
    assert done == sorted(set(done))
    assert {(p.path, p.total_bytes) for p in seen} == {("trace.log", trace.bytes)}
    assert done[-1] < trace.bytes, "index and tail come after the last mini-batch"


def test_frames_in_another_order_are_found(tmp_path: Path) -> None:
    """Frames that are whole, but in each other's place."""
    record([(np.array([k]), k) for k in range(3)], tmp_path / "t").close()
    log = tmp_path / "t" / "trace.log"
    with Trace(tmp_path / "t") as trace:
        a, b, c = (int(x) for x in trace.index.offsets[:3])
        raw = log.read_bytes()
        log.write_bytes(raw[:a] + raw[b:c] + raw[a:b] + raw[c:])
        report = featstore.verify(trace.path)
        assert [p.batch for p in report.problems] == [0, 1]
    with Trace(tmp_path / "t") as trace, pytest.raises(CorruptionError):
        trace.ids(0)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    record(batches_of(3), tmp_path / "t").close()
    log = tmp_path / "t" / "trace.log"
    raw = log.read_bytes()
    for size in [0, 1, 23, 24, 63, 64, 128, *range(100, len(raw), 97), len(raw) - 1]:
        log.write_bytes(raw[:size])
        with pytest.raises((CorruptionError, FormatError)):
            Trace(tmp_path / "t")
    log.write_bytes(raw + bytes(64))
    with pytest.raises(CorruptionError):
        Trace(tmp_path / "t")
    log.unlink()
    log.symlink_to("/dev/null")
    with pytest.raises((CorruptionError, FormatError)):
        Trace(tmp_path / "t")


def resealed(raw: bytes, kind: bytes, at: int, length: int, spoil: Any) -> bytes:
    """The log with a block changed by ``spoil`` and its checksum right again."""
    block = bytearray(raw[at : at + length])
    spoil(block)
    struct.pack_into("<I", block, 8, google_crc32c.value(bytes(block[12:])))
    assert block[:8] == kind
    return raw[:at] + bytes(block) + raw[at + length :]


def set_u64(offset: int, value: int) -> Any:
    return lambda block: struct.pack_into("<Q", block, offset, value)


@pytest.mark.parametrize(
    ("where", "spoil"),
    [
        ("tail", set_u64(24, 2**40)), ("tail", set_u64(32, 2**63)), ("tail", set_u64(40, 2**60)),
        ("tail", set_u64(40, 2)), ("tail", set_u64(48, 1)), ("tail", set_u64(56, 1)),
        ("tail", set_u64(88, 1)), ("index", set_u64(24, 0)), ("index", set_u64(32, 2**63 - 64)),
        ("index", set_u64(56, 64)), ("index", set_u64(64, 2**64 - 64)), ("index", set_u64(80, 0)),
        ("index", set_u64(104, 2**62)),
        ("head", lambda block: block.__setitem__(slice(32, 60), b'{"node_types":["a","a"],    ')),
        ("head", set_u64(24, 2**63)), ("head", set_u64(24, 3)),
        ("head", lambda block: struct.pack_into("<I", block, 12, 0)),
        ("head", lambda block: struct.pack_into("<I", block, 12, 2)),
    ],
)  # fmt: skip
def test_a_log_that_lies_with_right_checksums_is_refused(tmp_path: Path, where: str, spoil: Any) -> None:
    record(batches_of(3), tmp_path / "t", fingerprint={"text": "some"}).close()
    log = tmp_path / "t" / "trace.log"
    raw = log.read_bytes()
    index_at, index_bytes = struct.unpack_from("<QQ", raw, len(raw) - 128 + 24)
    (head_bytes,) = struct.unpack_from("<Q", raw, 16)
    places = {
        "head": (b"fst-head", 0, head_bytes),
        "index": (b"fst-indx", index_at, index_bytes),
        "tail": (b"fst-tail", len(raw) - 128, 128),
    }
    log.write_bytes(resealed(raw, *places[where], spoil))
    with pytest.raises((FormatError, CorruptionError)):
        Trace(tmp_path / "t")
