"""The device level: rows on one or several accelerators, above the host's feature buffer (after BGL, NSDI'23,
section 3.2).

A node's rows belong on the device of its id modulo the number of devices, so no row is on two of them. A
mini-batch asks the devices first; what they have not comes through the host's buffer, is put on its device,
and stays there until its slot is needed. Each device has a slot map like the host's
(:mod:`featstore.tiers.slots.slots`), in host memory, and any of its policies. What the host's buffer sees is
what the devices miss.

*No locks.* One thread does everything: the loader's, which extracts. Slots are filled and read in one stream
for each device, that of this thread; so a row is there before it is read, and read before its slot is
another's.

*No deadlock, and no row twice.* A mini-batch gets all its slots on all devices, or changes nothing. A row
that an earlier mini-batch already brings is waited for. When that mini-batch is given up, the next one that
looks brings the row itself.

Rows are moved as the widest integers that they consist of: torch cannot index every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.arguments import as_choice, as_count, as_device, as_function, as_sequence, shown
from featstore.base.ids import parse_ids
from featstore.base.tensors import as_tensor
from featstore.base.transfers import Transfer
from featstore.errors import ArgumentError, BudgetError, CancelledError
from featstore.tiers.buffer import COUNTED
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tiers.slots.contents import are_present, joined, present_ids
from featstore.tiers.slots.rows import check_memory
from featstore.tiers.tickets import BufferStats, HostTicket

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def word_of(row_bytes: int) -> torch.dtype:
    """The widest integers that rows of so many bytes consist of."""
    return next(dtype for size, dtype in _WORDS.items() if row_bytes % size == 0)


class Host(Protocol):
    """What brings rows to host memory: a feature buffer, or anything else."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def slots_unkept(self) -> int: ...

    def check_ids(self, ids: NDArray[np.int64]) -> None: ...

    def begin(self, ids: NDArray[np.int64]) -> HostTicket: ...

    def gather(self, ticket: Any, out: NDArray[Any]) -> object: ...

    def uncounted(self) -> AbstractContextManager[None]: ...


class _Shard:
    """The rows on one device: ``x`` (words [slots, words of a row]), and which row is in which slot."""

    def __init__(self, device: torch.device, slots: int, row_bytes: int, policy: str) -> None:
        word = word_of(row_bytes)
        self.device, self.slots, self.transfer = device, slots, Transfer(device)
        self.map = layout.make_slot_map(slots, layout.POLICIES[policy])
        sl.load_kernels(self.map)
        self.x = torch.empty((slots, row_bytes // word.itemsize), dtype=word, device=device)

    def take(self, slots: NDArray[np.int32]) -> torch.Tensor:
        return self.x.index_select(0, torch.from_numpy(slots).to(self.device))

    def put(self, slots: NDArray[np.int32], words: torch.Tensor) -> None:
        self.x.index_copy_(0, torch.from_numpy(slots.astype(np.int64)).to(self.device), words)


class _Part:
    """What a mini-batch holds of one shard: ``places`` of its rows in it, their ``slots``, pinned while
    ``outcome[2]`` is 1, and the places of rows that others bring."""

    def __init__(self, shard: _Shard, places: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        self.shard, self.places, self.ids = shard, places, ids
        self.slots, self.missed, self.waits = (np.empty(len(ids), np.int32) for _ in range(3))
        self.outcome = np.zeros(3, np.int64)

    def acquire(self) -> int:
        """How many slots are short, or 0."""
        sl.acquire(self.shard.map, self.ids, self.slots, self.missed, self.waits, outcome=self.outcome)
        self.waits = self.waits[: max(0, self.outcome[1])]
        if len(self.waits):  # a row that has failed before and occurs twice: this ticket brings it itself
            own = self.slots[self.missed[: max(0, self.outcome[0])]]
            self.waits = self.waits[~np.isin(self.slots[self.waits], own)]
        return max(0, -int(self.outcome[0]))


class _Fill:
    """Rows to be brought to devices: of each part the positions in ``missed``; ``host``: the host's ticket
    for them, one after the other."""

    def __init__(self) -> None:
        self.missed: list[tuple[_Part, NDArray[np.int32]]] = []
        self.host: HostTicket | None = None

    def ids(self) -> NDArray[np.int64]:
        return np.concatenate([part.ids[positions] for part, positions in self.missed])

    def end(self, status: int) -> None:
        """The rows are in their slots, or will not be."""
        while self.missed:
            part, missed = self.missed.pop()
            sl.unpin(part.shard.map, part.slots[missed], status, np.ones(1, np.int64))
        if self.host is not None:
            self.host.release()


class DeviceTicket:
    """One mini-batch's claim on a :class:`DeviceBuffer`. ``ids``: int64 [n]; ``asked_of_host``: those that
    were on no device."""

    def __init__(self, buffer: DeviceBuffer, ids: NDArray[np.int64]) -> None:
        self._buffer, self.ids = buffer, ids
        self._parts: list[_Part] = []
        self._fills: list[_Fill] = []
        self._released = False
        self.asked_of_host = np.empty(0, np.int64)

    def done(self) -> bool:
        """Whether :meth:`DeviceBuffer.gather` would not wait. Raises what the host's buffer raises."""
        return self._buffer._done(self)

    def release(self) -> None:
        """Give the slots back; a host's read under way goes on, but its rows are not put on the devices. May
        be called more than once."""
        self._released = True
        for fill in self._fills:
            fill.end(layout.FAILED)
        for part in self._parts:
            sl.release(part.shard.map, part.slots, part.outcome)

    def cancel(self) -> None:
        """Release, and stop the host's reads."""
        for fill in self._fills:
            if fill.host is not None:
                fill.host.cancel()
        self.release()


class DeviceBuffer:
    """Rows of one table on devices, above the host's buffer; see the module's text.

    Args:
        host: what brings the rows below, a feature buffer for example; it stays open. Its slots bound what
            a mini-batch may miss here.
        devices: as torch takes them; mini-batches are put together on the first.
        slots: how many rows fit on each device.
        policy: a name of :data:`featstore.tiers.slots.layout.POLICIES` but ``"static"`` and ``"min"``.

    Raises ArgumentError, also for a device that is not there; TypeError for rows whose dtype torch does not
    know; what torch raises where a device is too small.
    """

    def __init__(self, host: Host, devices: Sequence[Any], *, slots: int, policy: str) -> None:
        if not all(callable(getattr(host, name, None)) for name in ("begin", "gather", "check_ids")):
            raise ArgumentError(f"host must be a feature buffer or what does the same, not {shown(host)}")
        slots = as_count(slots, "slots", 1, layout.BUFFER_ROWS_MAX)
        as_choice(policy, "policy", [name for name in layout.POLICIES if name not in ("static", "min")])
        devices = [as_device(one, "devices") for one in as_sequence(devices, "devices", "devices")]
        if not devices:
            raise ArgumentError("devices must be at least one, as torch takes them")
        self._host, self.policy_name = host, policy
        self.row_shape, self._row_bytes = host.row_shape, host.row_bytes
        self.dtype = as_tensor(np.empty(0, host.dtype)).dtype
        self._shards = [_Shard(torch.device(device), slots, self._row_bytes, policy) for device in devices]
        self.slots = slots * len(self._shards)

    # A mini-batch.

    def begin(self, ids: Any) -> DeviceTicket | None:
        """Claim slots for the rows of a mini-batch (node ids, which must stay as they are; duplicates are
        fine), and start to bring what is missing; None where other tickets hold too many slots.

        Raises IdError; BudgetError where there are too few slots whoever holds them; what the host's
        ``begin`` raises.
        """
        values = parse_ids(ids).values
        self._host.check_ids(values)
        ticket, fill, before = DeviceTicket(self, values), _Fill(), self._counts()
        ticket._fills.append(fill)
        try:
            for part in self._split(values):
                if part.acquire():
                    self._check_fits(part)
                    ticket.release()
                    self._uncount(before)
                    return None
                ticket._parts.append(part)
                fill.missed.append((part, part.missed[: part.outcome[0]]))
            ticket.asked_of_host = fill.ids()
            fill.host = self._host.begin(ticket.asked_of_host)
        except BaseException:
            ticket.cancel()
            raise
        return ticket

    def _counts(self) -> list[NDArray[np.int64]]:
        return [shard.map.counts[COUNTED].copy() for shard in self._shards]

    def _uncount(self, before: list[NDArray[np.int64]]) -> None:
        """What was asked since then does not count."""
        for shard, counts in zip(self._shards, before, strict=True):
            shard.map.counts[COUNTED] = counts

    def _split(self, ids: NDArray[np.int64]) -> list[_Part]:
        if len(self._shards) == 1:
            return [_Part(self._shards[0], np.arange(len(ids)), ids)]
        of_shard = ids % len(self._shards)
        places = [np.flatnonzero(of_shard == number) for number in range(len(self._shards))]
        return [_Part(shard, at, ids[at]) for shard, at in zip(self._shards, places, strict=True)]

    def _check_fits(self, part: _Part) -> None:
        needed, shard = len(np.unique(part.ids)), part.shard
        if needed > shard.slots:
            what = f"hold the {needed:,} rows of a mini-batch that belong on {shard.device} (device_memory=)"
            raise BudgetError(needed * self._row_bytes, shard.slots * self._row_bytes, what)

    def _done(self, ticket: DeviceTicket) -> bool:
        if ticket._released:
            raise CancelledError("the ticket was released before its rows were there")
        fill = _Fill()
        for part in ticket._parts:
            positions = np.empty(len(part.waits), np.int32)
            still, reads = sl.look_again(part.shard.map, part.slots, part.waits, positions)
            part.waits = part.waits[:still]
            if reads:  # who was to bring them has given up
                fill.missed.append((part, positions[:reads]))
                part.waits = part.waits[~np.isin(part.slots[part.waits], part.slots[positions[:reads]])]
        if fill.missed:
            ticket._fills.append(fill)
            fill.host = self._host.begin(fill.ids())
        arrived = all(fill.host is None or fill.host.done() for fill in ticket._fills)
        return arrived and not any(len(part.waits) for part in ticket._parts)

    def gather(self, ticket: DeviceTicket, staging: NDArray[np.uint8]) -> torch.Tensor:
        """The rows of a ticket that is done, [n, *row shape] on the first device; its slots are given back.

        ``staging``: uint8, memory for what comes from the host, which may be used again at once. Raises what
        went wrong with a read; CancelledError for a ticket that was released; ArgumentError for one of
        another buffer or whose rows are not there yet.
        """
        if not isinstance(ticket, DeviceTicket) or ticket._buffer is not self:
            raise ArgumentError(f"ticket must be one that this buffer's begin() gave, not {shown(ticket)}")
        if ticket._released:
            raise CancelledError("the ticket was released: its slots may hold other rows")
        missed = max((len(fill.host.ids) for fill in ticket._fills if fill.host is not None), default=0)
        self._check_staging(staging, missed)
        if any(len(part.waits) for part in ticket._parts) and not self._done(ticket):
            raise ArgumentError("ticket: its rows are not all there; gather when done() is True")
        for fill in ticket._fills:
            self._fill(fill, staging)
        parts = [part for part in ticket._parts if len(part.ids)]
        if len(parts) == 1:
            words = parts[0].shard.take(parts[0].slots)
        else:
            shape = (len(ticket.ids), *self._shards[0].x.shape[1:])
            words = torch.empty(shape, dtype=self._shards[0].x.dtype, device=self._shards[0].device)
            for part in parts:
                there = part.shard.take(part.slots).to(words.device)
                words[torch.from_numpy(part.places).to(words.device)] = there
        ticket.release()
        words = words.to(self._shards[0].device)
        return words.view(self.dtype).reshape(len(ticket.ids), *self.row_shape)

    def _check_staging(self, staging: NDArray[np.uint8], rows: int) -> None:
        if len(check_memory(staging, "staging")) < rows * self._row_bytes:
            raise ArgumentError(
                f"staging has {len(staging):,} bytes, and {rows:,} rows from the host take "
                f"{rows * self._row_bytes:,}"
            )

    def _fill(self, fill: _Fill, staging: NDArray[np.uint8]) -> None:
        """Put rows that the host has on their devices."""
        if not fill.missed or fill.host is None:
            return
        count = len(fill.host.ids)
        rows = staging[: count * self._row_bytes].reshape(count, self._row_bytes)
        self._host.gather(fill.host, rows.view(self._host.dtype).reshape(count, *self.row_shape))
        words = torch.from_numpy(rows).view(self._shards[0].x.dtype)
        low = 0
        for part, missed in fill.missed:
            there = part.shard.transfer({"": words[low : low + len(missed)]})[""]
            part.shard.put(part.slots[missed], there)
            low += len(missed)
        for part, _ in fill.missed:
            part.shard.transfer.close()  # staging is used again
        fill.end(layout.PRESENT)

    def close(self) -> None:
        """Give back the devices' memory. May be called more than once."""
        for shard in self._shards:
            shard.x = torch.empty_like(shard.x[:0])

    # Beforehand, and afterwards.

    def load(self, ids: NDArray[np.int64], staging: NDArray[np.uint8], *, uses: int = 1) -> None:
        """Bring rows beforehand that fit, as if they had been asked for so many times, but for the counts."""
        ids = parse_ids(ids).values
        self._host.check_ids(ids)
        self._check_staging(staging, 1)
        as_count(uses, "uses", 1, layout.COUNT_MAX)
        before = self._counts()
        at_once = max(1, min(len(staging) // self._row_bytes, self._host.slots_unkept))
        with self._host.uncounted():
            for low in range(0, len(ids), at_once):
                for _ in range(uses):
                    self._load_piece(ids[low : low + at_once], staging)
        self._uncount(before)

    def _load_piece(self, ids: NDArray[np.int64], staging: NDArray[np.uint8]) -> None:
        ticket = self.begin(ids)
        if ticket is None:
            raise ArgumentError("rows are loaded beforehand while no ticket holds slots")
        try:
            for fill in ticket._fills:
                self._fill(fill, staging)
        finally:
            ticket.release()

    @property
    def memory_bytes(self) -> int:
        """Host memory of the slot maps; the rows take that of the devices."""
        return len(self._shards) * layout.slot_map_bytes(
            self._shards[0].slots, layout.POLICIES[self.policy_name]
        )

    def cached_ids(self) -> NDArray[np.int64]:
        """int64, the node ids of the rows that are on the devices, of each device those that would leave
        first at the front."""
        return joined(self.cached_pieces())

    def cached_pieces(self) -> Iterator[NDArray[np.int64]]:
        """The ids of :meth:`cached_ids` in pieces. Nothing may be asked of the buffer meanwhile."""
        for shard in self._shards:
            yield from present_ids(shard.map)

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n], which of these rows are on the devices."""
        ids = parse_ids(ids).values
        self._host.check_ids(ids)
        found, of_shard = np.empty(len(ids), bool), ids % len(self._shards)
        for n, shard in enumerate(self._shards):
            found[of_shard == n] = are_present(shard.map, ids[of_shard == n])
        return found

    def last_that_fit(
        self, ids: Callable[[], Iterator[NDArray[np.int64]]]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of each piece of ids those that are for the devices, and the others: of the ids that belong on one
        device, the last ones are that fit there. ``ids`` is called twice."""
        as_function(ids, "ids")
        count = len(self._shards)
        spare = np.full(count, -self._shards[0].slots)  # ids of each device that have no room, the first ones
        for piece in ids():
            spare += np.bincount(piece % count, minlength=count)
        spare = np.maximum(0, spare)
        for piece in ids():
            fits = np.zeros(len(piece), bool)
            for number in range(count):
                places = np.flatnonzero(piece % count == number)
                fits[places[spare[number] :]] = True
                spare[number] -= min(spare[number], len(places))
            yield piece[fits], piece[~fits]

    def stats(self) -> BufferStats:
        """What all devices have counted."""
        counts = np.stack(self._counts())
        hits, misses, waits, evictions = (int(n) for n in counts[:, :-1].sum(0))
        return BufferStats(hits, misses, waits, evictions, int(counts[:, -1].max()))

    def __repr__(self) -> str:
        names = ", ".join(str(shard.device) for shard in self._shards)
        return f"<DeviceBuffer of {self.slots:,} rows on {names}, {self.policy_name}>"
