"""Rows on one or several devices as a tier over any other source (:mod:`featstore.tiers.device`).

One thread does all that concerns the devices, request after request: it takes slots for a few of them, so
that what they miss is on its way from below, and puts the oldest together. A request of more rows than a
device has slots for is served in pieces. Rows from below land in host memory of their own until they are
copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.errors import ArgumentError, CancelledError, ClosedError, MissingPackageError

try:
    import torch
except ImportError as error:
    raise MissingPackageError(
        f"rows on a device need {error.name}: pip install 'featstore[torch]'", name=error.name
    ) from error

from featstore.arguments import as_choice, as_device
from featstore.base.called import called
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, is_tensor
from featstore.base.system import CALLER, POOL, Turn
from featstore.base.threads import Permits, Wake, Worker
from featstore.base.transfers import Done, Transfer
from featstore.engine.request import Request, in_pieces
from featstore.storage.store import Table
from featstore.tiers import PolicyNow, RowSource, Tier, source_tables, table_shares
from featstore.tiers.buffer_tier import BUFFER_POLICIES
from featstore.tiers.bundle import Bundle, in_turns
from featstore.tiers.device import DeviceBuffer, DeviceTicket
from featstore.tiers.landing import LandingTable
from featstore.tiers.over import OverSource
from featstore.tiers.slots import layout
from featstore.tiers.tickets import BufferStats
from featstore.units import parse_bytes

_DEPTH = 4  # pieces that are under way at once: two of each of two requests
_LANDING_BYTES = 16 * 2**20  # of rows from below for one piece, at most, unless one row is larger
_PIECE_IDS = 1 << 16  # of a table that is there as a whole
_WAITING = 16  # requests that wait or are under way; a further one blocks


class Device:
    """Rows on a device.

    ``device``: as torch takes it, or a list of several, which share the rows by node id; results are on the
    first. ``memory``: for rows on each device, bytes or a size. ``policy``: one of
    :data:`featstore.tiers.buffer_tier.BUFFER_POLICIES`.
    """

    def __init__(self, device: Any, memory: int | str, policy: str = "s3-fifo") -> None:
        self.devices = list(device) if isinstance(device, list | tuple) else [device]
        if not self.devices:
            raise ArgumentError("device must be a device, or a list of at least one, not an empty list")
        self.devices = [as_device(one, "device") for one in self.devices]
        self.device_bytes = parse_bytes(memory, "memory")
        self.policy = as_choice(policy, "policy", BUFFER_POLICIES)

    def _slots(self, tables: Sequence[Table]) -> dict[str, int]:
        slots, shares = {}, table_shares(tables, self.device_bytes)
        for table in tables:
            fit = shares[table.name] // max(1, table.row_bytes)
            most = min(-(-table.rows // len(self.devices)), layout.BUFFER_ROWS_MAX)
            slots[table.name] = max(1, min(most, fit))
        return slots

    def host_bytes(self, tables: Sequence[Table]) -> int:
        policy, count = layout.POLICIES[self.policy], len(self.devices)
        maps = sum(count * layout.slot_map_bytes(slots, policy) for slots in self._slots(tables).values())
        return maps + (_DEPTH + 1) * max(map(_landing_bytes, tables), default=0)

    def least_bytes(self, tables: Sequence[Table]) -> int:
        return self.host_bytes(tables)

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        return DeviceTier(below, self.devices, self._slots(source_tables(below)), self.policy)

    def __repr__(self) -> str:
        devices = [str(device) for device in self.devices]
        return called("featstore.Device", devices, self.device_bytes, self.policy)


def _landing_bytes(table: Table) -> int:
    return max(min(_LANDING_BYTES, table.data_bytes), table.row_bytes)


class _Job:
    """A piece of a request: rows that are on the devices at once."""

    def __init__(
        self, request: Request, table: str, ids: NDArray[np.int64], places: Any, asked: Done | None
    ) -> None:
        self.request, self.table, self.ids, self.places, self.asked = request, table, ids, places, asked
        self.ticket: DeviceTicket | None = None
        self.error: BaseException | None = None
        self.cancelled, self._turn = False, Turn()

    def goes_with(self, other: _Job) -> bool:
        """Whether they are of one request, and of tables that can be asked for together."""
        return self.request is other.request and self.table != other.table

    def claim(self) -> bool:
        """Whether it is for the thread of the devices to go on with it."""
        return self._turn.is_of(POOL)

    def end_unbegun(self, error: BaseException) -> None:
        """End it where that thread has not begun it; it never will."""
        if self._turn.is_of(CALLER):
            self.cancelled = True
            self.request.close_piece(self, error)

    def cancel(self) -> None:
        self.cancelled = True


class DeviceTier(OverSource):
    """Rows on ``devices``, so many ``slots`` of each table on each, over ``below``. Results are tensors on
    the first device; ``out``: tensors there, or arrays or tensors in host memory. It belongs to one process.

    Raises ArgumentError for rows whose dtype torch does not know; what torch raises where a device is not
    there or too small.
    """

    name = "device"

    def __init__(
        self, below: RowSource, devices: Sequence[Any], slots: Mapping[str, int], policy: str = "s3-fifo"
    ) -> None:
        super().__init__(below)
        self._bundle = below = Bundle(below)
        self.device = torch.device(devices[0])
        self._transfer, self._wake = Transfer(self.device), Wake()
        self._levels: dict[str, DeviceBuffer] = {}
        with self._transfer.within():  # where they are used
            for name, count in slots.items():
                host = LandingTable(below, name, self._wake.set)
                self._levels[name] = DeviceBuffer(host, devices, slots=count, policy=policy)
        self._step: dict[str, int] = {}
        self._landing = 0
        for name, count in slots.items():
            table = below.store.table(name)
            row_bytes = max(1, table.row_bytes)
            landing = max(1, _landing_bytes(table) // row_bytes)
            self._step[name] = at_once = min(count, landing)
            if min(count * len(devices), landing) >= table.rows:  # however often each is asked for
                at_once = max(1, table.rows)
                self._step[name] = max(at_once, _PIECE_IDS)
            self._landing = max(self._landing, at_once * row_bytes)
        self._staging = self._transfer.memory(self._landing)
        self._todo: deque[tuple[_Job, Any]] = deque()
        self._under_way = Permits(_WAITING)
        self._worker = Worker(self._run, "featstore-device-tier")
        self._worker.start()

    @property
    def memory_bytes(self) -> int:
        return sum(level.memory_bytes for level in self._levels.values()) + (_DEPTH + 1) * self._landing

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = self._new_rows(ids) if out is None else dict(out)
        # What the caller has asked of the device may use the memory of out.
        asked = None if out is None else self._transfer.mark()
        limit, pieces = self._under_way, list[tuple[_Job, Any]]()

        def hand_over(request: Request) -> None:
            limit.acquire()
            request.add_done_callback(lambda _: limit.release())
            of_tables = dict[str, list[tuple[_Job, Any]]]()
            for name, wanted in ids.items():
                step, target = self._step[name], self._target(filled[name], name)
                of_tables[name] = made = []
                for low in range(0, len(wanted), step):
                    part = slice(low, min(low + step, len(wanted)))
                    places = part if at is None else at[name][part]
                    made.append((_Job(request, name, wanted[part], places, asked), target))
            pieces.extend(piece for few in in_turns(of_tables) for piece in few)
            for job, _ in pieces:
                request.open_piece(job)
            self._todo.extend(pieces)  # at once, so that they are begun together
            self._wake.set()
            if self._closed:
                self._refuse()

        def give_up(error: BaseException) -> None:
            for job, _ in pieces:
                job.end_unbegun(error)
            self._wake.set()

        return in_pieces(filled, hand_over, give_up)

    def _new_rows(self, ids: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        with self._transfer.within():  # memory that nothing else is asked of the device for
            made = {
                name: torch.empty(
                    (len(wanted), *self._levels[name].row_shape),
                    dtype=self._levels[name].dtype,
                    device=self.device,
                )
                for name, wanted in ids.items()
            }
        self._transfer.keep(made.values())
        return made

    def _target(self, out: Any, name: str) -> torch.Tensor:
        """A caller's out as a tensor of the rows' dtype."""
        level = self._levels[name]
        if is_tensor(out) and out.device == self.device and out.device.type != "cpu":
            rows = out.reshape(-1, *level.row_shape) if out.is_contiguous() else out
            if out.dtype == level.dtype and tuple(rows.shape[1:]) == tuple(level.row_shape):
                return rows  # type: ignore[no-any-return]
        table = self.store.table(name)
        dtype = dtype_from_name(table.entry.dtype)
        shape = (len(out) if getattr(out, "ndim", 0) else 0, *table.row_shape)
        raw = check_out(out, shape, dtype)
        if len(raw) == 0:
            return torch.empty(shape, dtype=level.dtype)
        return torch.from_numpy(raw).view(level.dtype).reshape(shape)

    # The thread of the devices.

    def _run(self) -> None:
        with self._transfer.within():
            self._serve()

    def _serve(self) -> None:
        begun: deque[tuple[_Job, Any]] = deque()
        while not (self._closed and not self._todo and not begun):
            if self._begin_some(begun):
                pass
            elif begun and self._has_come(begun[0][0]):
                job, target = begun.popleft()
                self._finish(job, target)
                if job.error is not None:
                    self._take_over(begun)
                del job, target  # through which this thread would hold who asked
            else:
                self._wake.wait(1.0)

    @staticmethod
    def _has_come(job: _Job) -> bool:
        """Whether nothing of a piece is on its way any more. Rows that another was to bring may be asked for
        anew."""
        try:
            return job.error is not None or job.ticket is None or job.ticket.done()
        except BaseException as error:
            job.error = error
            return True

    @staticmethod
    def _take_over(begun: Iterable[tuple[_Job, Any]]) -> None:
        """Rows that a failed piece was to bring are asked for by the first one that waits for them. Were they
        by one that is begun later, that one would wait for its turn, and those before it for the rows."""
        for job, _ in begun:
            if job.ticket is not None and job.error is None:
                try:
                    job.ticket.done()
                except BaseException as error:
                    job.error = error

    def _begin_some(self, begun: deque[tuple[_Job, Any]]) -> bool:
        """Begin the next piece, or two of a request, which ask for what they lack together, where there is
        room for them; whether there was."""
        pair = len(self._todo) > 1 and self._todo[0][0].goes_with(self._todo[1][0])
        new: list[_Job] = []
        try:
            with self._bundle.together():
                while self._todo and len(new) <= pair and len(begun) + 1 + pair - len(new) <= _DEPTH:
                    if not self._begin(self._todo[0][0]):
                        break
                    begun.append(self._todo.popleft())
                    new.append(begun[-1][0])
        except BaseException as error:
            for job in new:
                job.error = job.error or error
        return bool(new)

    def _begin(self, job: _Job) -> bool:
        """Take slots; False where others under way hold too many."""
        if not job.cancelled and job.claim():
            try:
                job.ticket = self._levels[job.table].begin(job.ids)
            except BaseException as error:
                job.error = error
        return job.cancelled or job.error is not None or job.ticket is not None

    def _finish(self, job: _Job, target: torch.Tensor) -> None:
        """Put the rows of a piece together and hand them over."""
        try:
            if job.error is not None:
                raise job.error
            if job.ticket is None:
                raise CancelledError("the request was cancelled; submit it again where its rows are wanted")
            self._put_together(job, job.ticket, target)
        except BaseException as error:
            if job.ticket is not None:
                job.ticket.cancel()
            job.error = error
        job.request.close_piece(job, job.error)

    def _put_together(self, job: _Job, ticket: DeviceTicket, target: torch.Tensor) -> None:
        level = self._levels[job.table]
        if job.cancelled:
            raise CancelledError("the request was cancelled; submit it again where its rows are wanted")
        rows = level.gather(ticket, self._staging).to(target.device)
        if target.device.type != "cpu":
            self._transfer.hand(job.asked)
        if isinstance(job.places, slice):
            target[job.places] = rows
        else:
            target[torch.from_numpy(np.asarray(job.places, np.int64)).to(target.device)] = rows
        done = self._transfer.mark()
        if done is not None:
            done.synchronize()  # it is there, whatever stream it is used in

    def _refuse(self) -> None:
        """Requests that came while this was closed."""
        try:
            self._worker.end()
        finally:
            while self._todo:
                job, _ = self._todo.popleft()
                job.request.close_piece(job, ClosedError("the device tier is closed"))

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._levels[table].holds(ids)

    def hits(self) -> int:
        return sum(level.stats().hits for level in self._levels.values())

    def stats(self) -> dict[str, BufferStats]:
        """What the devices have counted, by table."""
        return {name: level.stats() for name, level in list(self._levels.items())}

    def policies(self) -> dict[str, PolicyNow]:
        """The policy of each table's rows on the devices."""
        return {n: PolicyNow(one.policy_name, "it was asked for") for n, one in list(self._levels.items())}

    def close(self) -> None:
        if not self.here:
            return
        self._closed = True
        self._wake.set()
        self._refuse()
        self._levels = {}

    def __repr__(self) -> str:
        return f"<DeviceTier on {self.device}, {self.memory_bytes:,} bytes in host memory>"
