"""Wrong values by kind: what an argument of that kind must refuse, whichever function takes it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

with warnings.catch_warnings():
    # PyG scripts functions while it is imported, which newer Pythons and torch call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch
    import torch_geometric.sampler  # noqa: F401

HUGE = 2**70


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # of what is not finished in torch
    NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


class Unprintable:
    """An object of no use whatever."""

    def __repr__(self) -> str:
        return "<unprintable>"


NONSENSE: Mapping[str, Any] = {
    "an object": Unprintable(), "a set": {1, 2}, "a type": int, "a complex number": 1j, "bytes": b"3",
    "a nested list": [[[3]]], "a meta tensor": torch.empty(3, dtype=torch.int64, device="meta"),
    "a nested tensor": torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
    "an array of objects": np.array([object(), None]),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What an argument must refuse; ``says``: a pattern that the message has, by default the argument's
    name."""

    wrong: Mapping[str, Any]
    says: str = ""

    def but(self, *labels: str) -> Rule:
        """Without some: they are right there."""
        assert set(labels) <= set(self.wrong), set(labels) - set(self.wrong)
        return Rule({label: value for label, value in self.wrong.items() if label not in labels}, self.says)

    def and_also(self, **more: Any) -> Rule:
        return Rule(
            {**self.wrong, **{label.replace("_", " "): value for label, value in more.items()}}, self.says
        )

    def saying(self, pattern: str) -> Rule:
        return Rule(self.wrong, pattern)

    @property
    def optional(self) -> Rule:
        """None is right."""
        return self.but("None")


@dataclass(frozen=True)
class Anything:
    """An argument of which no value is wrong by itself; ``because`` says why."""

    because: str
    wrong: Mapping[str, Any] = field(default_factory=dict)


def count(least: int | None = 1, most: int | None = None) -> Rule:
    wrong = {
        **NONSENSE, "None": None, "True": True, "a fraction": 3.7, "a whole float": 3.0, "nan": math.nan,
        "infinity": math.inf, "a text": "3", "an empty text": "", "a list": [3], "an empty list": [],
        "a mapping": {"a": 3}, "two numbers": np.array([1, 2]), "one number in an array": np.array([1]),
        "a NumPy float": np.float32(2), "a NumPy bool": np.bool_(True), "huge": HUGE, "far below": -HUGE,
        "very many digits": 10**5000, "a tensor of floats": torch.tensor(1.5),
        "a tensor of bools": torch.tensor(True),
    }  # fmt: skip
    if least is not None:
        wrong["too small"] = least - 1
    if most is not None:
        wrong["too large"] = most + 1
    return Rule(wrong)


def number(above: float | None = 0.0) -> Rule:
    wrong = {
        **NONSENSE, "None": None, "True": True, "nan": math.nan, "infinity": math.inf,
        "minus infinity": -math.inf, "a text": "3", "a list": [3], "two numbers": np.array([1.0, 2.0]),
        "digits without end": 10**400,
    }  # fmt: skip
    if above is not None:
        wrong["too small"] = above - 1
    return Rule(wrong)


FLAG = Rule(
    {
        **NONSENSE,
        "None": None,
        "a text": "no",
        "an empty text": "",
        "zero": 0,
        "one": 1,
        "a fraction": 0.5,
        "an empty list": [],
    }
)
MEMORY = Rule(
    {
        **NONSENSE, "None": None, "True": True, "an empty text": "", "a unit alone": "GiB",
        "an unknown unit": "2 GiBs", "a negative size": "-1GiB", "scientific": "1e9",
        "two sizes": "1GiB 2GiB", "more than text": "2GiB;", "zero": 0, "nothing": "0", "negative": -1,
        "nan": math.nan, "infinity": math.inf, "huge": HUGE, "a huge text": "9999999999TiB",
        "digits": "9" * 5000, "a list": [2**30], "other digits": "٣GiB",
    }
)  # fmt: skip


def choice() -> Rule:
    return Rule(
        {
            **NONSENSE, "None": None, "True": True, "zero": 0, "a number": 3, "an empty text": "",
            "another name": "no-such", "a list": ["auto"], "a long text": "x" * 10_000,
            "several": np.array(["auto", "none"]),
        }
    )  # fmt: skip


NAME = choice().and_also(a_tuple=("a", "b"))
PATH = Rule(
    {
        **NONSENSE,
        "None": None,
        "True": True,
        "a number": 3,
        "a fraction": 0.5,
        "an empty text": "",
        "a zero byte": "a\0b",
        "a list": ["a"],
    }
)
FUNCTION = Rule(
    {label: value for label, value in NONSENSE.items() if label != "a type"}
    | {"None": None, "a text": "f", "a number": 3}
)
STORE = Rule({**NONSENSE, "None": None, "a path": "/nowhere", "a number": 3, "a mapping": {}})
MAPPING = Rule({**NONSENSE, "None": None, "a text": "abc", "a number": 3, "a list": [1], "pairs": [("a", 1)]})

_IDS: Mapping[str, Any] = {
    **{label: value for label, value in NONSENSE.items() if label != "a nested list"}, "None": None,
    "True": True, "a fraction": 1.5, "nan": math.nan, "a text": "12", "texts": ["1", "2"],
    "floats": [1.0, 2.0], "an array of floats": np.zeros(3), "a mask": np.ones(3, bool),
    "a tensor of bools": torch.ones(3, dtype=torch.bool), "a tensor of floats": torch.zeros(3),
    "a ragged list": [[1], [2, 3]], "negative": [-1], "too large": [2**40], "beyond 64 bits": [HUGE],
    "beyond int64": np.array([2**64 - 1], np.uint64), "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "structures": np.zeros(2, [("a", "i8")]), "a masked array": np.ma.array([1, 2], mask=[False, True]),
    "a sparse tensor": torch.tensor([0, 1, 2]).to_sparse(), "a list of None": [None, 1],
    "a complex tensor": torch.zeros(3, dtype=torch.complex64).conj(),
    "objects that are numbers": np.array([1, 2], object), "a strided nested tensor": NESTED,
    "a tensor with a gradient": torch.zeros(3, requires_grad=True), "a generator": (one for one in [1, 2]),
}  # fmt: skip
IDS = Rule(_IDS, "id|ids")
FANOUTS = Rule(
    {
        **NONSENSE, "None": None, "a number": 3, "a text": "12", "empty": [], "zero": [3, 0],
        "below -1": [-2], "a fraction": [2.5], "whole floats": [3.0], "True": [True], "texts": ["3"],
        "huge": [HUGE], "far below": [-HUGE], "beyond int32": [2**31], "a mapping": {3: 4},
        "lists": [[3], [4]], "None in it": [None],
    },
    "fanouts",
)  # fmt: skip
TRAIN = Rule(
    {label: value for label, value in _IDS.items() if label not in ("None", "True")}
    | {"a mask of another length": np.ones(7, bool), "two dimensions": np.zeros((2, 2), np.int64)},
    "train|node|id",
)
GRAPH = Rule(
    {
        **NONSENSE,
        "None": None,
        "a number": 3,
        "a text": "graph",
        "three arrays": (1, 2, 3),
        "floats": (np.zeros(3), np.zeros(2)),
    }
    | {"contradicting": (np.array([0, 5]), np.array([0]))},
    "graph|indptr|indices|partitions|nodes",
)
DEVICE = Rule(
    {
        **NONSENSE,
        "True": True,
        "a text": "no such device",
        "an empty text": "",
        "huge": HUGE,
        "meta": "meta",
        "a fraction": 0.5,
    }
)
OPTION = Rule(
    {"a typo": {"memmory": 1}, "of nobody": {"no_such_option": 1}, "of another": {"fanout": [3]}}, "no option"
)
