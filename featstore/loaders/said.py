"""What tells the mini-batches that a store samples from others: by what was said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from featstore.loaders.options import Given
from featstore.sampling.attributes import said_otherwise

#: What a digest of that is called in states.
SAMPLED_BY = "a digest of seeds, seed, fanouts, graph and options of sampling"


def samples_of(given: Given) -> str:
    """Of the seeds, the graph and how it is sampled, but not of how seeds are cut into mini-batches; empty
    where mini-batches were given."""
    if given.get("seeds") is None:
        return ""
    what = {"seed": given.get("seed", 0)} | {n: given.get(n) for n in ("seeds", "fanouts", "graph")}
    text = repr(sorted((name, told(one)) for name, one in what.items()) + said_alike(given.said))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def said_alike(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the options of sampling that are not as by default: names, and what tells them from others."""
    return sorted((name, told(said[name])) for name in said_otherwise(said))


def told(option: Any) -> str:
    """What tells an option from others: of an array the checksum of its values."""
    if isinstance(option, Mapping):
        return repr(sorted((repr(name), told(one)) for name, one in option.items()))
    if isinstance(option, str) or not hasattr(option, "__len__"):
        return str(option)
    if isinstance(option, list | tuple) and any(hasattr(one, "__len__") for one in option):
        return repr([told(one) for one in option])
    values = np.ascontiguousarray(option)
    if values.dtype.hasobject:
        return repr(values.tolist())
    values = values if values.dtype.kind not in "iu" else values.astype(np.int64)  # however they were given
    return hashlib.sha256(f"{values.shape}".encode() + values.tobytes()).hexdigest()
