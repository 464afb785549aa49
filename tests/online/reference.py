"""The slot map in plain Python: dicts and lists, written from the definitions of the policies. Slow, short,
and to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from featstore.tiers.slots import layout

_EMPTY, _IN_FLIGHT, _PRESENT, _FAILED = range(4)


@dataclass
class Slot:
    row: int = -1
    pins: int = 0
    status: int = _EMPTY


@dataclass
class Fifo:
    """A hand goes round over the slots."""

    slots: list[Slot]
    hand: int = 0

    def batch(self, number: int) -> None: ...
    def hit(self, slot: int) -> None: ...
    def pin(self, slot: int) -> None: ...
    def insert(self, slot: int) -> None: ...
    def idle(self, slot: int) -> None: ...
    def remove(self, slot: int) -> None: ...
    def next_use(self, slot: int, use: int) -> None: ...

    def spared(self, slot: int) -> bool:
        return False

    def victim(self) -> int:
        while True:
            slot, self.hand = self.hand, (self.hand + 1) % len(self.slots)
            if self.slots[slot].pins == 0 and not self.spared(slot):
                return slot


@dataclass
class Clock(Fifo):
    marked: set[int] = field(default_factory=set)

    def hit(self, slot: int) -> None:
        self.marked.add(slot)

    def insert(self, slot: int) -> None:
        self.marked.discard(slot)

    def spared(self, slot: int) -> bool:
        if slot not in self.marked:
            return False
        self.marked.discard(slot)
        return True


@dataclass
class Lru(Fifo):
    standby: list[int] = field(default_factory=list)

    def pin(self, slot: int) -> None:
        self.standby.remove(slot)

    def idle(self, slot: int) -> None:
        self.standby.append(slot)

    def victim(self) -> int:
        return self.standby.pop(0)


@dataclass
class Sieve(Fifo):
    """``order``: newest first. ``at``: the slot that the hand looks at next, None for the oldest."""

    order: list[int] = field(default_factory=list)
    at: int | None = None
    marked: set[int] = field(default_factory=set)

    def hit(self, slot: int) -> None:
        self.marked.add(slot)

    def insert(self, slot: int) -> None:
        self.order.insert(0, slot)
        self.marked.discard(slot)

    def newer(self, slot: int) -> int | None:
        place = self.order.index(slot)
        return self.order[place - 1] if place else None

    def remove(self, slot: int) -> None:
        if self.at == slot:
            self.at = self.newer(slot)
        self.order.remove(slot)

    def victim(self) -> int:
        while True:
            slot = self.order[-1] if self.at is None else self.at
            self.at = self.newer(slot)
            if self.slots[slot].pins:
                continue
            if slot in self.marked:
                self.marked.discard(slot)
                continue
            self.order.remove(slot)
            return slot


class Fingerprints:
    """Buckets of four; see featstore/tiers/slots/policies_ghosts.py."""

    def __init__(self, slots: int) -> None:
        entries = 4
        while entries < slots:
            entries *= 2
        self.buckets: list[list[tuple[int, int]]] = [[(0, 0)] * 4 for _ in range(entries // 4)]

    def find(self, row: int) -> tuple[list[tuple[int, int]], int]:
        multiplier, mask = 0xD6E8FEB86659FD93, 2**64 - 1
        h = row * multiplier & mask
        h ^= h >> 32
        h = h * multiplier & mask
        return self.buckets[(h >> 32) % len(self.buckets)], h & 0xFFFFFF | 1

    def remember(self, row: int, number: int) -> None:
        bucket, fingerprint = self.find(row)
        numbers = [number for number, _ in bucket]
        bucket[numbers.index(min(numbers))] = (number, fingerprint)

    def forget(self, row: int) -> int:
        bucket, fingerprint = self.find(row)
        for at, (number, known) in enumerate(bucket):
            if known == fingerprint:
                bucket[at] = (0, 0)
                return number
        return 0


class S3Fifo(Fifo):
    """``queues``: the small and the main one, newest first."""

    def __init__(self, slots: list[Slot], small: float = 0.1) -> None:
        super().__init__(slots)
        self.queues: tuple[list[int], list[int]] = ([], [])
        self.small_max = max(1, int(len(slots) * small))
        self.ghosts = Fingerprints(len(slots))
        self.left = 0  # rows that have left the small queue for the ghosts
        self.frequency: dict[int, int] = {}

    def hit(self, slot: int) -> None:
        self.frequency[slot] = min(3, self.frequency[slot] + 1)

    def insert(self, slot: int) -> None:
        self.frequency[slot] = 0
        number = self.ghosts.forget(self.slots[slot].row)
        known = number > 0 and self.left - number < len(self.slots) - self.small_max
        self.queues[known].insert(0, slot)

    def remove(self, slot: int) -> None:
        for queue in self.queues:
            if slot in queue:
                queue.remove(slot)

    def idle_in(self, queue: list[int]) -> bool:
        return any(self.slots[slot].pins == 0 for slot in queue)

    def victim(self) -> int:
        small, main = self.queues
        while True:
            from_small = not self.idle_in(main) or (len(small) >= self.small_max and self.idle_in(small))
            slot = (small if from_small else main).pop()
            if self.slots[slot].pins:
                (small if from_small else main).insert(0, slot)
            elif from_small and self.frequency[slot] > 1:
                self.frequency[slot] = 0
                main.insert(0, slot)
            elif not from_small and self.frequency[slot]:
                self.frequency[slot] -= 1
                main.insert(0, slot)
            else:
                if from_small:
                    self.left += 1
                    self.ghosts.remember(self.slots[slot].row, self.left)
                return slot


class Score(Fifo):
    """MassiveGNN's scores, decayed in every mini-batch."""

    def __init__(
        self,
        slots: list[Slot],
        resident: float = 0.75,
        gamma: float = 0.95,
        delta: int = 32,
        alpha: float | None = None,
    ) -> None:
        super().__init__(slots)
        self.resident_max, self.gamma, self.delta = int(len(slots) * resident), gamma, delta
        if alpha is None:
            alpha = 1.0
            for _ in range(delta):
                alpha *= gamma
        self.alpha = alpha
        self.eviction: dict[int, float] = {}  # S_E of the resident slots
        self.used: set[int] = set()  # residents that the last mini-batch used
        self.access = Fingerprints(len(slots))  # S_A
        self.threshold = 1
        self.standby: list[int] = []

    def batch(self, number: int) -> None:
        for slot in self.eviction:
            if slot not in self.used:
                self.eviction[slot] *= self.gamma
        self.used = set()
        if number % self.delta:
            return
        for slot in sorted(self.eviction):
            if self.eviction[slot] < self.alpha:
                del self.eviction[slot]
                if self.slots[slot].pins == 0:
                    self.standby.append(slot)
        places = self.resident_max - len(self.eviction)
        counts = sorted(
            (number for bucket in self.access.buckets for number, _ in bucket if number), reverse=True
        )
        if places == 0:
            self.threshold = 255
        else:
            self.threshold = counts[places - 1] if len(counts) >= places else 1

    def hit(self, slot: int) -> None:
        if slot in self.eviction:
            self.used.add(slot)

    def pin(self, slot: int) -> None:
        if slot not in self.eviction:
            self.standby.remove(slot)

    def idle(self, slot: int) -> None:
        if slot not in self.eviction:
            self.standby.append(slot)

    def insert(self, slot: int) -> None:
        row = self.slots[slot].row
        misses = min(255, self.access.forget(row) + 1)
        if len(self.eviction) < self.resident_max and misses >= self.threshold:
            self.eviction[slot] = misses
            self.used.add(slot)
        else:
            self.access.remember(row, misses)

    def remove(self, slot: int) -> None:
        self.eviction.pop(slot, None)

    def victim(self) -> int:
        if self.standby:
            return self.standby.pop(0)
        slot = super().victim()
        del self.eviction[slot]
        return slot


@dataclass
class Min(Fifo):
    use_of: dict[int, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)  # slots that nobody uses, the latest last

    def next_use(self, slot: int, use: int) -> None:
        self.use_of[slot] = use

    def pin(self, slot: int) -> None:
        self.released.remove(slot)

    def idle(self, slot: int) -> None:
        self.released.append(slot)

    def victim(self) -> int:
        # max takes the first of the greatest
        slot = max(reversed(self.released), key=lambda slot: self.use_of[slot])
        self.released.remove(slot)
        return slot


_POLICIES: dict[int, type[Fifo]] = {
    layout.STATIC: Fifo, layout.FIFO: Fifo, layout.LRU: Lru, layout.CLOCK: Clock, layout.SIEVE: Sieve,
    layout.S3FIFO: S3Fifo, layout.SCORE: Score, layout.MIN: Min,
}  # fmt: skip


class ReferenceMap:
    """What a slot map does. ``acquire`` returns (slots, positions to read, positions others read), or how
    many slots are short.
    """

    def __init__(self, slots: int, policy: int, **options: float) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.slot_of: dict[int, int] = {}
        self.free = list(range(slots))[::-1]  # the next is the last
        self.policy = _POLICIES[policy](self.slots, **options)  # type: ignore[arg-type]
        self.hits = self.misses = self.waits = self.evictions = self.batches = 0

    def unpinned(self) -> int:
        return sum(slot.pins == 0 for slot in self.slots)

    def acquire(
        self, rows: list[int], next_use: list[int] | None = None
    ) -> tuple[list[int], list[int], list[int]] | int:
        absent = {row for row in rows if row not in self.slot_of}
        idle = {row for row in rows if row in self.slot_of and self.slots[self.slot_of[row]].pins == 0}
        short = len(absent) + len(idle) - self.unpinned()
        if short > 0:
            return short
        self.batches += 1
        self.policy.batch(self.batches)
        uses = next_use or [0] * len(rows)
        reads, waits = [], []
        for i, row in enumerate(rows):
            if row not in self.slot_of:
                continue
            slot = self.slots[self.slot_of[row]]
            if slot.status == _FAILED:
                slot.status, slot.pins = _IN_FLIGHT, slot.pins + 2
                self.policy.next_use(self.slot_of[row], uses[i])
                reads.append(i)
                continue
            if slot.status == _IN_FLIGHT:
                waits.append(i)
            self._hit(self.slot_of[row], uses[i])
        self.waits += len(waits)
        for i, row in enumerate(rows):
            if row in absent and row in self.slot_of:
                self._hit(self.slot_of[row], uses[i])
                self.waits += 1
            elif row in absent:
                self._read(row, uses[i])
                reads.append(i)
        self.misses += len(reads)
        self.hits += len(rows) - len(reads)
        return [self.slot_of[row] for row in rows], sorted(reads), waits

    def _hit(self, slot: int, use: int) -> None:
        if self.slots[slot].pins == 0:
            self.policy.pin(slot)
        self.slots[slot].pins += 1
        self.policy.next_use(slot, use)
        self.policy.hit(slot)

    def _read(self, row: int, use: int) -> None:
        if self.free:
            slot = self.free.pop()
        else:
            slot = self.policy.victim()
            self.evictions += 1
            assert self.slots[slot].status == _PRESENT
            assert self.slots[slot].pins == 0
            del self.slot_of[self.slots[slot].row]
        new = self.slots[slot]
        new.row, new.pins, new.status = row, 2, _IN_FLIGHT
        self.slot_of[row] = slot
        self.policy.next_use(slot, use)
        self.policy.insert(slot)

    def end_read(self, slots: list[int], good: bool) -> None:
        for slot in slots:
            assert self.slots[slot].status == _IN_FLIGHT
            self.slots[slot].status = _PRESENT if good else _FAILED
            self._unpin(slot)

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._unpin(slot)

    def _unpin(self, slot: int) -> None:
        held = self.slots[slot]
        held.pins -= 1
        if held.pins:
            return
        if held.status == _FAILED:
            del self.slot_of[held.row]
            self.policy.remove(slot)
            held.row, held.status = -1, _EMPTY
            self.free.append(slot)
        else:
            self.policy.idle(slot)

    def look_again(self, slots: list[int], waits: list[int]) -> tuple[list[int], list[int]]:
        still, reads = [], []
        for i in waits:
            slot = self.slots[slots[i]]
            if slot.status == _FAILED:
                slot.status, slot.pins = _IN_FLIGHT, slot.pins + 1
                self.misses += 1
                reads.append(i)
            elif slot.status == _IN_FLIGHT:
                still.append(i)
        return still, reads
