"""What a mini-batch asks for, and what it takes beside its rows while it is on its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.errors import SourceError
from featstore.sampling.minibatch import Ids


class Content(NamedTuple):
    """``ids`` by node type; ``sample_bytes``: what was sampled here beside them, such as edges; 0 of a
    mini-batch that was given, which is whoever's gave it."""

    ids: Ids
    sample_bytes: int = 0

    @classmethod
    def of(cls, given: Ids, sample: Any, *, own: bool) -> Content:
        """Of a mini-batch as :func:`featstore.sampling.minibatch.split` gives it. ``own``: it was sampled
        here. Ids are copied, as a sampler may use its memory again, unless they are the sample's own. Raises
        SourceError for one without any node type."""
        if not given:
            raise SourceError("a mini-batch has no node type at all: nodes= must return ids, or {table: ids}")
        held = {id(array): array.nbytes for array in sampled_arrays(sample)} if own else {}
        kept = [id(ids) for ids in given.values() if id(ids) in held]
        ids = {node_type: one if id(one) in held else one.copy() for node_type, one in given.items()}
        return cls(ids, sum(held.values()) - sum(held[one] for one in {*kept}))


def sampled_arrays(value: Any) -> list[NDArray[Any]]:
    """The arrays of a mini-batch that was sampled here, in mappings and objects, too."""
    if isinstance(value, np.ndarray):
        return [value]
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [array for part in parts.values() for array in sampled_arrays(part)]
