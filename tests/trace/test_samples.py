"""Samples come back as they were, whatever they are made of; bytes from a stranger do no harm."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tracemalloc
import warnings
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from featstore.errors import FormatError, SourceError
from featstore.sampling.neighbors import SampledSubgraph
from featstore.trace import samples
from featstore.trace.sample_decoder import decode
from featstore.trace.sample_encoder import encode

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, when PyG scripts its own classes
    import torch
    from torch_geometric.data import Batch, Data, HeteroData

_DTYPES = [
    "?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", ">i4",
    ">f8", ">u2", ">c16", "<M8[s]", ">m8[ns]", "S3", "<U2", ">U4", "V5", [("a", "u1"), ("b", ">f8", (2,))],
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal in type and value; NaN equals itself, byte orders do not matter."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(_key, one)) == list(map(_key, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.str_ | np.bytes_):
        return len(one) == len(other) and all(one[k : k + 1] == other[k : k + 1] for k in range(len(one)))
    if isinstance(one, np.ndarray | np.generic):
        ours, theirs = np.asarray(one), np.asarray(other)
        alike = (ours.dtype.newbyteorder("<"), ours.shape) == (theirs.dtype, theirs.shape)
        return alike and ours.astype(theirs.dtype).tobytes() == theirs.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    return repr(one) == repr(other)


def _key(key: Any) -> str:
    return repr(key)


def _bits(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())
        if tensor.numel()
        else b""
    )


def arrays() -> st.SearchStrategy[Any]:
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    made = st.builds(_filled, st.sampled_from(_DTYPES), shapes, st.binary(max_size=64))
    return st.one_of(made, made.map(lambda a: a.T))


def _filled(dtype: Any, shape: tuple[int, ...], data: bytes) -> Any:
    """An array of these bytes, again and again, where any bytes make a value."""
    kind = np.dtype(dtype)
    if kind.kind in "fcU?" or kind.names:
        return (
            np.frombuffer(data or b"a", np.uint8)[:1]
            .astype("i8")
            .repeat(math.prod(shape))
            .reshape(shape)
            .astype(kind)
        )
    size = math.prod(shape) * kind.itemsize
    return (
        np.frombuffer((data or b"b") * (size // max(1, len(data)) + 1), np.uint8, size)
        .view(kind)
        .reshape(shape)
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(
        [
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.str_(""),
            np.str_("é\0"),
            np.bytes_(b"x\0"),
            np.datetime64("2020-01-01", "D"),
            np.zeros(1, _DTYPES[-1])[0],
            ml_dtypes.bfloat16(2),
        ]
    ),
)
tensors = st.sampled_from(["int64", "bfloat16", "float32", "bool"]).map(
    lambda n: (torch.arange(6) % 2).to(getattr(torch, n)).reshape(2, 3)
)
atoms = st.text(max_size=3) | st.integers(-5, 5) | st.none()
keys = atoms | st.tuples(atoms, atoms, atoms)
trees = st.recursive(
    scalars | arrays() | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    data = encode(tree)
    assert data.dtype == np.uint8
    assert len(data) % 64 == 0
    assert data.ctypes.data % 64 == 0
    assert same(tree, decode(data))
    assert np.array_equal(encode(tree), data)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_arrays_of_any_dtype(dtype: Any, shape: tuple[int, ...]) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    array = numbers.astype(np.dtype(dtype)) if np.dtype(dtype).kind != "V" else np.zeros(shape, dtype)
    for one in (array, np.array(array, order="F"), array.T, array[..., ::-1] if array.ndim else array):
        assert same(one, decode(encode(one)))


def test_arrays_are_views_writable_where_the_data_are() -> None:
    data = encode({"a": np.arange(100), "t": torch.arange(7), "b": [np.ones((2, 2), np.float32)]})
    found: Any = decode(data)
    for array in (found["a"], found["b"][0], found["t"].numpy()):
        assert np.shares_memory(array, data)
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
    found["a"][0] = 77
    found["t"][1] = 78
    again: Any = decode(data)
    assert (again["a"][0], again["t"][1]) == (77, 78)
    data.flags.writeable = False
    frozen: Any = decode(data)
    assert not frozen["a"].flags.writeable
    frozen["t"][0] = 99  # torch knows no read-only tensors: this one is a copy
    assert int(decode(data)["t"][0]) == 0  # type: ignore[index]


def test_data_at_an_odd_address() -> None:
    data = encode([np.arange(5), torch.arange(5), np.uint8(3)])
    room = np.empty(len(data) + 1, np.uint8)
    room[1:] = data
    assert same(decode(room[1:]), decode(data))


@pytest.mark.parametrize("name", sorted(samples.TORCH_DTYPES))
def test_tensors(name: str) -> None:
    dtype = getattr(torch, name)
    flat = torch.arange(24, dtype=torch.uint8).repeat(dtype.itemsize)
    some = (flat % 2).view(torch.bool)[:24] if name == "bool" else flat.view(dtype)
    for tensor in (some, some[:6].reshape(2, 3).t(), some[0], some[:0].reshape(0, 4)):
        assert same(tensor, decode(encode(tensor)))


def test_other_tensors() -> None:
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    assert torch.equal(decode(encode(conjugate)), torch.tensor([1 - 2j, -3j]))  # type: ignore[arg-type]
    assert same(decode(encode(torch.Size([2, 3]))), torch.Size([2, 3]))
    bfloat: Any = decode(encode(np.arange(4).astype(ml_dtypes.bfloat16)))
    assert bfloat.dtype == ml_dtypes.bfloat16
    assert bfloat.tolist() == [0, 1, 2, 3]


def test_pyg_data_with_and_without_features() -> None:
    data = Data(
        x=torch.rand(3, 2),
        edge_index=torch.tensor([[0, 1], [2, 2]]),
        y=torch.tensor([1, 2, 3]),
        n_id=torch.arange(3),
    )
    data.num_nodes = 3
    data.batch_size, data.names, data.nested = 2, ["a", "b"], {"k": torch.ones(1, dtype=torch.bfloat16)}
    found: Any = decode(encode(data))
    assert type(found) is Data
    assert same(found.to_dict(), data.to_dict())
    assert found.num_nodes == 3
    slim: Any = decode(encode(data, drop={"x", "nested"}))
    assert set(slim.keys()) == set(data.keys()) - {"x", "nested"}
    assert torch.equal(slim.edge_index, data.edge_index)
    assert len(encode(data, drop={"x"})) < len(encode(data))


def test_pyg_hetero_data() -> None:
    data = HeteroData()
    data["paper"].x, data["paper"].n_id = torch.rand(4, 2), torch.arange(4)
    data["author"].x, data["author"].n_id = torch.rand(2, 3), torch.arange(2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [3, 3]])
    data["author", "writes", "paper"].e_id = torch.empty(0, dtype=torch.int64)
    data.epoch = 7
    found: Any = decode(encode(data))
    assert type(found) is HeteroData
    assert same(found.to_dict(), data.to_dict())
    assert (found.node_types, found.edge_types, found.epoch) == (data.node_types, data.edge_types, 7)
    slim: Any = decode(encode(data, drop=["x"]))
    assert all("x" not in store for store in slim.node_stores)
    assert torch.equal(slim["paper"].n_id, data["paper"].n_id)


def test_pyg_batches_of_graphs() -> None:
    """They come apart again into what they were made of, and say what they were joined from."""
    graphs = [
        Data(x=torch.arange(2.0 * n).reshape(n, 2), edge_index=torch.tensor([[0], [n - 1]]), name=f"g{n}")
        for n in (2, 3, 1)
    ]
    joined = Batch.from_data_list(graphs, follow_batch=["x"])
    found: Any = decode(encode(joined))
    assert type(found) is type(joined)
    assert same(found.to_dict(), joined.to_dict())
    assert found.num_graphs == 3
    for one, wanted in zip(found.to_data_list(), graphs, strict=True):
        assert same(one.to_dict(), wanted.to_dict())

    typed = [HeteroData({"a": {"x": torch.ones(n, 1)}, ("a", "to", "a"): {
        "edge_index": torch.zeros((2, n), dtype=torch.int64)}}) for n in (2, 4)]  # fmt: skip
    both: Any = decode(encode(Batch.from_data_list(typed)))
    assert both.num_graphs == 2
    assert same(both["a"].ptr, torch.tensor([0, 2, 6]))
    for one, wanted in zip(both.to_data_list(), typed, strict=True):
        assert same(one.to_dict(), wanted.to_dict())
    own: Any = decode(encode(Batch(x=torch.ones(2, 1), batch=torch.tensor([0, 1]))))
    assert same(own.batch, torch.tensor([0, 1])), "one that was not made of a list"


def test_a_pyg_batch_comes_apart_without_what_was_dropped() -> None:
    graphs = [Data(x=torch.ones(n, 2), y=torch.full((n,), n), num_nodes=n) for n in (2, 3)]
    found: Any = decode(encode(Batch.from_data_list(graphs), drop=("x",)))
    assert "x" not in found
    assert all(same(one.y, wanted.y) for one, wanted in zip(found.to_data_list(), graphs, strict=True))
    typed = [HeteroData({"x": {"x": torch.ones(n, 1), "y": torch.full((n,), n)}}) for n in (2, 4)]
    both: Any = decode(encode(Batch.from_data_list(typed), drop=("x",)))
    for one, wanted in zip(both.to_data_list(), typed, strict=True):
        assert "x" not in one["x"]
        assert same(one["x"].y, wanted["x"].y)


def test_our_own_mini_batch() -> None:
    batch = SampledSubgraph(*(np.arange(n) for n in (5, 4, 4, 4)), (2, 3), (4,))
    encoded = encode({"batch": batch})
    assert b"MiniBatch" in bytes(encoded), "as formats/v1/trace.md calls it"
    found: Any = decode(encoded)
    assert type(found["batch"]) is SampledSubgraph
    assert same(vars(found["batch"]), vars(batch))
    for numbers, trees in ((np.arange(4), None), (None, np.arange(5)), (np.arange(4), np.arange(5))):
        batch = SampledSubgraph(*(np.arange(n) for n in (5, 4, 4, 4)), (2, 3), (4,), numbers, trees)
        assert same(vars(decode(encode(batch))), vars(batch))


def test_torch_is_loaded_by_torch_alone() -> None:
    code = (
        "import sys, numpy as np\nfrom featstore.trace.sample_decoder import decode\n"
        "from featstore.trace.sample_encoder import encode\n"
        "from featstore.sampling.neighbors import SampledSubgraph\na = np.arange(3)\n"
        "decode(encode({'a': a, ('p', 'to', 'q'): [1, SampledSubgraph(a, a, a, a, (1,), (1,))]}))\n"
        "print([m for m in ('torch', 'torch_geometric') if m in sys.modules])\n"
        "decode(np.frombuffer(bytes.fromhex(sys.argv[1]), np.uint8))\n"
        "print([m for m in ('torch', 'torch_geometric') if m in sys.modules])\n"
    )
    tensor = encode(torch.arange(2)).tobytes().hex()
    done = subprocess.run(
        [sys.executable, "-c", code, tensor], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["[]", "['torch']"]


class _Mine(dict):  # type: ignore[type-arg]
    pass


class _Own(Data):  # type: ignore[misc]
    """A subclass would come back as something else."""


def _cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("tree", "place", "advice"),
    [
        ({"edge_index": [1, 2, 3, object()]}, r"batch\['edge_index'\]\[3\] is a object", "NumPy arrays"),
        ({("a", "to", "b"): {1, 2}}, r"batch\[\('a', 'to', 'b'\)\] is a set", r"sorted\(\.\.\.\)"),
        ((np.array([None]),), r"batch\[0\] is an array of dtype object", "leave it out"),
        ([np.ones(2, ml_dtypes.float8_e4m3fn)], r"batch\[0\] is an array of dtype float8", "convert"),
        ([np.ma.array([1])], r"batch\[0\] is a numpy.ma", "asarray"),
        (_Mine(), r"batch is a .*_Mine", r"dict\(\.\.\.\)"),
        ([torch.ones(2, requires_grad=True)], "requires grad", "detach"),
        ([torch.eye(2).to_sparse()], "sparse_coo", "dense"),
        ([torch.nn.Parameter(torch.ones(1))], "is a Parameter", "as_subclass"),
        ([torch.empty(2, device="meta")], "on meta", "cpu"),
        ({frozenset(): 1}, "key of type frozenset", "tuple"),
        ({"a": "\ud800"}, r"batch\['a'\] is text that is no Unicode", "bytes"),
        (_cycle(), r"batch(\[0\])+ lies more than 64 levels deep", "flatter"),
        (Data(adj=torch.eye(2).to_sparse()), r"batch\.adj is a tensor", "dense"),
        (Batch.from_data_list([_Own(x=torch.ones(1, 1))]), "Batch of _Own", "Data or HeteroData"),
        ([np.zeros((1,) * 33)], "33 axes", "reshape"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_named(tree: Any, place: str, advice: str) -> None:
    with pytest.raises(SourceError, match=place) as error:
        encode(tree)
    assert "cannot be stored: " in str(error.value)
    assert re.search(advice, str(error.value))


def test_the_deepest_tree() -> None:
    tree: Any = 2**70
    for _ in range(64):
        tree = [tree]
    assert same(decode(encode(tree)), tree)
    with pytest.raises(SourceError, match="levels deep"):
        encode([tree])
    for leaf in (
        Data(a=2**70),
        HeteroData({"p": {"a": 2**70}}),
        SampledSubgraph(*[2**70] * 6),
        np.float32(1),
        {(1, 2): 2**70},
    ):  # type: ignore[arg-type]
        kept = 0
        for levels in range(60, 66):
            nested: Any = leaf
            for _ in range(levels):
                nested = [nested]
            try:
                data = encode(nested)
            except SourceError as error:
                assert "levels deep" in str(error)
                continue
            decode(data)  # what was written can be read
            kept += 1
        assert 3 <= kept <= 5


# Bytes from a stranger.

_SEED_DATA = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), y=torch.tensor([1.0]))
_SEED_GRAPH = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]))
_SEED_HETERO = HeteroData(
    {"p": {"n_id": torch.arange(3)}, ("p", "t", "p"): {"edge_index": torch.zeros(2, 1)}}
)
_SEEDS = [
    encode(
        {
            "a": np.arange(6).reshape(2, 3),
            ("x", "y"): [1.5, None, "text", b"bytes", 2**70, (1j, np.float32(3))],
        }
    ),
    encode(
        [
            torch.arange(4, dtype=torch.bfloat16),
            np.array(["ab", "c"]),
            np.zeros(2, [("a", "u1"), ("b", "<f8")]),
        ]
    ),
    encode([Batch.from_data_list([_SEED_GRAPH] * 2), Batch.from_data_list([_SEED_HETERO] * 2)]),
    encode([_SEED_DATA, _SEED_HETERO, SampledSubgraph(*(np.arange(2) for _ in range(4)), (1,), (1,))]),
]


@settings(max_examples=400)
@given(st.sampled_from(range(len(_SEEDS))), st.data())
def test_damaged_bytes_are_a_sample_or_an_error(which: int, data: st.DataObject) -> None:
    """No mutation reads outside of the data, runs for long, or takes more memory than a few times the
    data."""
    raw = bytearray(_SEEDS[which].tobytes())
    header = 8 + int.from_bytes(raw[4:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = min(data.draw(st.integers(0, header) | st.integers(0, len(raw) - 1)), len(raw) - 1)
        way = data.draw(st.sampled_from(["set", "flip", "cut", "insert"]))
        if way == "set":
            raw[place] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xC0, 0xDB, 0xDD, 0xDF, 0xFF]))
        elif way == "flip":
            raw[place] ^= 1 << data.draw(st.integers(0, 7))
        elif way == "cut":
            del raw[place : place + data.draw(st.integers(1, 64))]
        else:
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=16))
        if not raw:
            break
    _is_harmless(np.frombuffer(bytes(raw), np.uint8))


def _is_harmless(raw: Any) -> None:
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = decode(raw)
        for array in _arrays_in(found):
            assert array.nbytes <= len(raw)
    except FormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3_000_000


def _arrays_in(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [a for value in tree.values() for a in _arrays_in(value)]
    if isinstance(tree, list | tuple):
        return [a for value in tree for a in _arrays_in(value)]
    return [tree] if isinstance(tree, np.ndarray) else []


def crafted(tree: Any, arrays: bytes = b"") -> Any:
    header = msgspec.msgpack.encode(tree)
    raw = b"fss1" + len(header).to_bytes(4, "little") + header
    raw += bytes(-len(raw) % 64) + arrays
    return np.frombuffer(raw + bytes(-len(raw) % 64), np.uint8)


@pytest.mark.parametrize(
    "tree",
    [
        ["n", "int64", [2**62, 4]], ["n", "int64", [9]], ["n", "int64", [-1]], ["n", "int64", [1.0]],
        ["n", "int64", 8], ["n", "int64"], ["n", "object", [1]], ["n", 'numpy:"|O"', [1]],
        ["n", 'numpy:["a"', [1]], ["n", "numpy:" + "[" * 5000, [1]], ["n", "int64", [1] * 40],
        ["n", 'numpy:[["a","<f4",[1000000000,1000000000]]]', [1]], ["n", 'numpy:"|V2147483647"', [3]],
        ["n", "x" * 70_000, [1]], ["n", "int64", [2**63, 0]], ["x", "int64", [2**63, 0]],
        ["x", "int64", [2**62]], ["x", "cuda", [1]], ["x", "load", [1]], ["s", "int64", b"123"],
        ["s", "str", b"1"], ["s", "int64", "12345678"], ["c", 1, 2], ["i", "1"], ["i"], ["d", 1],
        ["d", ["l"], 1], ["d", 1, 2, 1, 3], ["d", ["n", "int64", [0]], 1], ["z", "a"], ["z", 2**63],
        ["m", "Store", 1], ["m", "MiniBatch", 1], ["m", ["l"], 1], ["m"], ["D", 1], ["D", ["d", "_store", 1]],
        ["D", ["d", 1, 1]], ["D"], ["B"], ["B", ["d"], 1, ["d"], ["d"]], ["B", ["D", ["d"]], 1],
        ["B", ["D", ["d"]], "1", ["d"], ["d"]], ["H", "a", 1], ["H", ["t", "a"], ["d"]], ["H", 1, ["d"]],
        ["H", "a", ["d", "_mapping", 1]], ["H", "a"], [], ["?"], [1], [None], {"d": 1},
        msgspec.msgpack.Ext(1, b"x"), ["l", ["l", {}]],
    ],
    ids=lambda tree: re.sub(" at 0x.*", "", repr(tree)[:40]),
)  # fmt: skip
def test_a_header_that_lies_is_refused(tree: Any) -> None:
    raw = crafted(tree, bytes(64))
    with pytest.raises(FormatError, match=r"no sample|cannot read the dtype|unknown dtype"):
        decode(raw)
    _is_harmless(raw)


def test_headers_that_claim_much_take_little() -> None:
    many = ["l", *[["n", "int64", [8]]] * 1000]  # a thousand arrays over the same 64 bytes
    for raw in (crafted(many, bytes(64)), crafted(["l", *[["n", "int64", [0, 2**40]]] * 100])):
        _is_harmless(raw)
    for head in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 500,
        b"\x91" * 5000,
    ):
        raw = b"fss1" + len(head).to_bytes(4, "little") + head
        _is_harmless(np.frombuffer(raw + bytes(-len(raw) % 64), np.uint8))


def test_a_header_is_bounded_in_what_is_written_and_in_what_is_read() -> None:
    most = 8 * 2**20
    assert decode(encode(bytes(most - 5))) == bytes(most - 5)  # five bytes say that it is so many
    with pytest.raises(SourceError, match="8,388,609 bytes, and may take 8,388,608: keep large"):
        encode(bytes(most - 4))
    lists = b"\xdd" + (most - 4).to_bytes(4, "big") + b"\x90" * (most - 4)
    with pytest.raises(FormatError, match="a header of 8,388,609 bytes in 8,388,672; it may have 8,388,608"):
        decode(np.frombuffer(b"fss1" + len(lists).to_bytes(4, "little") + lists + bytes(55), np.uint8))


def test_no_bytes_too_few_too_many() -> None:
    whole = encode([1, np.arange(3)])
    for raw in (
        whole[:0],
        whole[:7],
        whole[:-64],
        np.concatenate([whole, np.zeros(64, np.uint8)]),
        np.zeros(64, np.uint8),
    ):
        with pytest.raises(FormatError, match="no sample"):
            decode(raw)
    with pytest.raises(ValueError, match="uint8"):
        decode(b"fss1")  # type: ignore[arg-type]
