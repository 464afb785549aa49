"""The feature buffer: every row is read once while it is in flight or present, whoever asks; nobody waits for
ever; errors leave it usable.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import featstore
from featstore.engine.request import Request
from featstore.errors import ArgumentError, BudgetError, CancelledError, ClosedError, DeviceError, IdError
from featstore.reader.reader import Reader
from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.slots import layout, slots
from featstore.tiers.slots.rows import buffer_bytes, slots_for
from featstore.tiers.tickets import Ticket

ROWS = 1000


class Watched:
    """A reader's submit, watched: no row is asked for while it is in flight or present, no slot while it is
    read into.

    ``hold``: reads wait until the test ends them with :meth:`end`; otherwise the reader performs them.
    """

    def __init__(self, reader: Reader, features: np.ndarray, hold: bool = False) -> None:
        self.submit_of_reader, self.features, self.hold = reader.submit, features, hold
        self.lock = threading.Lock()
        self.present: dict[int, int] = {}  # row of slot
        self.in_flight: dict[int, int] = {}  # row of slot
        self.held: list[tuple[Request, np.ndarray, np.ndarray, np.ndarray]] = []
        self.rows_read = 0
        self.wrong: list[str] = []
        reader.submit = self.submit  # type: ignore[method-assign]

    def submit(self, ids: Any, *, out: Any, at: Any) -> Request:
        (rows,), (x,), (slots,) = ids.values(), out.values(), at.values()
        rows, slots = rows.copy(), slots.copy()
        with self.lock:
            self._begin(rows.tolist(), slots.tolist())
        if not self.hold:
            request = self.submit_of_reader(ids, out=out, at=at)
            request.add_done_callback(lambda done: self._ended(rows, slots, done.exception() is None))
            return request
        request = Request(lambda: None)
        request.begin()
        self.held.append((request, rows, slots, x))
        return request

    def _begin(self, rows: list[int], slots: list[int]) -> None:
        for slot in slots:
            if slot in self.in_flight:
                self.wrong.append(f"slot {slot} is read into twice at once")
            self.present.pop(slot, None)
        twice = (set(self.present.values()) | set(self.in_flight.values())) & set(rows)
        if twice or len(set(rows)) < len(rows):
            self.wrong.append(f"rows {sorted(twice)} of {rows} are read twice")
        self.in_flight.update(zip(slots, rows, strict=True))
        self.rows_read += len(rows)

    def _ended(self, rows: np.ndarray, slots: np.ndarray, good: bool) -> None:
        with self.lock:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                del self.in_flight[slot]
                if good:
                    self.present[slot] = row

    def end(self, number: int, error: BaseException | None = None) -> None:
        request, rows, slots, x = self.held.pop(number)
        good = error is None and not request.stopped()
        if good:
            x[slots] = self.features[rows]
        else:
            x[slots] = np.nan
        self._ended(rows, slots, good)
        request.close_piece(None, error)


@pytest.fixture
def reader(store: featstore.Store) -> Iterator[Reader]:
    with store.reader(memory="4MiB", static=None) as made:
        yield made


@pytest.fixture
def watched(reader: Reader, features: np.ndarray) -> Iterator[Watched]:
    made = Watched(reader, features)
    yield made
    assert made.wrong == []


@pytest.fixture
def held(reader: Reader, features: np.ndarray) -> Iterator[Watched]:
    made = Watched(reader, features, hold=True)
    yield made
    assert made.wrong == []


def in_thread(work: Callable[[], Any]) -> Any:
    """Start work in another thread; ``result(20)`` of what is returned."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("policy", sorted(layout.POLICIES))
def test_rows_are_those_of_the_store(
    policy: str, reader: Reader, watched: Watched, features: np.ndarray
) -> None:
    rng = np.random.default_rng(0)
    with FeatureBuffer(reader, slots=150, policy=policy, batches=30 if policy == "min" else 0) as buffer:
        for batch in range(30):
            ids = (rng.power(0.5, (20, 5)) * ROWS).astype(np.int64)
            uses = np.full(ids.size, min(batch + 3, 29)) if policy == "min" else None
            with buffer.begin(ids, uses) as ticket:
                np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
                np.testing.assert_array_equal(buffer.x[ticket.slots], features[ids.reshape(-1)])
        stats = buffer.stats()
        assert stats.misses == watched.rows_read
        assert stats.hits + stats.misses == 3000
        assert stats.hit_rate > 0.1
        assert stats.batches == 30


def test_tensors_and_out(reader: Reader, features: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    with FeatureBuffer(reader, memory="100KiB") as buffer:
        out = torch.empty(3, 100)
        ids = torch.tensor([5, 1, 5])
        with buffer.begin(ids) as ticket:
            assert buffer.gather(ticket, out) is out
            assert isinstance(buffer.gather(ticket), torch.Tensor)
            np.testing.assert_array_equal(out.numpy(), features[[5, 1, 5]])
            with pytest.raises(ValueError, match="out must be"):
                buffer.gather(ticket, np.empty((2, 100), np.float32))


def test_static_rows_are_read_once(reader: Reader, watched: Watched, features: np.ndarray) -> None:
    with FeatureBuffer(reader, slots=20, policy="static", static=np.arange(10)) as buffer:
        for begin in range(10, 200, 10):
            ids = np.concatenate([np.arange(10), np.arange(begin, begin + 10)])
            with buffer.begin(ids) as ticket:
                np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
        assert watched.rows_read == 10 + 190
        with pytest.raises(BudgetError) as error:
            buffer.begin(np.arange(5, 21))
        assert error.value.needed_bytes == buffer_bytes(21, 400, layout.STATIC)


def test_an_epoch_of_the_smallest_buffer(reader: Reader, watched: Watched, features: np.ndarray) -> None:
    """The size that the error names works, and one slot less does not."""
    ids = np.arange(100, 140)
    with FeatureBuffer(reader, slots=39) as buffer, pytest.raises(BudgetError) as error:
        buffer.begin(ids)
    assert slots_for(error.value.needed_bytes, 400, layout.LRU) == 40
    assert slots_for(error.value.needed_bytes - 1, 400, layout.LRU) == 39
    with FeatureBuffer(reader, memory=error.value.needed_bytes) as buffer:
        for batch in range(5):
            with buffer.begin(ids + 20 * batch) as ticket:
                np.testing.assert_array_equal(buffer.gather(ticket), features[ids + 20 * batch])


def test_wrong_use(reader: Reader) -> None:
    with pytest.raises(ValueError, match="either slots or memory"):
        FeatureBuffer(reader)
    with pytest.raises(ValueError, match="policy must be one of"):
        FeatureBuffer(reader, slots=3, policy="best")
    with pytest.raises(BudgetError):
        FeatureBuffer(reader, memory=100)
    with FeatureBuffer(reader, slots=3) as buffer:
        for bad in ([-1], [ROWS], [0.5]):
            with pytest.raises(IdError):
                buffer.begin(bad)
        with pytest.raises(ValueError, match="next use"):
            buffer.begin([1], [2])
        assert buffer.begin([]).result().shape == (0,)
        assert buffer.begin([1]).slots.shape == (1,)
    with pytest.raises(ClosedError):
        buffer.begin([1])


def test_a_ticket_of_another_buffer_is_refused(reader: Reader, features: np.ndarray) -> None:
    """Its slots hold other rows here."""
    with FeatureBuffer(reader, slots=9) as buffer, FeatureBuffer(reader, slots=9) as other:
        other.load([7, 8])
        ticket = buffer.begin([1, 2])
        for use in (other.gather, other.release):
            with pytest.raises(ArgumentError, match="of another buffer"):
                use(ticket)
        np.testing.assert_array_equal(buffer.gather(ticket), features[[1, 2]])


def test_options_of_policies_are_refused_before_anything_is_made(reader: Reader) -> None:
    for options in ({"gama": 0.9}, {"memory_bytes": 3}, {"delta": 2**40}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            FeatureBuffer(reader, slots=9, policy="score", **options)


# Waiting for others' reads.


def test_rows_in_flight_are_waited_for(reader: Reader, held: Watched, features: np.ndarray) -> None:
    with FeatureBuffer(reader, slots=10) as buffer:
        first, second = buffer.begin([1, 2, 3]), buffer.begin([3, 4])
        held.end(1)
        assert not second.done()
        held.end(0)
        np.testing.assert_array_equal(buffer.gather(second), features[[3, 4]])
        np.testing.assert_array_equal(buffer.gather(first), features[[1, 2, 3]])
        assert held.rows_read == 4
        assert buffer.stats().waits == 1


@pytest.mark.parametrize("end", ["error", "cancel"])
def test_who_waits_for_a_failed_read_reads_himself(
    end: str, reader: Reader, held: Watched, features: np.ndarray
) -> None:
    with FeatureBuffer(reader, slots=10) as buffer:
        first, second = buffer.begin([1, 2, 3]), buffer.begin([3, 4])
        if end == "cancel":
            first.cancel()
        held.end(0, DeviceError(5, "file") if end == "error" else None)
        with pytest.raises(DeviceError if end == "error" else CancelledError):
            first.result(5)
        first.release()
        waiting = in_thread(lambda: buffer.gather(second))
        assert eventually(lambda: len(held.held) == 2)
        assert held.held[1][1].tolist() == [3]
        third = buffer.begin([3, 1])  # one is in flight for the second, one was dropped
        assert held.held[2][1].tolist() == [1]
        for _ in range(3):
            held.end(0)
        np.testing.assert_array_equal(waiting.result(20), features[[3, 4]])
        np.testing.assert_array_equal(buffer.gather(third), features[[3, 1]])


def test_a_row_that_failed_for_one_who_still_holds_it_is_read_by_the_next(
    reader: Reader, held: Watched, features: np.ndarray
) -> None:
    with FeatureBuffer(reader, slots=10) as buffer:
        first, second = buffer.begin([1]), buffer.begin([1])
        held.end(0, DeviceError(5, "file"))
        third = buffer.begin([1, 1])
        assert buffer.stats().misses == 2
        held.end(0)
        for ticket in (second, third):
            assert (buffer.gather(ticket) == features[1]).all()
        with pytest.raises(DeviceError):
            first.result()


def test_a_released_tickets_rows_arrive_for_others(
    reader: Reader, held: Watched, features: np.ndarray
) -> None:
    with FeatureBuffer(reader, slots=3) as buffer:
        buffer.begin([1, 2]).release()
        with pytest.raises(TimeoutError):  # two slots are being read into, though nobody wants them
            buffer.begin([5, 6], timeout=0.01)
        with buffer.begin([2, 7]) as ticket:
            held.end(0)
            held.end(0)
            np.testing.assert_array_equal(buffer.gather(ticket), features[[2, 7]])
        assert held.rows_read == 3


def test_a_failing_submit_leaves_the_buffer_usable(
    reader: Reader, watched: Watched, features: np.ndarray
) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        good = reader.submit

        def bad(*_: Any, **__: Any) -> Request:
            raise OSError("no")

        reader.submit = bad  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(OSError, match="no"):
                buffer.begin([1, 2, 3, 4])
        reader.submit = good  # type: ignore[method-assign]
        with buffer.begin([4, 5, 6, 7]) as ticket:
            np.testing.assert_array_equal(buffer.gather(ticket), features[4:8])


# Waiting for slots.


def test_one_thread_that_holds_everything_gets_an_error(reader: Reader, watched: Watched) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        ticket = buffer.begin([1, 2, 3])
        with pytest.raises(BudgetError, match="release a ticket first") as error:
            buffer.begin([4, 5])
        assert error.value.needed_bytes == buffer_bytes(5, 400, layout.LRU)
        ticket.release()
        buffer.begin([4, 5, 6, 7]).result(20)


def test_waiting_for_another_threads_release(reader: Reader, watched: Watched, features: np.ndarray) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        go = threading.Event()

        def hold() -> None:
            with buffer.begin([1, 2, 3]) as ticket:
                ticket.result()
                holding.set()
                go.wait(20)

        holding = threading.Event()
        other = in_thread(hold)
        assert holding.wait(20)
        with pytest.raises(TimeoutError):
            buffer.begin([4, 5], timeout=0.05)
        threading.Timer(0.05, go.set).start()
        with buffer.begin([4, 5], timeout=20) as ticket:
            np.testing.assert_array_equal(buffer.gather(ticket), features[[4, 5]])
        other.result(20)


def test_a_ticket_that_was_handed_over_is_waited_for(reader: Reader, watched: Watched) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        ticket = buffer.begin([1, 2, 3])
        ticket.hand_over()
        threading.Timer(0.05, ticket.release).start()
        buffer.begin([4, 5], timeout=20).result(20)


def test_two_threads_that_wait_for_each_other(reader: Reader, watched: Watched) -> None:
    """Both hold a half and want another: one gets an error, and when he has released, the other gets his
    slots."""
    with FeatureBuffer(reader, slots=4) as buffer:
        barrier = threading.Barrier(2)

        def work(base: int) -> str:
            with buffer.begin([base, base + 1]) as mine:
                mine.result()
                barrier.wait(20)
                try:
                    with buffer.begin([base + 2, base + 3]) as more:
                        more.result()
                except BudgetError:
                    return "error"
                return "slots"

        others = [in_thread(lambda base=base: work(base)) for base in (0, 10)]
        assert sorted(other.result(30) for other in others) == ["error", "slots"]


def test_tickets_that_are_forgotten_are_released(reader: Reader, watched: Watched) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        buffer.begin([1, 2, 3]).result()
        gc.collect()
        buffer.begin([4, 5, 6], timeout=20).result()


def test_a_thread_that_dies_with_its_ticket_is_not_waited_for(reader: Reader, watched: Watched) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        kept: list[Ticket] = []
        thread = threading.Thread(target=lambda: kept.append(buffer.begin([1, 2, 3])))
        thread.start()
        thread.join(20)
        kept[0].result()
        with pytest.raises(BudgetError):
            buffer.begin([4, 5])


def test_closing_ends_all_waits(reader: Reader, held: Watched) -> None:
    buffer = FeatureBuffer(reader, slots=4)
    ticket = buffer.begin([1, 2, 3])
    ticket.hand_over()
    waits = [in_thread(ticket.result), in_thread(lambda: buffer.begin([4, 5]))]
    time.sleep(0.05)
    closing = in_thread(buffer.close)
    assert eventually(lambda: held.held[0][0].stopped())
    held.end(0)
    closing.result(20)
    for wait, error in zip(waits, (CancelledError, ClosedError), strict=True):
        with pytest.raises(error):
            wait.result(20)


def test_an_interrupt_leaves_the_buffer_usable(reader: Reader, held: Watched, features: np.ndarray) -> None:
    with FeatureBuffer(reader, slots=4) as buffer:
        first = buffer.begin([1, 2, 3])
        first.hand_over()
        waits: list[Callable[[], Any]] = [lambda: buffer.begin([4, 5]), first.result]
        for wait in waits:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                wait()
        held.end(0)
        np.testing.assert_array_equal(buffer.gather(first), features[[1, 2, 3]])
        first.release()
        second = buffer.begin([4, 5, 6, 7], timeout=20)
        held.end(0)
        np.testing.assert_array_equal(buffer.gather(second), features[4:8])


def test_an_interrupt_while_slots_are_taken_loses_none(
    reader: Reader, watched: Watched, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked is gone when the kernel that takes them comes back."""
    from featstore.tiers import claims

    with FeatureBuffer(reader, slots=4) as buffer:
        own = claims.sl.acquire

        def acquire(*args: Any, **options: Any) -> Any:
            found = own(*args, **options)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the caller has given up meanwhile, and waits for the lock
            return found

        with monkeypatch.context() as patch:
            patch.setattr(claims.sl, "acquire", acquire)
            with pytest.raises(KeyboardInterrupt):
                buffer.begin([1, 2, 3])
        for ids in ([1, 2, 3], [4, 5, 6, 7]):
            ticket = buffer.begin(ids, timeout=20)
            ticket.result(20)
            np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
            ticket.release()


@pytest.mark.parametrize("then", ["begin", "look again"])
def test_no_memory_for_a_read_loses_no_slot(
    reader: Reader, held: Watched, features: np.ndarray, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    from featstore.tiers import claims

    def none(*_: Any) -> Any:
        raise MemoryError

    with FeatureBuffer(reader, slots=4) as buffer:
        if then == "begin":
            with monkeypatch.context() as patch:
                patch.setattr(claims, "Read", none)
                with pytest.raises(MemoryError):
                    buffer.begin([1, 2, 3])
        else:
            first, second = buffer.begin([1, 2]), buffer.begin([1, 2])
            held.end(0, DeviceError(5, "no"))
            with monkeypatch.context() as patch:
                patch.setattr(claims, "Read", none)
                with pytest.raises(MemoryError):
                    second.result(20)
            assert second.done()
            for _ in range(2):  # not as if its rows were there
                with pytest.raises(MemoryError):
                    buffer.gather(second)
            first.release()
            second.release()
        for ids in ([1, 2, 3], [4, 5, 6, 7]):
            ticket = buffer.begin(ids, timeout=20)
            held.end(0)
            ticket.result(20)
            np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
            ticket.release()


@pytest.mark.parametrize("policy", ["fifo", "lru", "sieve", "s3-fifo", "score"])
def test_many_threads(policy: str, reader: Reader, watched: Watched, features: np.ndarray) -> None:
    """The smallest buffer that works, more threads than fit at once, tickets held, cancelled, forgotten and
    passed on."""

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        done = 0
        for _ in range(40):
            ids = (rng.power(0.4, rng.integers(0, 31)) * 200).astype(np.int64)
            ticket = buffer.begin(ids, timeout=60)
            action = rng.integers(10)
            if action == 0:
                ticket.cancel()
                continue
            if action == 1:
                del ticket
                continue
            np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
            done += 1
            if action == 2:
                ticket.hand_over()
                in_thread(ticket.release)
            else:
                ticket.release()
        return done

    with FeatureBuffer(reader, slots=31, policy=policy) as buffer, ThreadPoolExecutor(4) as pool:
        assert sum(future.result(100) for future in [pool.submit(work, seed) for seed in range(4)]) > 80
        buffer.begin(np.arange(31), timeout=20).result(20)  # every slot is free


# Any interleaving.


class Consumers(RuleBasedStateMachine):
    """Consumers begin, wait, cancel and release, reads end in any order, well or not; see :class:`Watched`
    for what is asserted.
    """

    reader: Reader
    features: np.ndarray

    @initialize(slots=st.integers(1, 8), policy=st.sampled_from(sorted(set(layout.POLICIES) - {"min"})))
    def start(self, slots: int, policy: str) -> None:
        self.reader.__dict__.pop("submit", None)
        self.watched = Watched(self.reader, self.features, hold=True)
        self.buffer = FeatureBuffer(self.reader, slots=slots, policy=policy)
        self.tickets: list[Ticket] = []
        self.raised = False

    @rule(ids=st.lists(st.integers(0, 11), max_size=6))
    def begin(self, ids: list[int]) -> None:
        try:
            self.tickets.append(self.buffer.begin(ids, timeout=0))
        except TimeoutError:
            assert self.watched.held  # only reads under way are waited for: all tickets are this thread's
        except BudgetError:
            held = {int(row) for ticket in self.tickets for row in ticket.ids}
            assert len(held | set(ids)) > self.buffer.slots

    @precondition(lambda self: self.watched.held)
    @rule(number=st.integers(0, 9), good=st.booleans())
    def end(self, number: int, good: bool) -> None:
        self.watched.end(number % len(self.watched.held), None if good else DeviceError(5, "file"))

    @precondition(lambda self: self.tickets)
    @rule(number=st.integers(0, 9), how=st.sampled_from(["release", "cancel", "forget"]))
    def leave(self, number: int, how: str) -> None:
        ticket = self.tickets.pop(number % len(self.tickets))
        if how != "forget":
            getattr(ticket, how)()
        elif self.raised:
            # the traceback of a read's error refers to any ticket until the garbage collector comes
            ticket.release()

    @invariant()
    def rows_of_done_tickets_are_right(self) -> None:
        for ticket in getattr(self, "tickets", []):
            try:
                ticket.result(0)
            except TimeoutError:
                continue
            except (DeviceError, CancelledError):
                self.raised = True
                continue
            np.testing.assert_array_equal(self.buffer.x[ticket.slots], self.features[ticket.ids])
        assert not hasattr(self, "watched") or self.watched.wrong == []

    def teardown(self) -> None:
        if not hasattr(self, "watched"):
            return
        while self.watched.held or self.tickets:
            while self.watched.held:
                self.watched.end(0)
            for ticket in self.tickets:
                try:
                    np.testing.assert_array_equal(self.buffer.x[ticket.result(0)], self.features[ticket.ids])
                except TimeoutError:
                    assert self.watched.held
                except (DeviceError, CancelledError):
                    ticket.release()
            if not self.watched.held:
                for ticket in self.tickets:
                    ticket.release()
                self.tickets = []
        assert self.watched.wrong == []
        counts = self.buffer._map.counts
        self.buffer.begin([], timeout=0)
        assert counts[layout.UNPINNED] == self.buffer.slots
        assert (self.buffer._map.slots["pins"] == 0).all()
        self.buffer.close()


def test_any_interleaving_of_consumers(reader: Reader, features: np.ndarray) -> None:
    machine = type("Machine", (Consumers,), {"reader": reader, "features": features})
    case = machine.TestCase
    case.settings = settings(max_examples=35, stateful_step_count=40, deadline=None)
    case().runTest()


# Other policies.


def test_switching_waits_for_reads_that_nobody_wants_any_more(reader: Reader, features: np.ndarray) -> None:
    with FeatureBuffer(reader, slots=60, policy="fifo", policies=["lru"]) as buffer:
        for turn in range(30):
            ids = np.arange(ROWS)[turn % 7 :: 9][:50]
            buffer.begin(ids).release()  # its read goes on
            buffer.switch(("lru", "fifo")[turn % 2])
            with buffer.begin(ids) as ticket:
                np.testing.assert_array_equal(buffer.gather(ticket), features[ids])


def test_switching_that_fails_half_way_keeps_no_row(
    reader: Reader, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than one that has moved since."""
    policies = [name for name in layout.POLICIES if name != "min"]
    monkeypatch.setattr("featstore.tiers.slots.rows._MOVED_BYTES", 7 * 400)
    with FeatureBuffer(reader, slots=60, policy="fifo", policies=policies) as buffer:
        with buffer.begin(np.arange(50)) as ticket:
            buffer.gather(ticket)
        real, calls = slots.acquire, []

        def acquire(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no room")
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr("featstore.tiers.slots.rows.sl.acquire", acquire)
            with pytest.raises(MemoryError):
                buffer.switch("lru")
        assert buffer.policy_name == "lru"
        for ids in (np.arange(50), np.arange(900, 960), np.arange(20)):
            with buffer.begin(ids) as ticket:
                np.testing.assert_array_equal(buffer.gather(ticket), features[ids])


def test_switching_keeps_rows_and_counts(reader: Reader, features: np.ndarray) -> None:
    policies = [name for name in layout.POLICIES if name != "min"]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        with FeatureBuffer(reader, slots=60, policy="fifo", policies=policies) as buffer:
            for policy in rng.permutation(policies).tolist():
                for _ in range(4):
                    ids = rng.permutation(ROWS)[: rng.integers(0, 25)]
                    with buffer.begin(ids) as ticket:
                        np.testing.assert_array_equal(buffer.gather(ticket), features[ids])
                before, stats = buffer.cached_ids(), buffer.stats()
                kept = before[:5] if policy == "static" else None
                with buffer.begin(before[:1]), pytest.raises(ValueError, match="release them"):
                    buffer.switch(policy)
                buffer.switch(policy, kept)
                assert buffer.policy_name == policy
                with buffer.begin(before) as ticket:
                    np.testing.assert_array_equal(buffer.gather(ticket), features[before])
                assert buffer.stats().misses == stats.misses, "all of them are still there"
                assert buffer.slots_unkept == 60 - (0 if kept is None else len(kept))
