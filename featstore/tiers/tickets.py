"""What a feature buffer knows of one mini-batch: the pins it holds, the reads begun for it, and the ticket
that its owner has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.ids import Ids

if TYPE_CHECKING:
    from featstore.engine.request import Request


@dataclass(frozen=True)
class BufferStats:
    """What a feature buffer has counted: ``hits`` and ``misses`` by occurrence of a row in a mini-batch,
    ``waits``, the hits of rows that were on their way, ``evictions`` and ``batches``."""

    hits: int
    misses: int
    waits: int
    evictions: int
    batches: int

    @classmethod
    def sum(cls, parts: Iterable[BufferStats]) -> BufferStats:
        """What several buffers have counted together."""
        counts = [astuple(part) for part in parts]
        return cls(*map(sum, zip(*counts, strict=True)))

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Read:
    """Rows being read into slots. ``once`` is 1 until the slot map knows that the read has ended."""

    def __init__(self, ids: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
        self.ids, self.slots = ids, slots
        self.once = np.ones(1, np.int64)
        self.request: Request | None = None
        self.error: BaseException | None = None


class Claim:
    """The pins of one ticket, known to the buffer until they are released, whatever becomes of the ticket."""

    def __init__(self, count: int) -> None:
        self.slots = np.empty(count, np.int32)
        # (reads, waits, whether it holds pins), written by kernels alone
        self.outcome = np.zeros(3, np.int64)
        self.owner: threading.Thread | None = threading.current_thread()
        self.forgotten = False

    @property
    def held(self) -> bool:
        return bool(self.outcome[2])


class Holder(Protocol):
    """What a ticket asks of the buffer that it came from."""

    def wait_for(self, ticket: Ticket, timeout: float | None) -> NDArray[np.int32]: ...

    def arrived(self, ticket: Ticket) -> bool: ...

    def release(self, ticket: Ticket) -> None: ...

    def forget(self, claim: Claim) -> None: ...


class Ticket:
    """One mini-batch's claim on a :class:`FeatureBuffer`; made by :meth:`FeatureBuffer.begin`. A context
    manager that releases it.

    ``ids``: int64 [n]. ``slots``: int32 [n], where in ``buffer.x`` the row of each id is, valid until the
    release.
    """

    def __init__(self, buffer: Holder, ids: Ids, next_use: NDArray[np.int32]) -> None:
        self.holder = buffer
        self.ids, self.shape, self.tensor, self.next_use = ids.values, ids.shape, ids.tensor, next_use
        self.missed, self.waits = np.empty(len(self.ids), np.int32), np.empty(len(self.ids), np.int32)
        self.reads: list[Read] = []
        self.given_up = False
        self.failed: BaseException | None = None  # why a read could not even be begun
        self.claim = Claim(len(self.ids))
        self.slots = self.claim.slots

    def result(self, timeout: float | None = None) -> NDArray[np.int32]:
        """Wait until all rows are in their slots; returns ``slots``. Raises what went wrong with a read;
        TimeoutError; CancelledError where the ticket was released meanwhile. May be called again."""
        return self.holder.wait_for(self, timeout)

    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        try:
            return self.holder.arrived(self)
        except Exception:
            return True  # result() raises it

    def release(self) -> None:
        """Give the slots back; reads under way go on, for others. May be called more than once, and at any
        time."""
        self.holder.release(self)

    def cancel(self) -> None:
        """Release, and start no more reads for this ticket. Others who wait for its rows read them
        themselves."""
        self.holder.release(self)
        for read in self.reads:
            request = read.request
            if request is not None:
                request.cancel()

    def hand_over(self) -> None:
        """Another thread will release this ticket: who needs slots may wait for it, even the thread that
        began it."""
        self.claim.owner = None

    def give_away(self) -> Claim:
        """The ticket's pins, which are another's to release from now on. Each row's once."""
        claim, self.claim = self.claim, Claim(0)
        return claim

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        claim = getattr(self, "claim", None)
        if claim is not None and claim.held:
            # Whoever holds the lock next releases it: taking the lock here could be for the second time in
            # this thread.
            claim.forgotten = True
            self.holder.forget(claim)

    def __repr__(self) -> str:
        return f"<Ticket for {len(self.ids):,} rows, {'holding' if self.claim.held else 'without'} slots>"


class HostTicket(Protocol):
    """Rows that a device asked of the host: a :class:`Ticket`, or what does the same."""

    @property
    def ids(self) -> NDArray[np.int64]: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...

    def release(self) -> object: ...
