"""A request of which one source gives some rows and another the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.engine.request import Request, in_pieces
from featstore.tiers import RowSource


class Divided(NamedTuple):
    """Of the ids that are asked of a table those at ``positions`` (int32), which the source knows as ``ids``
    of its table ``name``."""

    name: str
    ids: NDArray[np.int64]
    positions: NDArray[np.int32]


def submit_divided(
    shares: Sequence[tuple[RowSource, Mapping[str, Divided]]],
    out: Mapping[str, Any],
    at: Mapping[str, Any] | None,
) -> Request:
    """Have each source put its share of each table where it goes; ``out`` and ``at`` as in
    :meth:`featstore.tiers.RowSource.submit`. Nothing is asked of a source for nothing. The first source is
    asked first."""

    def ask(request: Request) -> None:
        for source, by_table in shares:
            some = {name: share for name, share in by_table.items() if len(share.ids)}
            if not some:
                continue
            asked = source.submit(
                {share.name: share.ids for share in some.values()},
                out={share.name: out[name] for name, share in some.items()},
                at={
                    share.name: share.positions if at is None else np.asarray(at[name])[share.positions]
                    for name, share in some.items()
                },
            )
            request.open_piece(asked)
            asked.add_done_callback(partial(_ended, request))

    return in_pieces(out, ask)


def _ended(request: Request, asked: Any) -> None:
    request.close_piece(asked, asked.exception())
