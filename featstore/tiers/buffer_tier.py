"""Feature buffers as a tier: rows that were asked for lately stay, as a cache policy decides.

A request takes slots of a :class:`~featstore.tiers.buffer.FeatureBuffer` for its rows, waits for those that
are read into them, and copies all of them out. Where all are there already that is done by whoever asks. A
request of several tables, or of more rows than there are slots, is served in pieces, for which one thread
takes slots in turn, a piece of each table at once, whose missing rows it asks for in one request below;
others, which wait for nothing but reads, copy out and give the slots back. So slots always come back.

With ``policy="auto"`` it is as in a loader (:mod:`featstore.tiers.chosen`). When enough has been seen, the
request that finds it so has the thread that takes slots decide, as a piece of its own; another policy comes
when those that hold slots have given them back, and until then nobody else takes any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_choice, check_options
from featstore.base.called import called
from featstore.base.system import CALLER, Turn, handed
from featstore.base.threads import Permits, shut_down, thread_pool
from featstore.engine.request import Request, in_pieces
from featstore.errors import BudgetError, CancelledError, ClosedError
from featstore.storage.store import Table
from featstore.tiers import PolicyNow, RowSource, Tier, source_tables
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.bundle import Bundle, in_turns
from featstore.tiers.chosen import FIRST_POLICY, Choices, choosing_bytes, slot_cost
from featstore.tiers.over import OverSource
from featstore.tiers.saved import USES, SavedCache
from featstore.tiers.slots import layout
from featstore.tiers.slots.choose import CANDIDATES
from featstore.tiers.slots.rows import least_bytes, share_slots
from featstore.tiers.static_tier import new_rows
from featstore.tiers.tickets import Ticket
from featstore.units import parse_bytes

#: Policies that need neither a trace nor to be told what to keep.
BUFFER_POLICIES = tuple(name for name in layout.POLICIES if name not in ("min", "static"))
#: What a policy can be told, see :func:`featstore.tiers.slots.layout.make_slot_map`.
POLICY_OPTIONS = {"s3-fifo": ("small",), "score": ("resident", "gamma", "delta", "alpha")}
_THREADS = 8  # pieces that wait for rows at once
_TOGETHER = 4  # of as many tables, at most, that are asked for together: others can be so meanwhile
_PIECE_IDS_MIN, _PIECE_IDS_MAX = 256, 1 << 16
_TICKET_BYTES = 40  # of an id that is under way: ids, slots, what was missed
_TICKETS_SHARE = 16  # of the memory, at most, is for these
_PIECE_SHARE = 8  # of the slots, for a piece, where some may be taken by rows kept for good


class Buffer:
    """Rows that were asked for lately.

    ``policy``: one of :data:`BUFFER_POLICIES`, or ``"auto"`` for that which would have hit most of late:
    ``reader.stats().policies`` tells, and ``print(reader.plan(ids))`` with the reason; in less than 72 MiB a
    table that is ``"s3-fifo"`` throughout. ``memory``: bytes or a size; a share of what is left over by
    default. ``options``: of the policy, those of :data:`POLICY_OPTIONS`. Raises ArgumentError.
    """

    def __init__(self, policy: str = "s3-fifo", memory: int | str | None = None, **options: Any) -> None:
        self.policy = as_choice(policy, "policy", (*BUFFER_POLICIES, "auto"))
        self.memory = None if memory is None else parse_bytes(memory, "memory")
        check_options(options, POLICY_OPTIONS.get(self.policy, ()), f"a buffer by {self.policy!r}")
        layout.make_slot_map(
            16, layout.POLICIES[_first(self.policy)], **options
        )  # which looks at their values
        self.options = options

    def host_bytes(self, tables: Sequence[Table]) -> int | None:
        return self.memory

    def least_bytes(self, tables: Sequence[Table]) -> int:
        cost = slot_cost(_first(self.policy))  # with so little nothing is chosen
        return least_bytes(tables, cost) + _PIECE_IDS_MIN * _THREADS * _TICKET_BYTES

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        return BufferTier(below, memory_bytes, self.policy, **self.options)

    def __repr__(self) -> str:
        return called("featstore.Buffer", self.policy, memory=self.memory, **self.options)


def _first(policy: str) -> str:
    """What a buffer begins with."""
    return FIRST_POLICY if policy == "auto" else policy


class _Job:
    """A piece of a request: rows of a ``table`` that are in slots at once."""

    def __init__(
        self, request: Request, table: str, buffer: FeatureBuffer, ids: NDArray[np.int64], out: Any, at: Any
    ) -> None:
        self._request, self.table, self._buffer = request, table, buffer
        self.ids, self._out, self._at = ids, out, at
        self._ticket: Ticket | None = None
        self._cancelled = False
        self.turn = Turn()  # whose it is to go on with this piece, or to end it
        self.on_end: Callable[[], None] | None = None

    def begin(self, reader: RowSource | None) -> bool:
        """Take slots, and have a ``reader`` read what is missing; whether all rows are there."""
        if self._cancelled:
            raise CancelledError("the request was cancelled; submit it again where its rows are wanted")
        ticket = self._ticket = self._buffer.begin(self.ids, reader=reader)
        ticket.hand_over()
        if self._cancelled:
            ticket.cancel()
        return ticket.done()

    def copy_out(self) -> None:
        """Wait for the rows, and copy them out."""
        assert self._ticket is not None
        error: BaseException | None = None
        try:
            self._buffer.gather(self._ticket, self._out, at=self._at)
        except BaseException as failure:
            error = failure
        self.end(error)
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt, of who asks

    def end(self, error: BaseException | None) -> None:
        """May be called more than once."""
        if self._ticket is not None:
            self._ticket.release()
        if self.on_end is not None:
            self.on_end()
            self.on_end = None
        self._request.close_piece(self, error)

    def cancel(self) -> None:
        self._cancelled = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()


class _Decision:
    """A piece of a request: the policies to go on with are chosen."""

    def __init__(self, request: Request) -> None:
        self._request, self.turn = request, Turn()

    def cancel(self) -> None:
        """Others go on with them, too."""

    def end(self, error: BaseException | None) -> None:
        self._request.close_piece(self, error)


class BufferTier(OverSource):
    """A buffer for each table over ``below``, in so much memory, which they share by the tables' sizes. It
    belongs to one process.

    Raises BudgetError. What goes wrong while rows are read that a chosen policy is to keep for good, is
    raised by the request that found the choice due.
    """

    name = "buffer"

    def __init__(self, below: RowSource, memory_bytes: int, policy: str = "s3-fifo", **options: Any) -> None:
        super().__init__(below)
        self.policy = as_choice(policy, "policy", (*BUFFER_POLICIES, "auto"))
        self._buffers: dict[str, FeatureBuffer] = {}
        tables, first = source_tables(below), _first(self.policy)
        choosing = self._choosing(tables, memory_bytes)
        cost = slot_cost(self.policy if choosing else first)
        least = least_bytes(tables, cost) + sum(choosing.values())
        tickets = min(memory_bytes // _TICKETS_SHARE, memory_bytes - least)
        ids = tickets // (_THREADS * _TICKET_BYTES)
        self._piece_ids = max(_PIECE_IDS_MIN, min(_PIECE_IDS_MAX, ids))
        self._ticket_bytes = self._piece_ids * _THREADS * _TICKET_BYTES
        if memory_bytes < least + self._ticket_bytes:
            raise BudgetError(
                least + self._ticket_bytes, memory_bytes, "make a buffer of one row of each table"
            )
        slots = share_slots(tables, memory_bytes - self._ticket_bytes - sum(choosing.values()), cost)
        self._beside_bytes = self._ticket_bytes + sum(choosing.values()) + cost.beside * sum(slots.values())
        self._choices = Choices()  # empty where nothing is chosen
        self._taking_slots = threading.Lock()  # of the choices, too
        self._taking = thread_pool(1, "featstore-take-slots")
        self._copying = thread_pool(_THREADS, "featstore-copy-out")
        self._tickets = Permits(_THREADS)
        self._under_way = Permits(2 * _THREADS)
        try:
            for name, count in slots.items():
                self._buffers[name] = buffer = FeatureBuffer(
                    below, name, slots=count, policy=first, policies=CANDIDATES if choosing else (), **options
                )
                if choosing:
                    self._choices.add(name, buffer, choosing[name], self._piece_rows(name))
        except BaseException:
            self.close()
            raise

    def _choosing(self, tables: Sequence[Table], memory_bytes: int) -> dict[str, int]:
        """What choosing takes of the memory, by table; empty where nothing is chosen."""
        made = choosing_bytes(tables, memory_bytes) if self.policy == "auto" else {}
        left = memory_bytes - sum(made.values()) - _PIECE_IDS_MIN * _THREADS * _TICKET_BYTES
        return made if left >= least_bytes(tables, slot_cost("auto")) else {}

    def held(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Node ids of the rows in a table's buffer, in pieces, the least wanted first."""
        buffer = self._buffers[table]
        with self._taking_slots:  # no policy is chosen meanwhile
            buffer.settle()
            yield from buffer.cached_pieces()
            if self.policy == "auto":  # which may keep some for good
                yield from buffer.kept_pieces()

    def load(self, cache: SavedCache, table: str) -> None:
        """Read the rows that were saved, the last ones, as many as fit."""
        self._buffers[table].load_last(cache.ids(table), cache.counts.get(table, 0), uses=USES)

    @property
    def memory_bytes(self) -> int:
        return self._beside_bytes + sum(buffer.memory_bytes for buffer in self._buffers.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        limit, begun = self._under_way, list[_Job | _Decision]()

        def hand_over(request: Request) -> None:
            limit.acquire()
            request.add_done_callback(lambda _: limit.release())
            self._hand_over(request, ids, filled, at, begun)

        def give_up(error: BaseException) -> None:
            for piece in begun:
                if piece.turn.is_of(CALLER):
                    piece.end(error)

        return in_pieces(filled, hand_over, give_up)

    def _hand_over(
        self, request: Request, ids: Mapping[str, Any], filled: Mapping[str, Any],
        at: Mapping[str, Any] | None, begun: list[_Job | _Decision],
    ) -> None:  # fmt: skip
        """Begin the pieces of a request, which ``begun`` has before."""
        jobs: dict[str, list[_Job]] = {}
        for name, wanted in ids.items():
            jobs[name] = made = []
            for part in self._parts(name, len(wanted)):
                rows, to = (filled[name][part], None) if at is None else (filled[name], at[name][part])
                made.append(_Job(request, name, self._buffers[name], wanted[part], rows, to))
        taken = list(_together(jobs))
        begun += [job for few in taken for job in few]
        if self._choices.due:
            decision = _Decision(request)
            begun.append(decision)
            request.open_piece(decision)
            self._handed(self._taking, partial(self._decide, decision), decision)
        for few in taken:
            for job in few:
                request.open_piece(job)
            if len(taken) == len(few) == 1:
                self._take(few, here=True)
            else:
                self._handed(self._taking, partial(self._take, few), *few)

    def _take(self, jobs: Sequence[_Job], here: bool = False) -> None:
        """Take slots, and have the rows copied out when they are there: by whoever asks (``here``), if they
        are there now. Raises interrupts of who asks. Of several jobs, each of another table, nothing is read
        before all have slots: so all have their permits first, and none waits for another."""
        try:
            bundle = Bundle(self._below) if len(jobs) > 1 else None
            for job in jobs:
                self._tickets.acquire()
                job.on_end = self._tickets.release
            with (
                self._taking_slots if self.policy == "auto" else nullcontext(),
                nullcontext() if bundle is None else bundle.together(),
            ):
                for job in jobs:
                    ready = job.begin(bundle)
                    self._choices.observe(job.table, job.ids)
        except BaseException as error:
            for job in jobs:
                job.end(error)
            if isinstance(error, Exception):
                return
            raise
        if ready and here:
            jobs[0].copy_out()
            return
        for job in jobs:
            job.turn = Turn()
            self._handed(self._copying, job.copy_out, job)

    def _decide(self, decision: _Decision) -> None:
        error: BaseException | None = None
        try:
            with self._taking_slots:
                if self._choices.due:  # or another request has had it decided
                    self._choices.decide(wait=True)
        except BaseException as failure:
            error = failure
        decision.end(error)

    def _handed(self, pool: ThreadPoolExecutor, step: Callable[[], None], *pieces: _Job | _Decision) -> None:
        """Have a pool take a step with pieces, whose turn is the first one's."""

        def refused(error: BaseException) -> None:
            closed = type(error) is RuntimeError  # the pool takes nothing any more
            for piece in pieces:
                piece.end(ClosedError("the buffer tier is closed") if closed else error)

        handed(pool, step, refused, pieces[0].turn)

    def _parts(self, name: str, count: int) -> list[slice]:
        """A request's ids in pieces whose rows can be in slots at once."""
        step = self._piece_rows(name)
        return [slice(low, min(low + step, count)) for low in range(0, count, step)]

    def _piece_rows(self, name: str) -> int:
        buffer = self._buffers[name]
        if buffer.slots >= buffer.table.rows:  # however often each row is asked for
            return max(1, self._piece_ids)
        slots = buffer.slots // _PIECE_SHARE if self.policy == "auto" else buffer.slots
        return max(1, min(self._piece_ids, slots))

    def policies(self) -> dict[str, PolicyNow]:
        """The policy of each table's buffer now."""
        made = {}
        for name, buffer in list(self._buffers.items()):
            because = "it was asked for"
            if self.policy == "auto":
                whole = buffer.slots >= buffer.table.rows
                because = "all rows have slots" if whole else "the memory is too little to choose another"
            made[name] = PolicyNow(buffer.policy_name, because)
        return made | dict(self._choices.policies())

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._buffers[table].holds(ids)

    def hits(self) -> int:
        return sum(buffer.stats().hits for buffer in self._buffers.values())

    def close(self) -> None:
        if not self.here:
            return
        self._closed = True
        shut_down(self._taking)
        shut_down(self._copying)
        for buffer in self._buffers.values():
            buffer.close()

    def __repr__(self) -> str:
        return f"<BufferTier of {self.tables}, {self.policy}, {self.memory_bytes:,} bytes>"


def _together(jobs: Mapping[str, Sequence[_Job]]) -> Iterator[list[_Job]]:
    """Jobs that take slots at once, by one turn: one of each table."""
    for one_each in in_turns(jobs):
        for low in range(0, len(one_each), _TOGETHER):
            few = one_each[low : low + _TOGETHER]
            for job in few:
                job.turn = few[0].turn
            yield few
