"""What tells the mini-batches that a store samples from others: by what was said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from featstore.loaders.host.links import LinksOfRanks
from featstore.loaders.options import Given
from featstore.sampling.attributes import said_otherwise
from featstore.sampling.link_batches import LinkBatches

#: What a digest of that is called in states.
SAMPLED_BY = "a digest of seeds or links, seed, fanouts, graph and options of sampling"


def samples_of(given: Given, batches: Any, seed: bool = True) -> str:
    """Of the seeds, the graph and how it is sampled, but not of how seeds are cut into mini-batches; of
    mini-batches around links all that was said of them, as each is drawn at once. Empty where others were
    given. ``seed``: of the number that draws are by, too."""
    if isinstance(batches, LinkBatches | LinksOfRanks) and batches.alike:
        text = told({name: one for name, one in batches.alike.items() if seed or name != "seed"})
    elif given.get("seeds") is None:
        return ""
    else:
        what = {"seed": given.get("seed", 0)} if seed else {}
        what |= {name: given.get(name) for name in ("seeds", "fanouts", "graph")}
        text = repr(sorted((name, told(one)) for name, one in what.items()) + said_alike(given.said))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded_of(given: Given, batches: Any, ranks: Sequence[int], of_a_step: Mapping[str, Any]) -> str | None:
    """What tells mini-batches that were recorded from others, drawn by whatever number; None where nobody
    knows. ``ranks``: whose they are. ``of_a_step``: how seeds are cut."""
    samples = samples_of(given, batches, seed=False)
    text = f"{samples} {tuple(ranks)} {sorted(of_a_step.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16] if samples else None


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
    if values.dtype.kind in "iu":  # however they were given
        values = values.astype(np.int64, copy=False)
    digest = hashlib.sha256(f"{values.shape}".encode())
    digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
