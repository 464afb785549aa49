"""MassiveGNN's prefetch and eviction (Sarkar et al., CLUSTER'24), to the letter: what a host keeps of the
rows that other hosts own.

The *halo* of a host is the nodes of other hosts that its own nodes' lists name. A buffer holds the rows of a
share f of it, at first those of the highest degree. Two scores, float32: S_E of each row in the buffer, 1 at
first, multiplied by gamma in each mini-batch that does not use it; S_A of each other node of the halo, 0 at
first, the number of mini-batches that missed it, and -1 of those in the buffer. In every delta-th mini-batch
rows with S_E below alpha make room for as many nodes of the highest S_A above 0 (ties by degree), which are
fetched with the mini-batch's misses; in that mini-batch S_A is not increased. Who goes takes along its S_E
as S_A, who comes its S_A as S_E.

alpha is gamma to the power of delta, and not rounded as in the published code. S_E never grows, so at
that alpha a row of the first buffer goes when more than delta mini-batches in all have not used it.
Nodes beyond the halo (of the second hop) are fetched each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_number
from featstore.base.bitmap import set_bits, slot_of
from featstore.base.buffers import empty_rows
from featstore.base.called import called
from featstore.base.compilation import njit
from featstore.base.dtypes import dtype_from_name
from featstore.base.ids import check_out, rows_of
from featstore.base.native import address_of, prefetch
from featstore.base.rows import move_rows
from featstore.engine.request import Request
from featstore.errors import ArgumentError, BudgetError
from featstore.hosts.halo import Halo, halo_count_of, halo_of
from featstore.storage.store import Table
from featstore.tiers import RowSource, Tier, source_tables
from featstore.tiers.over import OverSource
from featstore.tiers.saved import SavedCache
from featstore.tiers.static_tier import new_rows

_IN_BUFFER = np.float32(-1)
_AHEAD = 16  # ids
_NEVER = 1 << 62  # mini-batches from one replacement to the next: there is none


@njit(cache=True, nogil=True)
def look_up(
    ids: NDArray[np.int64], bits: Any, ranks: Any, slots: NDArray[np.int32], in_halo: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:  # fmt: skip
    """Of each id its place in the halo and its slot in the buffer, -1 for none."""
    last, words, counts = ids.shape[0] - 1, np.int64(bits.ctypes.data), np.int64(ranks.ctypes.data)
    held = np.int64(slots.ctypes.data)
    for i in range(ids.shape[0]):
        ahead = ids[min(i + _AHEAD, last)] >> 6
        prefetch(words + 8 * ahead)
        prefetch(counts + 4 * ahead)
        in_halo[i] = slot_of(ids[i], bits, ranks)
        prefetch(held + 4 * max(np.int64(in_halo[i]), np.int64(0)))
    for i in range(ids.shape[0]):
        found[i] = slots[in_halo[i]] if in_halo[i] >= 0 else -1


@njit(cache=True, nogil=True)
def decay(scores: NDArray[np.float32], gamma: Any, used: NDArray[np.int32]) -> None:
    """Multiply the S_E of slots that were not used."""
    before = np.empty(used.shape[0], np.float32)
    for i in range(used.shape[0]):
        if used[i] >= 0:
            before[i] = scores[used[i]]
    scores *= gamma  # all, which takes a fraction of looking at each
    for i in range(used.shape[0]):
        if used[i] >= 0:
            scores[used[i]] = before[i]


@njit(cache=True, nogil=True)
def count_misses(access: NDArray[np.float32], in_halo: NDArray[np.int32], found: NDArray[np.int32]) -> None:
    """Increase the S_A of nodes of the halo that are not in the buffer."""
    for i in range(found.shape[0]):
        if found[i] < 0 and in_halo[i] >= 0:
            access[in_halo[i]] += np.float32(1)


class HaloScores:
    """Which nodes of a halo are in a buffer of ``share`` of it; see the module's text. ``nodes``: of the
    table."""

    def __init__(
        self, halo: Halo, nodes: int, share: float, gamma: float, delta: int, alpha: float | None = None
    ) -> None:
        self.halo, self.gamma, self.delta = halo, np.float32(gamma), delta
        self.slots = int(share * len(halo.ids))
        self._bits = np.zeros(-(-nodes // 64), np.uint64)
        self._ranks = np.zeros(len(self._bits), np.int32)
        set_bits(halo.ids, self._bits, self._ranks)
        self.alpha = _power(self.gamma, delta) if alpha is None else np.float32(alpha)
        # ties by degree, then by id
        self._by_degree = np.argsort(-halo.degrees, kind="stable")
        self.node_in = self._by_degree[: self.slots].astype(np.int32)  # places in the halo, by slot
        self._slot_of = np.full(len(halo.ids), -1, np.int32)
        self._slot_of[self.node_in] = np.arange(self.slots, dtype=np.int32)
        self.stay = np.ones(self.slots, np.float32)  # S_E
        self.access = np.zeros(len(halo.ids), np.float32)  # S_A
        self.access[self.node_in] = _IN_BUFFER
        self._rank = np.empty(len(halo.ids), np.int32)
        self._rank[self._by_degree] = np.arange(len(halo.ids), dtype=np.int32)
        self.step = 0

    @property
    def held_bytes(self) -> int:
        """Memory of all this, the halo's ids and degrees too."""
        own = (self._bits, self._ranks, self._by_degree, self._slot_of, self.access, self._rank)
        return sum(a.nbytes for a in (*own, *self.halo, self.node_in, self.stay))

    @staticmethod
    def bytes_for(nodes: int, halo: int, slots: int) -> int:
        """Memory for so many nodes, of the table and in the halo, and slots."""
        return -(-nodes // 64) * 12 + halo * (8 + 8 + 8 + 4 + 4 + 4) + slots * (4 + 4)

    def begin_with(self, ids: NDArray[np.int64]) -> None:
        """Have these nodes in the buffer, the last ones as far as there are slots, and then those of the
        highest degree; scores begin anew. Others than the halo's are passed over."""
        in_halo, _ = self.look(ids)
        asked = in_halo[in_halo >= 0][::-1]
        _, first = np.unique(asked, return_index=True)
        order = np.concatenate([asked[np.sort(first)], self._by_degree.astype(np.int32)])
        _, first = np.unique(order, return_index=True)
        self._slot_of[self.node_in] = -1
        self.node_in = order[np.sort(first)][: self.slots].astype(np.int32)
        self._slot_of[self.node_in] = np.arange(self.slots, dtype=np.int32)
        self.stay[:], self.access[:] = 1, 0
        self.access[self.node_in] = _IN_BUFFER

    def look(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of distinct ids of a mini-batch, their places in the halo and their slots, -1 for none."""
        in_halo, found = np.empty(len(ids), np.int32), np.empty(len(ids), np.int32)
        look_up(ids, self._bits, self._ranks, self._slot_of, in_halo, found)
        return in_halo, found

    def score(
        self, in_halo: NDArray[np.int32], found: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Go on by a mini-batch with these places and slots. Slots that change hands, and the places in the
        halo of who gets them."""
        if self.delta == _NEVER:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self.step += 1
        decay(self.stay, self.gamma, found)
        if self.step % self.delta:
            count_misses(self.access, in_halo, found)
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return self._swap()

    def _swap(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        leaving = np.flatnonzero(self.stay < self.alpha)
        wanted = np.flatnonzero(self.access > 0)
        coming = wanted[_highest(self.access[wanted], self._rank[wanted], len(leaving))]
        leaving = leaving[np.argsort(self.stay[leaving], kind="stable")][: len(coming)]
        gone = self.node_in[leaving]
        self.access[gone], self._slot_of[gone] = self.stay[leaving], -1
        self.stay[leaving] = self.access[coming]
        self.access[coming] = _IN_BUFFER
        self._slot_of[coming], self.node_in[leaving] = leaving, coming
        return leaving, coming


def _highest(scores: NDArray[np.float32], ranks: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Positions of the highest scores, as many as there are up to ``count``, in order; ties by rank."""
    some = np.arange(len(scores))
    if 0 < count < len(scores):  # these alone are put in order
        bound = np.partition(scores, len(scores) - count)[len(scores) - count]
        above, alike = np.flatnonzero(scores > bound), np.flatnonzero(scores == bound)
        left = count - len(above)
        some = np.concatenate([above, alike[np.argpartition(ranks[alike], left - 1)[:left]]])
    return some[np.lexsort((ranks[some], -scores[some]))][:count]


def _power(gamma: np.float32, delta: int) -> np.float32:
    """Gamma to the power of delta, as scores come to it."""
    value = np.float32(1)
    for _ in range(delta):
        value = np.float32(value * gamma)
    return value


class MassiveGNN:
    """A tier over the rows of other hosts, as MassiveGNN keeps them; for ``halo=`` of a loader.

    Args:
        share: f, of the halo, whose rows are held.
        gamma: of S_E, from 0 to 1.
        delta: mini-batches from one replacement to the next; None for none, which keeps the rows of the
            highest degree (the paper's prefetch without eviction).
        alpha: below which S_E lets go; gamma to the power of delta unless given.

    Each request is a mini-batch of distinct ids. It is of stores that are split by hosts. Beside its memory
    it takes 4 bytes for each node of all hosts (8 above 2**31) while it is made, where topology is whole; and
    in every delta-th mini-batch the rows that it asks for once more, until they are where they are wanted.
    """

    def __init__(
        self, share: float = 0.25, gamma: float = 0.995, delta: int | None = 64, alpha: float | None = None
    ) -> None:
        self.share = as_number(share, "share", 0, 1)
        self.gamma = as_number(gamma, "gamma", 0, 1)
        self.delta = None if delta is None else as_count(delta, "delta", 1, 2**20)
        self.alpha = None if alpha is None else as_number(alpha, "alpha", 0, 1)
        if delta is None and alpha is not None:
            raise ArgumentError("alpha= says which rows are replaced, and delta=None that none is")

    def host_bytes(self, tables: Sequence[Table]) -> int:
        total = 0
        for table in tables:
            halo = halo_count_of(table)
            slots = int(self.share * halo)
            total += HaloScores.bytes_for(table.rows, halo, slots) + slots * table.row_bytes
        return total

    def least_bytes(self, tables: Sequence[Table]) -> int:
        return self.host_bytes(tables)

    def over(self, below: RowSource, memory_bytes: int) -> Tier:
        needed = self.host_bytes(source_tables(below))
        if memory_bytes < needed:
            raise BudgetError(needed, memory_bytes, f"hold {self.share:.0%} of the halo")
        return MassiveGNNTier(below, self)

    def __repr__(self) -> str:
        return called(
            "featstore.MassiveGNN", share=self.share, gamma=self.gamma, delta=self.delta, alpha=self.alpha
        )


class MassiveGNNTier(OverSource):
    """See :class:`MassiveGNN`. The first request fills the buffer, with one request below, as does the next
    one after rows for it have failed to come."""

    name = "massivegnn"

    def __init__(self, below: RowSource, how: MassiveGNN) -> None:
        super().__init__(below)
        self._tables: dict[str, tuple[HaloScores, NDArray[np.uint8]]] = {}
        for table in source_tables(below):
            delta, alpha = (_NEVER, 0.0) if how.delta is None else (how.delta, how.alpha)
            scores = HaloScores(halo_of(table), table.rows, how.share, how.gamma, delta, alpha)
            self._tables[table.name] = scores, empty_rows(scores.slots, table.row_bytes)
        self._lock, self._filled, self._hits = threading.Lock(), False, 0
        self._coming: Request | None = None  # rows for the buffer are on their way

    @property
    def memory_bytes(self) -> int:
        return sum(scores.held_bytes + rows.nbytes for scores, rows in self._tables.values())

    def submit(
        self, ids: Mapping[str, Any], *, out: Mapping[str, Any] | None, at: Mapping[str, Any] | None = None
    ) -> Request:
        self.check_open()
        filled = new_rows(self, ids) if out is None else dict(out)
        with self._lock:
            if self._coming is not None:
                # some that were to come may not have, of a request that failed or was cancelled
                self._filled = self._filled and self._coming.exception() is None
                self._coming = None
            if not self._filled:
                self._fill()
            try:
                return self._step(ids, filled, at)
            except BaseException:
                self._filled = False  # slots may have changed hands, and nobody fetches their rows
                raise

    def _fill(self) -> None:
        """The first rows of all tables."""
        wanted = {n: s.halo.ids[s.node_in] for n, (s, _) in self._tables.items() if s.slots}
        if wanted:
            out = {name: self._typed(name, self._tables[name][1]) for name in wanted}
            self._below.submit(wanted, out=out).result()
        self._filled = True

    def _typed(self, name: str, rows: NDArray[np.uint8]) -> NDArray[Any]:
        table = self.store.table(name)
        count = len(rows) // table.row_bytes
        return rows.view(dtype_from_name(table.entry.dtype)).reshape(count, *table.row_shape)

    def _step(self, ids: Mapping[str, Any], out: Mapping[str, Any], at: Mapping[str, Any] | None) -> Request:
        """Hits are copied; misses are asked for, and with them the rows that the buffer gets."""
        request = Request(lambda: out)
        request.begin()
        wanted: dict[str, NDArray[np.int64]] = {}
        moves: list[tuple[str, int, NDArray[np.int32], NDArray[Any], NDArray[Any]]] = []
        for name, given in ids.items():
            scores, rows = self._tables[name]
            table = self.store.table(name)
            raw = check_out(
                out[name], (rows_of(out[name]), *table.row_shape), dtype_from_name(table.entry.dtype)
            )
            in_halo, found = scores.look(given)
            places = np.arange(len(given), dtype=np.int32) if at is None else np.asarray(at[name], np.int32)
            hits = np.flatnonzero(found >= 0)
            if len(hits):
                move_rows(address_of(rows), found[hits], address_of(raw), places[hits], table.row_bytes)
            self._hits += len(hits)
            slots, coming = scores.score(in_halo, found)
            misses = np.flatnonzero(found < 0)
            missed = given[misses]
            extra = np.setdiff1d(scores.halo.ids[coming], missed, assume_unique=True)
            asked = np.concatenate([missed, extra])
            if len(asked):
                wanted[name] = asked
                order = np.argsort(asked, kind="stable")
                at_slots = order[np.searchsorted(asked, scores.halo.ids[coming], sorter=order)]
                moves.append((name, len(missed), places[misses], slots, at_slots))
        if wanted:
            self._ask(request, wanted, moves, out)
        request.close_piece(None, None)
        return request

    def _ask(
        self, request: Request, wanted: Mapping[str, NDArray[np.int64]], moves: list[Any],
        out: Mapping[str, Any],
    ) -> None:  # fmt: skip
        # misses alone go where they are wanted; what the buffer gets comes in the same messages, and then
        # to memory of its own
        straight = all(len(wanted[name]) == misses for name, misses, *_ in moves)
        if straight:
            at = {name: places for name, _, places, *_ in moves}
            below = self._below.submit(wanted, out={name: out[name] for name in wanted}, at=at)
        else:
            below = self._below.submit(wanted, out=None)
        request.open_piece(below)

        def arrived(done: Any) -> None:
            error = done.exception()
            try:
                for name, misses, places, slots, at_slots in moves if error is None else ():
                    if straight:
                        self._put(name, out[name], 0, places, slots, places[at_slots], out[name])
                    else:
                        self._put(name, done.result()[name], misses, places, slots, at_slots, out[name])
            except BaseException as failure:  # of memory: whoever waits must hear of it
                error = failure
            request.close_piece(done, error)

        if any(len(slots) for _, _, _, slots, _ in moves):
            self._coming = request
        below.add_done_callback(arrived)

    def _put(
        self, name: str, come: NDArray[Any], misses: int, places: NDArray[np.int32], slots: NDArray[Any],
        at_slots: NDArray[Any], out: Any,
    ) -> None:  # fmt: skip
        table = self.store.table(name)
        source = address_of(come.reshape(-1).view(np.uint8)) if come.size else 0
        raw = check_out(out, (rows_of(out), *table.row_shape), dtype_from_name(table.entry.dtype))
        if misses:
            first = np.arange(misses, dtype=np.int32)
            move_rows(source, first, address_of(raw), places, table.row_bytes)
        if len(slots):
            rows = self._tables[name][1]
            to = slots.astype(np.int32)
            move_rows(source, at_slots.astype(np.int32), address_of(rows), to, table.row_bytes)

    def held(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Node ids of the rows in the buffer, those of the least S_E first."""
        with self._lock:
            scores = self._tables[table][0]
            found = scores.halo.ids[scores.node_in[np.argsort(scores.stay, kind="stable")]]
        yield found

    def load(self, cache: SavedCache, table: str) -> None:
        """Begin with the rows that were saved, as far as there are slots, in place of those of the highest
        degree. Scores begin anew."""
        with self._lock:
            self._tables[table][0].begin_with(np.concatenate([*cache.ids(table)]))
            self._filled = False

    def holds(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        with self._lock:
            return self._tables[table][0].look(ids)[1] >= 0

    def hits(self) -> int:
        return self._hits

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"<MassiveGNNTier of {self.tables}, {self.memory_bytes:,} bytes>"
