"""One epoch of an online loader: a thread samples, another extracts and hands over.

A mini-batch is begun (slots claimed, reads started) while those before are still under way, and assembled
when its rows are there and there is room for a copy. One that has not slots for all of its rows waits
until no other is under way, takes room first, and goes through the slots in pieces. For one that finds no
room though no rows are left but the loop's, the budget is divided anew
(:meth:`featstore.loaders.online.extraction.Extraction.open`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from featstore.base.state import ends_before
from featstore.base.threads import Wake, Worker
from featstore.errors import IdError
from featstore.loaders.online.budget import SAMPLED
from featstore.loaders.online.content import Content
from featstore.loaders.online.extraction import Extraction, Tickets
from featstore.loaders.online.pieces import PieceTicket
from featstore.loaders.online.report import OnlineStages
from featstore.loaders.prefetch import Prefetch
from featstore.sampling.minibatch import Ids, split


class ForEpoch(Protocol):
    """What an epoch asks of its loader."""

    report_stages: OnlineStages
    overtake: bool
    nodes: Callable[[Any], Any] | None
    samples: bool

    def check_process(self) -> None: ...

    def beginning(self, index: int) -> None: ...

    def finished(self, ids: Ids, sample: Any, rows: dict[str, Any], index: int, *, named: bool) -> Any: ...


@dataclass
class _Sampled:
    """A mini-batch on its way."""

    index: int
    asked: Content
    sample: Any
    tickets: Tickets


class OnlineEpoch(Prefetch):
    """One epoch; see the module's text. ``skip``: so many mini-batches are sampled and let go; ``before``:
    the epoch of which the loop may have a mini-batch."""

    def __init__(
        self, loader: ForEpoch, extraction: Extraction, batches: Iterable[Any], skip: int,
        before: OnlineEpoch | None,
    ) -> None:  # fmt: skip
        room, held = extraction.room_bytes, 0 if before is None else before._held
        super().__init__(loader.check_process, loader.report_stages, room, held, "featstore-extract")
        self._loader, self.extraction, self._batches, self._skip = loader, extraction, batches, skip
        # What the mini-batch that was handed over last needs of the room, if its memory shrinks to its rows.
        self._last_room = 0 if before is None else before.held_bytes
        self._skipped_room: int | None = None  # the same, of the last one skipped
        self._sampled: deque[_Sampled] = deque()
        self._sampled_all = False
        self._sampling_error: BaseException | None = None
        self.numbers: deque[int] = deque()  # of mini-batches that were handed over, and the loop has not yet
        self._taken = Wake()  # there is room for another one to be sampled, or the prefetch was stopped
        self._sampler = Worker(self._sample, "featstore-sample")

    def start(self) -> None:
        if not self._stop:
            self._sampler.start()
        super().start()

    def close(self, because: str = "the loader is closed; make another with store.loader()") -> None:
        self._stop = self._stop or because
        self._taken.set()
        super().close(because)

    def _workers(self) -> list[Worker]:
        return [self._sampler, self._worker]

    # Sampling.

    def _sample(self) -> None:
        stages, count = self._loader.report_stages, 0
        try:
            last = time.perf_counter()
            for index, batch in enumerate(self._batches):
                count = index + 1
                if self._stop:
                    return
                given, sample = split(batch, self._loader.nodes)
                asked = Content.of(given, sample, own=self._loader.samples)
                if index < self._skip:
                    self._skipped_room = self.extraction.skip(asked)
                    continue
                del batch, given
                stages.add("sample", time.perf_counter() - last)
                while len(self._sampled) >= SAMPLED and not self._stop:
                    self._taken.wait()
                self._sampled.append(_Sampled(index, asked, sample, {}))
                del asked, sample
                self._changed.set()
                last = time.perf_counter()
            if count < self._skip:
                raise ends_before(self._skip, count)
        except BaseException as error:
            self._sampling_error = error
        finally:
            self._batches = ()  # a generator that is broken off ends now
            self._sampled_all = True
            self._changed.set()

    # Extracting.

    def _go(self) -> None:
        under_way: deque[_Sampled] = deque()
        self.extraction.on_change = self._changed.set
        try:
            while not self._stop:
                if self._begin_next(under_way) or self._assemble_next(under_way):
                    continue
                if not under_way and self._sampled_all and not self._sampled:  # said after the last
                    break
                self._changed.wait()
            if self._sampling_error is not None and not self._stop:
                raise self._sampling_error
        finally:
            self._take_back(under_way)

    def _take_back(self, under_way: deque[_Sampled]) -> None:
        """Give up the slots of all mini-batches, which are to be begun again."""
        while under_way:
            one = under_way.pop()
            for ticket in one.tickets.values():
                ticket.cancel()
            one.tickets = {}
            self._loader.report_stages.ended()
            self._sampled.appendleft(one)

    def _begin_next(self, under_way: deque[_Sampled]) -> bool:
        """Claim slots for the next mini-batch and start its reads, if there is one, and there are slots."""
        if not self._sampled or len(under_way) >= self.extraction.extracted:
            return False
        extraction, first = self.extraction, self._sampled[0]
        if not extraction.knows(first.asked.ids):
            return not under_way and self._divide_anew(first)
        if extraction.undecided:
            if under_way:
                return False
            extraction.decide()
        begin = time.perf_counter()
        self._loader.beginning(first.index)
        try:
            if not extraction.fits(first.asked):
                return not under_way and self._make_alone(first)
            tickets = extraction.begin(first.asked, [one.asked for one in under_way])
        except IdError as error:
            raise IdError(f"mini-batch {first.index}: {error}") from None
        if tickets is None:
            return False
        self._sampled.popleft()
        self._taken.set()
        first.tickets = tickets
        under_way.append(first)
        self._loader.report_stages.begun()
        self._loader.report_stages.add("claim", time.perf_counter() - begin)
        return True

    def _assemble_next(self, under_way: deque[_Sampled]) -> bool:
        """Hand over a mini-batch whose rows are there, if there is room for it."""
        waiting = under_way if self._loader.overtake else list(under_way)[:1]
        one = next((w for w in waiting if all(t.done() for t in w.tickets.values())), None)
        if one is None:
            return False
        room = self._room_for(one)
        if not room:
            if not self._alone():
                return False
            self._take_back(under_way)
            return self._divide_anew(one)
        under_way.remove(one)
        self._loader.report_stages.ended()
        begin = time.perf_counter()
        rows = self.extraction.gather(one.asked, one.tickets)
        self._finish(one, rows, room, begin)
        return True

    def _make_alone(self, one: _Sampled) -> bool:
        """Read a mini-batch for which there are too few slots, or little room, to where it is handed over; no
        other is under way."""
        if self.extraction.would_fit(one.asked, one.index, self.held_bytes):
            return self._divide_anew(one)
        room = self._room_for(one)
        if not room:
            return self._divide_anew(one)
        stages, begin = self._loader.report_stages, time.perf_counter()
        stages.begun()
        try:
            rows = self.extraction.gather_in_pieces(one.asked, self._arrived)
        finally:
            stages.ended()
        if not self._stop:
            self._sampled.popleft()
            self._taken.set()
            self._finish(one, rows, room, begin)
        return True

    def _arrived(self, piece: PieceTicket) -> bool:
        """Wait for rows; False where the prefetch was stopped."""
        while not piece.done() and not self._stop:
            self._changed.wait()
        return not self._stop

    def _finish(self, one: _Sampled, rows: dict[str, Any], room: int, begin: float) -> None:
        gathered, stages = time.perf_counter(), self._loader.report_stages
        given = one.asked.ids
        ids = {self.extraction.table_of[t]: i for t, i in given.items()}
        batch = self._loader.finished(ids, one.sample, rows, one.index, named=list(given) != [""])
        stages.add("gather", gathered - begin)
        stages.add("hand over", time.perf_counter() - gathered)
        self._last_room = self.extraction.own_room(one.asked)
        self.numbers.append(one.index)
        self._hand_over(batch, room)

    # Room.

    @property
    def held_bytes(self) -> int:
        """Of the room, what the mini-batch needs that the loop has; all that it takes while there are others
        after it."""
        return min(self._held, self._last_room) if self._alone() else self._held

    def _alone(self) -> bool:
        """Whether there are no rows but the loop's: nothing more comes free."""
        with self._lock:
            return self._free + self._held == self.extraction.room_bytes

    def _room_for(self, one: _Sampled) -> int:
        """Take room for a mini-batch's rows; the bytes of it, 0 where there is not enough now."""
        for alone in (False, True):
            if alone and not self._alone():
                return 0
            room = self.extraction.output_room(one.asked, alone=alone)
            if self._try_room(room):
                return room
        return 0

    def _divide_anew(self, one: _Sampled) -> bool:
        """Make room for a mini-batch, the next one, where none is under way; False where others are to be
        taken by the loop before."""
        if not self._alone():
            return False
        extraction, held = self.extraction, self.held_bytes
        first = not extraction.buffers
        if first and self._skipped_room is not None:  # as for one that has gone through those before
            extraction.open(one.asked, index=one.index, held_bytes=self._skipped_room)
        else:
            extraction.open(one.asked, index=None if first else one.index, held_bytes=held)
        with self._lock:
            self._held, self._free = held, extraction.room_bytes - held
        return True
