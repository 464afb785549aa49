"""Names of dtypes: every one that a table may have goes there and back, and nothing else gets through."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from featstore.base.dtypes import bfloat16, dtype_from_name, dtype_name, is_bfloat16, zarr_storage
from featstore.errors import FormatError, SourceError
from featstore.packing.sources.opening import open_rows

CORE = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip
OPAQUE = ["S5", "U3", "V7", "M8[ns]", "m8[D]", "M8", "longdouble", "clongdouble"]


@pytest.mark.parametrize("name", CORE)
def test_core_names(name: str) -> None:
    assert dtype_name(np.dtype(name)) == name
    assert dtype_name(np.dtype(name).newbyteorder(">")) == name
    back = dtype_from_name(name)
    assert back == np.dtype(name)
    assert zarr_storage(back) == (name, ())


def test_bfloat16() -> None:
    assert dtype_name(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
    assert dtype_from_name("bfloat16") == bfloat16()
    assert is_bfloat16(bfloat16())
    assert not is_bfloat16(np.dtype("f2"))
    assert zarr_storage(bfloat16()) == ("uint16", ())


@pytest.mark.parametrize("text", OPAQUE)
def test_opaque_names(text: str) -> None:
    dtype = np.dtype(text)
    name = dtype_name(dtype)
    assert name.startswith("numpy:")
    assert dtype_from_name(name) == dtype.newbyteorder("<")
    assert zarr_storage(dtype) == ("uint8", (dtype.itemsize,))


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "<f4"), ("b", "<i8", (2, 3))]),
        np.dtype([("x", [("y", "<u2"), ("z", "S3")]), ("w", "<M8[s]")]),
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
        np.dtype({"names": ["b", "a"], "formats": ["<f4", "<i2"], "offsets": [4, 12], "itemsize": 20}),
        np.dtype([(("title", "name"), "<f4")]),
    ],
)
def test_structures(dtype: np.dtype) -> None:
    back = dtype_from_name(dtype_name(dtype))
    assert back.itemsize == dtype.itemsize
    assert back.names == dtype.names
    for name in dtype.names:
        assert back.fields[name][:2] == dtype.fields[name][:2]


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(ml_dtypes.float8_e4m3fn),
        np.dtype(ml_dtypes.int4),
        np.dtype([("a", "<f4"), ("b", ml_dtypes.bfloat16)]),
        np.dtype([("a", [("b", ml_dtypes.float8_e5m2, (2,))])]),
    ],
)
def test_types_that_packages_add_would_come_back_as_bytes(dtype: np.dtype) -> None:
    with pytest.raises(SourceError, match="not NumPy's own"):
        dtype_name(dtype)
    with pytest.raises(SourceError, match=r"<array>.*not NumPy's own"):
        open_rows(np.zeros(3, dtype))


@given(hnp.array_dtypes() | hnp.scalar_dtypes())
@settings(max_examples=50)
def test_any_numpy_dtype_goes_there_and_back_or_is_refused(dtype: np.dtype) -> None:
    try:
        name = dtype_name(dtype)
    except SourceError:
        assert dtype.itemsize == 0 or dtype.subdtype is not None
        return
    assert dtype_from_name(name) == dtype.newbyteorder("<")
    assert dtype_from_name(name).itemsize == dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (np.dtype(object), "Python objects"),
        (np.dtype([("a", object)]), "Python objects"),
        (np.dtype("S0"), "no size"),
        (np.dtype("V0"), "no size"),
        (np.dtype([]), "no size"),
        (np.dtype(("<f4", (3,))), "row's shape"),
        (
            np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2], "itemsize": 6}),
            "overlap",
        ),
    ],
)
def test_unusable_dtypes_are_refused(dtype: np.dtype, why: str) -> None:
    with pytest.raises(SourceError, match=why):
        dtype_name(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "", "float", "f4", "<f4", "object", "float128", "numpy:", "numpy:f4", 'numpy:"|O"', 'numpy:"<f4',
        "numpy:[]", "numpy:{}", "numpy:7", 'numpy:[["a"]]', 'numpy:[["a","<f4",5]]', 'numpy:[["a","|O"]]',
        'numpy:"|S0"', 'numpy:"|V0"', "numpy:null", 'numpy:[["a","<f4"],["a","<f4"]]', 'numpy:">f4"',
        "numpy:" + "[" * 100_000,
    ],
)  # fmt: skip
def test_foreign_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="dtype"):
        dtype_from_name(name)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.text(max_size=5)
    | st.sampled_from(["<f4", "|S3", "a", "|O", "<U2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(json_values)
@settings(max_examples=300)
def test_any_json_as_a_dtype_is_a_dtype_or_a_format_error(value: object) -> None:
    try:
        dtype = dtype_from_name("numpy:" + json.dumps(value))
    except FormatError:
        return
    assert dtype.itemsize > 0
    assert not dtype.hasobject
