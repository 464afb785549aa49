"""A table as an array: indexed as NumPy's are, in other processes, as a data set, and handed on by DLPack."""

from __future__ import annotations

import ctypes
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import in_child
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

import featstore
from featstore.errors import (
    ArgumentError,
    BudgetError,
    ClosedError,
    IdError,
    IncompleteStoreError,
    NotInMemoryError,
    UnknownNameError,
)

PackSmall = Callable[..., featstore.Store]

ROWS = 70
MEMORY = "4MiB"
RECORD = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
SOURCES: dict[str, np.ndarray] = {
    "wide": np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32),
    "cubes": np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3),
    "numbers": np.arange(ROWS, dtype=np.float64) / 3,
    "half": np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2).astype(ml_dtypes.bfloat16),
    "records": np.array([(n % 7, (n, n / 2)) for n in range(ROWS)], RECORD),
}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, pack: PackSmall) -> Iterator[featstore.Store]:
    path = tmp_path_factory.mktemp("several") / "store"
    orders = {"wide": np.random.default_rng(1).permutation(ROWS)}
    with pack(path, SOURCES, order={"wide": "permutation"}, permutation=orders) as made:
        yield made


@pytest.fixture(scope="module")
def arrays(several: featstore.Store) -> Iterator[dict[str, featstore.TableArray]]:
    """All tables through one reader."""
    with several.reader(memory=MEMORY) as reader:
        yield {name: featstore.TableArray(reader, name) for name in several.tables}


# Indices.

_ENDS = st.none() | st.integers(-ROWS - 3, ROWS + 3)
_IDS = st.lists(st.integers(0, ROWS - 1), max_size=12)
INDICES = st.one_of(
    st.integers(-ROWS, ROWS - 1),
    st.integers(-ROWS, ROWS - 1).map(np.int32),
    st.builds(slice, _ENDS, _ENDS, st.none() | st.integers(-5, 5).filter(bool)),
    _IDS,
    st.builds(lambda ids, dtype: np.array(ids, dtype), _IDS, st.sampled_from(["i1", "u8", "i4", ">i8"])),
    st.builds(lambda ids: np.array(ids, np.int64).reshape(-1, 1), _IDS),
    st.integers(0, ROWS - 1).map(np.array),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array),
)
TENSORS = st.one_of(
    st.builds(
        lambda ids, dtype: torch.tensor(ids, dtype=dtype), _IDS, st.sampled_from([torch.int64, torch.int32])
    ),
    _IDS.map(lambda ids: torch.tensor(ids, dtype=torch.int64).reshape(1, -1)),
    st.integers(0, ROWS - 1).map(torch.tensor),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(torch.tensor),
)


@pytest.mark.parametrize("name", SOURCES)
@given(index=INDICES)
def test_an_index_gives_what_numpy_gives(arrays: Any, name: str, index: Any) -> None:
    array, source = arrays[name], SOURCES[name]
    if isinstance(index, list) and not index:
        expected = source[:0]  # of an empty list NumPy makes floats, which are no ids
    else:
        expected = source[index]
    found = array[index]
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["wide", "cubes", "numbers", "half"])
@given(index=TENSORS)
def test_tensors_give_tensors(arrays: Any, name: str, index: torch.Tensor) -> None:
    source = SOURCES[name]
    plain = (
        torch.from_numpy(source.view(np.int16)).view(torch.bfloat16)
        if name == "half"
        else torch.from_numpy(source)
    )
    found = arrays[name][index]
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain[index.long() if index.dtype == torch.int32 else index])


@pytest.mark.parametrize(
    "index",
    [
        ROWS, -ROWS - 1, [-1], np.array([3, -2]), torch.tensor([-1]), [ROWS], 1.0, [0.5], True, np.True_,
        None, ..., (1, 2), (slice(None), 0), "wide", b"wide", slice(0.5), np.ones(ROWS - 1, bool),
        torch.ones(ROWS + 1) > 0, np.ones((ROWS, 1), bool), np.ma.array([1, 2], mask=[0, 1]),
        np.ma.array(np.ones(ROWS, bool)), [[1], [2, 3]], torch.ones(ROWS).bool().to_sparse(), object(),
    ],
    ids=range(25),
)  # fmt: skip
def test_what_is_no_index_of_rows_is_refused(arrays: Any, index: Any) -> None:
    with pytest.raises(IdError):
        arrays["wide"][index]


def test_records_have_no_tensors(arrays: Any) -> None:
    with pytest.raises(ArgumentError, match="torch has no dtype"):
        arrays["records"][torch.tensor([1])]


def test_index_select(arrays: Any) -> None:
    ids, array = torch.tensor([5, 0, 5]), arrays["cubes"]
    assert torch.equal(array.index_select(0, ids), torch.from_numpy(SOURCES["cubes"]).index_select(0, ids))
    np.testing.assert_array_equal(array.index_select(-3, [1, 2]), SOURCES["cubes"][1:3])
    with pytest.raises(ArgumentError, match="dim must be 0"):
        array.index_select(1, ids)
    with pytest.raises(IdError, match="one axis"):
        array.index_select(0, 3)
    with pytest.raises(IdError, match="mask"):
        array.index_select(0, np.ones(ROWS, bool))


@pytest.mark.parametrize("name", SOURCES)
def test_it_looks_like_the_array(arrays: Any, name: str) -> None:
    array, source = arrays[name], SOURCES[name]
    assert (array.shape, array.dtype, array.ndim, len(array)) == (
        source.shape,
        source.dtype,
        source.ndim,
        ROWS,
    )
    assert array
    assert name in repr(array)


# Memory.


def test_memory_is_given(several: featstore.Store) -> None:
    plain = several.table("wide")
    assert isinstance(plain, featstore.Table)
    with pytest.raises(NotInMemoryError, match=r"store\.table\('wide', memory=\.\.\.\)\[ids\]"):
        plain[3]
    with pytest.raises(ArgumentError, match="give memory="):
        several.table("wide", static=None)  # type: ignore[call-overload]
    with pytest.raises(BudgetError):
        several.table("wide", memory=1000)
    with pytest.raises(ArgumentError, match="tables= is of a reader"):
        several.table("wide", memory=MEMORY, tables=["cubes"])
    with pytest.raises(UnknownNameError, match="'wide'"):
        several.table("wid", memory=MEMORY)
    with several.table("wide", memory=MEMORY) as array:
        assert sum(array.memory().values()) == 4 * 2**20


def test_all_rows_come_where_they_fit(several: featstore.Store, tmp_path: Path, pack: PackSmall) -> None:
    for name, source in SOURCES.items():
        with several.table(name, memory=MEMORY) as array:
            assert np.asarray(array).tobytes() == source.tobytes()
    with several.table("wide", memory=MEMORY) as array:
        assert np.asarray(array, np.float64).dtype == np.float64
        with pytest.raises(ArgumentError, match="copy=False"):
            array.__array__(copy=False)
    rows = np.random.default_rng(0).standard_normal((2000, 100)).astype(np.float32)
    with pack(tmp_path / "larger", rows) as store, store.table("features", memory="700KiB") as array:
        for take in (np.asarray, torch.from_dlpack, np.from_dlpack):
            with pytest.raises(NotInMemoryError, match="800,000 bytes"):
                take(array)
        np.testing.assert_array_equal(array[-10:], rows[-10:])
    with (
        featstore.open(tmp_path / "larger") as store,
        store.table("features", memory="700KiB", columns=[3]) as array,
    ):
        asked, read = [], array.source.read
        array.source.read = lambda ids, **to: asked.append(len(ids["features"])) or read(ids, **to)
        np.testing.assert_array_equal(np.asarray(array), rows[:, [3]])
    assert sum(asked) == 2000
    assert max(asked) * rows[0].nbytes < 100 * 1024  # whole rows, of which columns are cut


def test_rows_are_not_gone_through_one_by_one(arrays: Any) -> None:
    for look in (iter, list, lambda array: 3 in array):
        with pytest.raises(TypeError):
            look(arrays["wide"])
    with pytest.raises(NotInMemoryError, match="take blocks"):
        iter(arrays["wide"])


# Other processes.


def test_it_is_pickled_as_a_handle(own: Path, pack: PackSmall, features: np.ndarray) -> None:
    with featstore.open(own) as store, store.table("features", memory=MEMORY) as array:
        pickled = pickle.dumps(array)
        assert len(pickled) < 20_000  # the manifest, and no rows
        with pickle.loads(pickled) as other:
            np.testing.assert_array_equal(other[[3, 1]], features[[3, 1]])
            other.close()
            with pytest.raises(ClosedError):
                other[3]
        pack(own, -features, overwrite=True).close()
        with pickle.loads(pickled) as other:  # of the same generation, while that is held
            np.testing.assert_array_equal(other[[3, 1]], features[[3, 1]])
    shutil.rmtree(own / "g000001")
    with pytest.raises(IncompleteStoreError, match="has been removed"):
        pickle.loads(pickled)


def test_arrays_of_one_reader_share_one_where_they_go(arrays: Any) -> None:
    first, second = pickle.loads(pickle.dumps([arrays["wide"], arrays["half"]]))
    with first.source:
        assert first.source is second.source
        np.testing.assert_array_equal(first[3], SOURCES["wide"][3])
        first.close()  # the source was given, and stays open
        assert second[3].tobytes() == SOURCES["half"][3].tobytes()


def test_a_forked_child_reads(arrays: Any) -> None:
    assert in_child(lambda: np.array_equal(arrays["wide"][[1, 2]], SOURCES["wide"][[1, 2]])) == 0


def test_over_a_shared_buffer(several: featstore.Store) -> None:
    with featstore.SharedBuffer(several, memory="8MiB") as shared, shared.client() as client:
        array = featstore.TableArray(client, "wide")
        assert array.shape == SOURCES["wide"].shape
        np.testing.assert_array_equal(array[-3:], SOURCES["wide"][-3:])
        assert in_child(lambda: np.array_equal(array[7], SOURCES["wide"][7])) == 0
        with pytest.raises(NotInMemoryError):
            np.asarray(array)


def test_over_tiers(several: featstore.Store) -> None:
    with several.table("half", memory=MEMORY, policy="lru", device="cpu", device_memory="1MiB") as array:
        for _ in range(2):
            found = array[[3, 3, 1]]
            assert isinstance(found, torch.Tensor)  # there, on the device
            assert torch.equal(found.float(), torch.from_numpy(SOURCES["half"][[3, 3, 1]].astype(np.float32)))
        assert np.asarray(array).tobytes() == SOURCES["half"].tobytes()


def test_wrong_sources(several: featstore.Store, arrays: Any) -> None:
    with pytest.raises(ArgumentError, match="which"):
        featstore.TableArray(arrays["wide"].source)
    with pytest.raises(UnknownNameError):
        featstore.TableArray(arrays["wide"].source, "no")
    with pytest.raises(ArgumentError, match="source"):
        featstore.TableArray(several, "wide")


# As a data set of torch.

MANNERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1, "multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
]


@pytest.mark.parametrize("how", MANNERS, ids=["here", "fork", "spawn"])
def test_a_data_loader_takes_it(several: featstore.Store, how: dict[str, Any]) -> None:
    with several.table("wide", memory=MEMORY) as array:
        batches = list(DataLoader(array, batch_size=32, timeout=60 if how else 0, **how))
    assert [len(batch) for batch in batches] == [32, 32, 6]
    assert torch.equal(torch.cat(batches), torch.from_numpy(SOURCES["wide"]))


def test_data_sets_of_it(arrays: Any) -> None:
    for name in ("wide", "half", "numbers"):
        batch = next(iter(DataLoader(Subset(arrays[name], [7, 3]), batch_size=2)))
        assert torch.equal(batch, arrays[name][torch.tensor([7, 3])])
    sampler = BatchSampler(SequentialSampler(arrays["wide"]), 40, drop_last=False)
    whole = list(DataLoader(arrays["wide"], batch_size=None, sampler=sampler))  # one read, no collating
    assert torch.equal(torch.cat(whole), torch.from_numpy(SOURCES["wide"]))
    keep = DataLoader(arrays["records"], batch_size=3, collate_fn=np.array)
    assert next(iter(keep)).tobytes() == SOURCES["records"][:3].tobytes()


# Handed on without a copy.


class _DLTensor(ctypes.Structure):
    """The head of what a capsule of DLPack points to, after its header ``dlpack.h``, version 0.8."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def described(rows: Any) -> _DLTensor:
    """What a consumer of DLPack sees of rows: what JAX, which need not be here, would be given."""
    capsule = rows.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    seen = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    seen.kept = capsule
    return seen


@pytest.mark.parametrize("ids", [np.array([5, 1, 5]), torch.tensor([5, 1, 5])], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", ["wide", "cubes", "numbers", "half"])
def test_what_is_read_is_handed_on_without_a_copy(arrays: Any, name: str, ids: Any) -> None:
    rows = arrays[name][ids]
    if name == "half" and isinstance(rows, np.ndarray):
        return  # NumPy's own protocol knows no bfloat16: ask with a tensor
    address = rows.ctypes.data if isinstance(rows, np.ndarray) else rows.data_ptr()
    seen = described(rows)
    assert seen.data + seen.byte_offset == address
    assert address % 64 == 0  # or JAX would copy
    assert tuple(seen.device) == arrays[name].__dlpack_device__() == (1, 0)
    assert tuple(seen.shape[: seen.ndim]) == rows.shape
    assert seen.bits == 8 * rows.itemsize
    assert torch.from_dlpack(rows).data_ptr() == address
    if name != "half":
        assert np.from_dlpack(rows).ctypes.data == address


@pytest.mark.parametrize("name", ["wide", "cubes", "numbers", "half"])
def test_all_of_it_is_handed_on(arrays: Any, name: str) -> None:
    array, source = arrays[name], SOURCES[name]
    assert torch.from_dlpack(array).shape == source.shape
    assert torch.equal(torch.from_dlpack(array), array[torch.arange(ROWS)])
    if name != "half":
        np.testing.assert_array_equal(np.from_dlpack(array), source)
    with pytest.raises(ArgumentError, match="DLPack has no type"):
        torch.from_dlpack(arrays["records"])
