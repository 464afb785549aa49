"""Rows of a mini-batch that has more of them than there are slots: piece by piece, each through slots that it
leaves to the next but one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from featstore.loaders.online.budget import PIECES

if TYPE_CHECKING:
    from featstore.tiers.buffer import FeatureBuffer
    from featstore.tiers.device import DeviceBuffer, DeviceTicket
    from featstore.tiers.tickets import Ticket

#: A ticket for a part of a mini-batch.
PieceTicket: TypeAlias = "Ticket | DeviceTicket"


class InPieces:
    """Rows of one table through ``slots`` that nobody else holds, of ``buffer`` or of each device of
    ``device`` above it. ``begun`` is told of each piece."""

    def __init__(
        self, buffer: FeatureBuffer, device: DeviceBuffer | None, slots: int,
        begun: Callable[[Ticket | DeviceTicket], None],
    ) -> None:  # fmt: skip
        self._buffer, self._device, self._begun = buffer, device, begun
        self._step = max(1, slots // PIECES)

    def gather(
        self, ids: NDArray[np.int64], raw: NDArray[np.uint8],
        arrived: Callable[[Ticket | DeviceTicket], bool],
    ) -> Any:  # fmt: skip
        """The rows of these node ids, int64 [n], as [n, *row shape]: an array in ``raw``, uint8 of as many
        bytes, or a tensor on the first device. ``arrived`` waits for a piece, and says whether to go on;
        None where it says no."""
        rows = raw.view(self._buffer.dtype).reshape(len(ids), *self._buffer.row_shape)
        out: Any = rows if self._device is None else None  # made like the first piece, where that is
        under_way: deque[Any] = deque()
        done = 0
        try:
            for low in range(0, max(1, len(ids)) + self._step * (PIECES - 1), self._step):
                if low < len(ids) or low == 0:  # of no rows there is a piece, too
                    under_way.append(self._begin(ids[low : low + self._step]))
                if low < self._step * (PIECES - 1) or not under_way:
                    continue
                if not arrived(under_way[0]):
                    return None
                count = len(under_way[0].ids)
                if self._device is None:
                    self._copy_out(under_way[0], rows[done : done + count])
                else:
                    piece = self._device.gather(under_way[0], raw)
                    out = piece.new_empty((len(ids), *piece.shape[1:])) if out is None else out
                    out[done : done + count] = piece
                under_way.popleft()
                done += count
        finally:
            for ticket in under_way:
                ticket.cancel()
        return out

    def _begin(self, ids: NDArray[np.int64]) -> Ticket | DeviceTicket:
        ticket = (self._buffer if self._device is None else self._device).begin(ids)
        assert ticket is not None, "there are slots for all pieces that hold some"
        self._begun(ticket)
        return ticket

    def _copy_out(self, ticket: Any, out: NDArray[Any]) -> None:
        self._buffer.gather(ticket, out)
        ticket.release()
