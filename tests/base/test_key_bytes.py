"""Keys as users have them, in blocks: the kernels against plain Python, and what is no key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.base.keys import KeyBlock, as_keys, find_no_utf8, joined_keys
from featstore.errors import SourceError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=20)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


def plain_hash(key: int | str) -> int:
    """The hash as the format has it."""
    word = key % 2**64 if isinstance(key, int) else 0xCBF29CE484222325
    for byte in key.encode() if isinstance(key, str) else ():
        word = (word ^ byte) * 0x100000001B3 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def forms(keys: list[Any]) -> list[Any]:
    """The same keys in all the forms that there are."""
    if all(isinstance(key, str) for key in keys):
        fixed = [key for key in keys if not key.endswith("\0")]
        arrow = [pa.array(keys, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
        arrow += [pa.array(["x", *keys], pa.string())[1:], pa.chunked_array([keys, []], pa.string())]
        arrow.append(pa.array(keys, pa.string()).dictionary_encode())
        found = [keys, tuple(keys), np.array(keys, object), np.array(keys, np.dtypes.StringDType()), *arrow]
        return [*found, np.array(keys, "U"), np.array(keys, ">U9")] if len(fixed) == len(keys) else found
    numbers = np.array(keys, np.int64)
    return [
        keys,
        numbers,
        numbers.astype(">i8"),
        np.array(keys, object),
        torch.tensor(numbers),
        pa.array(numbers),
    ]


@settings(max_examples=35, deadline=None)
@given(TEXTS | NUMBERS.filter(len))
def test_all_forms_are_the_same_keys(keys: list[Any]) -> None:
    for form in forms(keys):
        block = as_keys(form, "keys")
        assert block.kind == ("int64" if keys and isinstance(keys[0], int) else "utf8") or not keys
        if not keys:
            assert len(block) == 0
            continue
        assert block.array().tolist() == keys
        assert block.hashes().tolist() == [plain_hash(key) for key in keys]
        places = np.arange(len(keys))[::-1].copy()
        assert block.take(places).array().tolist() == keys[::-1]
        halves = [block.part(0, len(keys) // 2), block.part(len(keys) // 2, len(keys))]
        assert joined_keys(halves).array().tolist() == keys
        assert block.key(len(keys) - 1) == keys[-1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=6))
def test_utf8_is_what_python_takes(strings: list[bytes]) -> None:
    def good(raw: bytes) -> bool:
        try:
            raw.decode()
        except UnicodeDecodeError:
            return False
        return True

    data = np.frombuffer(b"".join(strings), np.uint8)
    ends = np.cumsum([0, *map(len, strings)])
    wrong = [k for k, raw in enumerate(strings) if not good(raw)]
    assert find_no_utf8(data, ends) == (wrong[0] if wrong else -1)


def test_every_lead_of_utf8() -> None:
    """Four bytes drawn freely seldom are one character: those at the edges, one by one."""
    points = [
        0x7F,
        0x80,
        0x7FF,
        0x800,
        0xFFF,
        0x1000,
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x3FFFF,
        0x40000,
        0x10FFFF,
    ]
    texts = [chr(point) for point in points]
    assert as_keys(np.array(texts), "keys").array().tolist() == texts
    for raw in (
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
    ):
        assert find_no_utf8(np.frombuffer(raw, np.uint8), np.array([0, len(raw)])) == 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([1, "a"], "row 1 is 'a'"),
        (["a", None], "row 1 is None"),
        (np.array(["a", float("nan")], object), "row 1 is nan"),
        ([True, 2], "row 0 is True"),
        ([1.0, 2.0], "row 0 is 1.0"),
        (np.zeros(2), "not float64"),
        (np.zeros(2, bool), "not bool"),
        (np.zeros((2, 2), np.int64), "one axis"),
        (np.array([2**63], np.uint64), "does not fit int64"),
        ([2**63], "does not fit int64"),
        ([b"a"], "row 0 is b'a'"),
        (np.array([b"\xff"]), "no UTF-8"),
        (["\ud800"], "surrogate"),
        (["x" * (2**16 + 1)], "65,537 bytes"),
        (pa.array(["a", None]), "row 1 has no key"),
        (pa.array([1.5]), "not double"),
        (3, "not 3"),
    ],
)  # fmt: skip
def test_what_is_no_key(keys: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        as_keys(keys, "keys")


def test_blocks_pass_through() -> None:
    block = KeyBlock(np.arange(3))
    assert as_keys(block, "keys") is block


def test_a_null_among_the_values_of_a_dictionary_is_no_key() -> None:
    for keys in (["a", None, "c"], [4, None, 2]):
        column = pa.array(keys).dictionary_encode(null_encoding="encode")
        assert column.null_count == 0
        for form in (column, pa.chunked_array([column])):
            with pytest.raises(SourceError, match=r"row 1 has no key \(a null\)"):
                as_keys(form, "keys")
