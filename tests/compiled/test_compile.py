"""A compiled trace hands out the rows of the source: for every row size, dtype, placement, residency and
engine, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled_support import Case, QuickDisk, make_case, placed, rows_of, skewed_batches, with_samples
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
import featstore.layout.table
from featstore.compile import segment_plan, segments
from featstore.compile import write_table as packing
from featstore.compile.decide import OURS
from featstore.compile.placement import Location, Placement
from featstore.engine import ENGINES
from featstore.errors import ArgumentError, IdError, SourceError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.plan.cost import DeviceModel
from featstore.trace.trace import Trace

RECORD = np.dtype([("kind", "S4"), ("at", "<f4", (2,)), ("tag", "S3")])  # 15 bytes
#: (dtype, row shape); the row sizes are 1 B to 40 kB, those that divide a page and those that do not.
KINDS: list[tuple[Any, tuple[int, ...]]] = [
    (np.uint8, ()), (np.uint8, (7,)), (np.float16, (20,)), (np.float32, (10, 10)), (np.float32, (100,)),
    (np.float16, (256,)), (np.float64, (96,)), (ml_dtypes.bfloat16, (768,)), (np.float32, (768,)),
    (np.complex64, (512,)), (np.float32, (1025,)), (np.float32, (85, 99)), (np.float32, (10_000,)),
    ("M8[ns]", (3,)), (RECORD, ()), (RECORD, (2, 3)), (np.int64, ()),
]  # fmt: skip
ROUNDS = 3


@pytest.mark.parametrize("counts", [[], [3], [1, 2], [-1, 100], [2.5], 7, "4"])
def test_epochs_of_another_number_of_mini_batches_are_refused(tmp_path: Path, pack: Any, counts: Any) -> None:
    with (
        pack(tmp_path / "s", np.zeros((50, 3), np.float32)) as store,
        featstore.Trace.record([np.arange(4)] * 4, tmp_path / "t") as trace,
    ):
        with pytest.raises(ArgumentError, match="epoch_batches"):
            featstore.compile_trace(store, trace, memory="64MiB", epoch_batches=counts)
        assert not (store.path / "packs").exists()
        featstore.compile_trace(store, trace, memory="64MiB", epoch_batches=[1, 0, 3]).close()
        with store.compiled() as compiled:
            assert compiled.epochs().tolist() == [0, 1, 1, 4]


def table_rows(kind: tuple[Any, tuple[int, ...]]) -> int:
    """As many rows as keep a test quick, and no fewer than matter."""
    return max(40, min(700, 400_000 // (np.dtype(kind[0]).itemsize * int(np.prod(kind[1])))))


#: Any way to place rows at all, not only those that a search would find.
placements = st.builds(
    Placement, st.integers(1, 6),
    st.lists(st.sampled_from([int(c) for c in Location]), min_size=1, max_size=4).map(tuple),
    st.integers(0, 4), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([int(c) for c in Location]),
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Several chunk files, slabs, checkpoints, episodes and buckets in a table of less than a megabyte."""

    class Buckets(packing._Buckets):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.rows_each = 41

    monkeypatch.setattr(packing, "_Buckets", Buckets)
    monkeypatch.setattr(featstore.layout.table, "CHUNK_BYTES", 5 * 4096)
    monkeypatch.setattr(segment_plan, "SLAB_BYTES_MAX", 60_000)
    monkeypatch.setattr(segments, "SEGMENTS_CHECKPOINT_BYTES", 50_000)
    monkeypatch.setattr(segment_plan, "BUFFER_BYTES_MIN", 9 * 2**20 // 10)
    return monkeypatch


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_is_that_of_the_source(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), label="kinds")
    seed = data.draw(st.integers(0, 2**32), label="seed")
    rows = {f"t{i}": rows_of(table_rows(kind), kind[1], kind[0], seed + i) for i, kind in enumerate(kinds)}
    if len(kinds) == 3:  # a table that no mini-batch can want anything of
        rows["none"] = rows_of(0, (3,), np.float32, 0)
    sizes = {name: len(r) for name, r in rows.items()}
    largest = data.draw(st.sampled_from([0, 3, 30, 200]), label="ids")
    count = data.draw(st.sampled_from([1, 2, 7, 12]), label="batches")
    repeat = data.draw(st.booleans(), label="repeat")
    batches = skewed_batches(sizes, count, largest, seed, repeat=repeat)
    table_bytes = sum(r.nbytes for r in rows.values())
    residency = data.draw(st.sampled_from(["min", "fixed"]), label="residency")
    on_device = data.draw(st.sampled_from([0, 0.1]), label="device")
    cache = data.draw(st.sampled_from([0, 0.05, 0.2, 3]), label="cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            featstore.layout.table, "CHUNK_BYTES", data.draw(st.sampled_from([20_000, 2**26]), label="chunk")
        )
        patch.setattr(
            segment_plan, "SLAB_BYTES_MAX", data.draw(st.sampled_from([70_000, 2**24]), label="slab")
        )
        patch.setattr(
            segment_plan, "BUFFER_BYTES_MIN", data.draw(st.sampled_from([2**13, 2**19]), label="buffer")
        )
        folder = tmp_path_factory.mktemp("case")
        case = make_case(folder, rows, batches, permuted=data.draw(st.booleans(), label="permuted"))
        policy, disk = (
            OURS,
            data.draw(st.sampled_from(["policy", None, 0, "0x", "0.3x", "1x", "2x"]), label="disk"),
        )
        if disk == "policy":
            policy, disk = placed(data.draw(placements, label="placement")), None
        case.compile(
            disk=disk, residency=residency, policy=policy, cache=int(cache * table_bytes),
            device_memory=int(on_device * table_bytes), memory="64MiB",
        )  # fmt: skip
        engine = data.draw(st.sampled_from(ENGINES), label="engine")
        plain = all(np.dtype(kind[0]).kind in "uif" or kind[0] is ml_dtypes.bfloat16 for kind in kinds)
        if on_device and not plain:
            return  # torch has no such dtypes
        device = "cpu" if on_device else None
        order = None
        if residency == "fixed" and data.draw(st.booleans(), label="shuffled"):
            order = np.random.default_rng(seed).permutation(count)
        with (
            case.store.compiled() as compiled,
            CompiledLoader(compiled, engine=engine, device=device, order=order) as loader,
        ):
            for _ in range(ROUNDS):
                case.check(loader, range(count) if order is None else order.tolist())


@pytest.mark.parametrize("residency", ["min", "fixed"])
@pytest.mark.parametrize(
    "kind", [KINDS[0], KINDS[3], KINDS[9], KINDS[11]], ids=["1B", "400B", "4096B", "33660B"]
)
def test_episodes_buckets_and_chunks(
    kind: tuple[Any, tuple[int, ...]], residency: str, small: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One table in many of everything, with packed, shared and base rows in one mini-batch."""
    rows = {"t": rows_of(table_rows(kind), kind[1], kind[0], 1)}
    case = make_case(
        tmp_path, rows, skewed_batches({"t": len(rows["t"])}, 13, len(rows["t"]) // 2, 3), permuted=True
    )
    passes: list[int] = []
    whole = segment_plan.plan_packing

    def counted(*arguments: Any) -> segment_plan.SegmentPlan:
        plan = whole(*arguments)
        passes.append(len(plan.episodes))
        return plan

    small.setattr(packing, "plan_packing", counted)
    base, packed, shared = (int(c) for c in Location)
    policy = placed(Placement(4, (base, shared, packed), 1, 0.5, packed))
    case.compile(policy=policy, residency=residency, cache=rows["t"].nbytes // 12)
    with case.store.compiled() as compiled, CompiledLoader(compiled) as loader:
        limits = compiled.limits("t")
        assert (
            min(
                limits.packed_rows,
                limits.shared_rows,
                limits.slots,
                compiled.entry.forecast["tables"]["t"]["base_rows"],
            )
            > 0
        )
        for _ in range(ROUNDS):
            case.check(loader, range(13))
    assert featstore.verify(case.store.path / "packs/default").ok
    assert max(passes) > 1, "there are episodes"


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree(engine: str, tmp_path: Path) -> None:
    """All ways that rows take, through each engine: tables of two dtypes, duplicates, device rows, no
    limit."""
    rows = {"paper": rows_of(500, (25,), np.float32, 1), "author": rows_of(300, (3, 7), np.uint8, 2)}
    batches = skewed_batches({"paper": 500, "author": 300}, 9, 150, 4)
    batches[3] = {"paper": np.zeros(0, np.int64), "author": np.zeros(0, np.int64)}
    batches[4] = {"paper": np.full(70, 11), "author": np.arange(300)}
    case = make_case(tmp_path, rows, batches, permuted=True)
    for residency, disk in (("min", "0.7x"), ("fixed", "0.7x"), ("min", None)):
        case.compile(residency=residency, disk=disk, cache=8000, device_memory=3000)
        with (
            case.store.compiled() as compiled,
            CompiledLoader(compiled, engine=engine, device="cpu") as loader,
        ):
            assert all(compiled.limits(name).device_slots for name in rows)
            for _ in range(ROUNDS):
                case.check(loader, range(9))


def test_without_samples_a_mini_batch_has_its_ids(tmp_path: Path) -> None:
    rows = rows_of(200, (3,), np.float32, 0)
    ids = [np.arange(5), np.array([7, 7, 3])]
    with featstore.pack(tmp_path / "s", rows, order="given", disk=QuickDisk()) as store:
        trace = Trace.record(ids, tmp_path / "trace")
        featstore.compile_trace(store, trace, memory="16MiB", disk_door=QuickDisk()).close()
        with store.compiled() as compiled, CompiledLoader(compiled) as loader:
            for batch, wanted in zip(loader, ids, strict=True):
                assert batch.sample["node"][""].tolist() == wanted.tolist()
                assert batch.x.tobytes() == rows[wanted].tobytes()


@pytest.fixture
def one(tmp_path: Path) -> Case:
    rows = {"t": rows_of(300, (10,), np.float32, 0)}
    return make_case(tmp_path, rows, skewed_batches({"t": 300}, 6, 100, 1))


def test_the_default_memory_of_the_loader_is_what_it_was_compiled_for(tmp_path: Path) -> None:
    """Whatever the compilation accepts, the loader works with: tiny rows, whose records weigh more than they
    do, and many tables."""
    for names, width in ((["t"], 1), ([f"t{i}" for i in range(24)], 2)):
        rows = {name: rows_of(8_000 // len(names), (width,), np.uint8, 1) for name in names}
        sizes = {name: len(r) for name, r in rows.items()}
        folder = tmp_path / str(width)
        folder.mkdir()
        ids = skewed_batches(sizes, 4, 8_000 // len(names), 2)
        store = featstore.pack(folder / "s", rows, order="given", disk=QuickDisk(), memory="64MiB")
        for kind, batches in (
            ("with", with_samples(ids)),
            ("without", [b if len(b) > 1 else b["t"] for b in ids]),
        ):
            trace = Trace.record(batches, folder / kind)
            memory = 1 << 20
            while True:
                try:
                    found = featstore.compile_trace(
                        store,
                        trace,
                        memory="64MiB",
                        train_memory=memory,
                        overwrite=True,
                        disk_door=QuickDisk(),
                    )
                    break
                except featstore.errors.BudgetError as error:
                    assert error.needed_bytes > memory, "what it said works does not"
                    assert memory == 1 << 20, "what it said works does not"
                    memory = error.needed_bytes
            found.close()
            with store.compiled() as compiled, CompiledLoader(compiled) as loader:
                assert len(list(loader)) == 4


def test_what_the_trace_asks_for_must_be_there(one: Case, tmp_path: Path) -> None:
    untyped = Trace.record([np.array([3, 300])], tmp_path / "outside")
    with pytest.raises(IdError, match=r"mini-batch 0 .* node id 300, but table 't' has 300 rows"):
        featstore.compile_trace(one.store, untyped, "x")
    typed = Trace.record([{"author": np.array([3])}], tmp_path / "typed")
    with pytest.raises(SourceError, match=r"'author'; the store's tables are 't'"):
        featstore.compile_trace(one.store, typed, "x")
    with pytest.raises(SourceError, match="residency must be one of 'min', 'fixed', not 'lru'"):
        one.compile(residency="lru")
    with pytest.raises(featstore.errors.ArgumentError, match="not allowed"):
        one.compile("../x")
    with pytest.raises(featstore.errors.IncompleteStoreError, match="it has none"):
        one.store.compiled("x")


def test_equal_inputs_give_equal_bytes(one: Case) -> None:
    for disk in (None, "0.8x"):
        found = []
        for name in ("a", "b"):
            one.compile(name, disk=disk, cache=4000, overwrite=True)
            root = one.store.path / "packs" / name
            found.append(
                {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
            )
        assert {k: v for k, v in found[0].items() if k != "lock"} == {
            k: v for k, v in found[1].items() if k != "lock"
        }


def test_it_is_laid_out_for_the_device_that_is_said(one: Case) -> None:
    """Reads of a slow device cost more, and the forecast says so."""
    fast, slow = DeviceModel(1e-6, 1e-9, 1e-6), DeviceModel(1e-3, 1e-6, 1e-3)
    forecasts = [one.compile("device", dry_run=True, cache=4000, model=model) for model in (fast, slow)]
    assert forecasts[1].seconds > 100 * forecasts[0].seconds > 0
