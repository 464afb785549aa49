"""Profiling: what each stage of online training takes here, for this workload, measured by itself.

Nothing else runs while a stage is measured, so that its numbers are its own; what stages do to each other is
the business of :mod:`featstore.tune.allocation`, and of trying choices out (:mod:`featstore.tune.tuning`).

*Sampling* is timed mini-batch by mini-batch without workers, which also gives the node ids; with workers it
is timed at its steady pace, when their queues have filled. CPU time of workers is that of sampling without
them; what the own process spends on fetching comes on top. *Misses* come from those ids: the slot map goes
through them as the buffer would, and the second half counts, when the buffer has become warm. Where the ids
seen are fewer than the slots, some of these misses are of a buffer that is still filling. *Reading* reads
exactly the rows missed, as many mini-batches at a time as the loader does. *Extraction* is the loader's own
path with all rows present: claiming slots, gathering, handing over. *Training* is the caller's step on
mini-batches of the loader, each number of threads in turn, so that a disturbance hits all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import empty_rows
from featstore.base.modules import loaded
from featstore.base.sequences import each_of, known_length
from featstore.errors import ArgumentError, SourceError
from featstore.reader.reader import Reader
from featstore.sampling.minibatch import Ids, split
from featstore.tiers.slots import layout
from featstore.tiers.slots import slots as sl
from featstore.tune.allocation import NOTHING_SPENT, Cost, Reading
from featstore.tune.timetable import Timetable, counted

if TYPE_CHECKING:
    from featstore.loaders.online.loader import OnlineLoader
    from featstore.storage.store import OpenStore

#: Makes mini-batches with so many workers, 0 for none; each iteration is another epoch.
MakeBatches = Callable[[int], Iterable[Any]]
TrainStep = Callable[[Any], object]
Rows = dict[str, NDArray[np.int64]]  # node ids by table

_IDS_MAX = 4_000_000  # seen, at most: 32 MB
_BATCHES_MIN = 8  # seen, at least, where there are so many
HELD = 4  # mini-batches kept whole
TIMED_MIN = 4
_UNDER_WAY = 3  # mini-batches whose rows the loader reads at once, where it says nothing else
PROFILE_PASSES_MAX = 20
_LATE = 2.0  # times as long as it should have taken: then the least that tells anything does


class Clock:
    """Wall-clock and CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._wall

    def cost(self, batches: int) -> Cost:
        """Of each of so many mini-batches since then."""
        return Cost(self.seconds / batches, (time.process_time() - self._cpu) / batches)


def least_timed(watch: Clock, seconds: float) -> int:
    """Mini-batches to be timed at least, after so long on the clock."""
    return 1 if watch.seconds > _LATE * seconds else TIMED_MIN


# Sampling.


def first(batches: Iterable[Any]) -> None:
    """Have one mini-batch sampled."""
    for _ in batches:
        break


@dataclass(frozen=True)
class Seen:
    """Mini-batches that were sampled without workers: node ids of each, some of them whole, how many an epoch
    has (as far as known), whether so few were there that all were seen, and what sampling one takes."""

    ids: list[Ids]
    held: list[Any]
    epoch_batches: int | None
    cost: Cost

    @property
    def batches(self) -> int:
        """Of an epoch, or as many as were seen."""
        return self.epoch_batches or len(self.ids)


def see(make_batches: MakeBatches, nodes: Callable[[Any], Any] | None, seconds: float) -> Seen:
    """Sample for so long, several epochs if need be. Raises SourceError where there is nothing to sample."""
    batches = made(make_batches, 0)
    ids: list[Ids] = []
    held: list[Any] = []
    costs: list[Cost] = []
    count, watch = 0, Clock()
    epoch = known_length(batches)
    for _ in range(PROFILE_PASSES_MAX):
        before, clock = len(ids), Clock()
        for batch in each_of(batches):
            lent, _sample = split(batch, nodes)
            costs.append(clock.cost(1))
            found = {node_type: one.copy() for node_type, one in lent.items()}  # a sampler may use it again
            ids.append(found)
            count += sum(map(len, found.values()))
            held += [copy.deepcopy(batch)] if len(held) < HELD else []
            least = 3 if watch.seconds > _LATE * seconds else _BATCHES_MIN
            if len(ids) >= least and (watch.seconds > seconds or count > _IDS_MAX):
                return Seen(ids, held, epoch, _mean(costs[1:]))
            clock = Clock()
        epoch = epoch or len(ids)
        if epoch == 1:
            raise SourceError(
                "an epoch is one mini-batch, and which stage keeps others waiting shows where there are "
                "several: make smaller ones (--batch-size)"
            )
        if len(ids) == before:
            break
    if len(ids) < 2:
        raise SourceError(f"make_batches(0) gave {len(ids)} mini-batches; a profile takes at least 2")
    return Seen(ids, held, epoch, _mean(costs[1:]))


def made(make_batches: MakeBatches, workers: int) -> Iterable[Any]:
    """What ``make_batches`` returns. Raises SourceError where that cannot be iterated again and again."""
    batches = make_batches(workers)
    if not isinstance(batches, Iterable) or isinstance(batches, Iterator):
        raise SourceError(
            f"make_batches({workers}) returned a {type(batches).__name__}; it must return an iterable "
            "of mini-batches that can be iterated again and again"
        )
    return batches


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.fmean(c.seconds for c in costs), statistics.fmean(c.cpu_seconds for c in costs))


def pace(batches: Iterable[Any], workers: int, known: int, seconds: float) -> Cost:
    """What a mini-batch of ``batches`` takes at a steady pace: wall-clock time, and CPU time of this process
    alone.

    ``known``: how many there are about. Raises SourceError where there are too few to tell.
    """
    skip = min(2 * workers, (known - 1) // 2)  # by then all workers are at work
    found, clock, watch = 0, Clock(), Clock()
    for _batch in each_of(batches):
        found += 1
        if found == skip + 1:
            clock = Clock()
        elif clock.seconds > seconds and found > skip + least_timed(watch, seconds):
            break
    if found <= skip + 1:
        raise SourceError(
            f"make_batches({workers}) gave {found} mini-batches, where about {known} were expected"
        )
    return clock.cost(found - skip - 1)


# Misses.


def misses(trace: Sequence[Rows], table: str, slots: int, policy: str) -> list[NDArray[np.int64]]:
    """What a buffer of so many slots misses of one table, for each mini-batch of the second half of a
    trace."""
    warm = len(trace) // 2
    rows = [np.asarray(batch.get(table, ()), np.int64) for batch in trace]
    number = layout.POLICIES[policy]
    if slots < max(map(len, rows)):
        raise ArgumentError(f"{slots} slots hold no mini-batch of {max(map(len, rows))} rows")
    m = layout.make_slot_map(slots, number)
    if number == layout.STATIC:
        _keep(m, frequent(rows[:warm], slots - 2 * max(map(len, rows))))
    found = []
    for batch, wanted in enumerate(rows):
        of_row, missed, waits = (np.empty(len(wanted), np.int32) for _ in range(3))
        reads, _ = sl.acquire(m, wanted, of_row, missed, waits)
        sl.complete(m, of_row[missed[:reads]])
        sl.release(m, of_row)
        if batch >= warm:
            found.append(wanted[missed[:reads]])
    return found


def _keep(m: layout.SlotMap, ids: NDArray[np.int64]) -> None:
    of_row, missed, waits = (np.empty(len(ids), np.int32) for _ in range(3))
    reads, _ = sl.acquire(m, ids, of_row, missed, waits)
    sl.complete(m, of_row[missed[:reads]])


def frequent(rows: Sequence[NDArray[np.int64]], most: int) -> NDArray[np.int64]:
    """The ids that occur most often, the most frequent first."""
    ids, counts = np.unique(np.concatenate([np.empty(0, np.int64), *rows]), return_counts=True)
    return ids[np.argsort(-counts, kind="stable")][: max(0, most)]


def missed_rows(trace: Sequence[Rows], slots: Mapping[str, int], policy: Mapping[str, str]) -> list[Rows]:
    """The same for all tables, by mini-batch."""
    by_table = {table: misses(trace, table, count, policy[table]) for table, count in slots.items()}
    return [dict(zip(by_table, batch, strict=True)) for batch in zip(*by_table.values(), strict=True)]


# Reading.


def time_reading(
    store: OpenStore, missed: Sequence[Rows], reading: Reading, memory: int, seconds: float,
    options: Mapping[str, Any]
) -> Cost:  # fmt: skip
    """What reading the missed rows of a mini-batch takes. ``memory``: of the reader, in bytes. ``options``:
    ``verify`` and ``threads`` of it, where these are given."""
    work = [{t: rows for t, rows in batch.items() if len(rows)} for batch in missed]
    work = [batch for batch in work if batch]
    if not work:
        return NOTHING_SPENT
    width = reading.extracted or _UNDER_WAY
    most = {t: max(len(batch.get(t, ())) for batch in work) for t in missed[0]}
    tables = {t: store.tables[t] for t, count in most.items() if count}
    into = [{t: empty_rows(most[t], table.row_bytes) for t, table in tables.items()} for _ in range(width)]
    with Reader(
        store,
        memory=memory,
        static=None,
        static_memory=0,
        tables=list(tables),
        engine=reading.engine,
        queue_depth=reading.queue_depth,
        verify=options.get("verify", True),
        threads=reading.threads or options.get("threads"),
    ) as reader:

        def begin(number: int, batch: Rows) -> Any:
            out = {
                t: into[number % width][t][: len(rows) * tables[t].row_bytes]
                .view(tables[t].dtype)
                .reshape(len(rows), *tables[t].row_shape)
                for t, rows in batch.items()
            }
            return reader.submit(batch, out=out)

        begin(0, work[0]).result()
        under_way: deque[Any] = deque()
        clock = Clock()
        for number, batch in enumerate(islice(cycle(work), 4 * len(work) + width)):
            if clock.seconds > seconds and number >= width + least_timed(clock, seconds):
                break
            if len(under_way) == width:
                under_way.popleft().result()
            under_way.append(begin(number, batch))
            done = number + 1
        for request in under_way:
            request.result()
        one = clock.cost(done)
    share = len(work) / len(missed)  # some mini-batches miss nothing
    return Cost(one.seconds * share, one.cpu_seconds * share)


# Extraction and training.


def time_extraction(loader: OnlineLoader, batches: Switch, few: Sequence[Any], seconds: float) -> Cost:
    """What claiming, gathering and handing over take, of ``few`` mini-batches whose rows fit in the
    buffer."""
    batches.now = [few[k % len(few)] for k in range(max(16, len(few)))]
    for _ in loader:  # afterwards all rows are there
        pass
    spent: list[Cost] = []
    watch = Clock()
    while not spent or (watch.seconds < seconds and len(spent) < PROFILE_PASSES_MAX):
        counted, clock = 0, Clock()
        for number, _batch in enumerate(loader):
            counted, clock = (0, Clock()) if number == 0 else (number, clock)
        spent.append(clock.cost(counted))
    return Cost(statistics.median(c.seconds for c in spent), statistics.median(c.cpu_seconds for c in spent))


class Switch:
    """Mini-batches for a loader that go on with others each time; the buffer stays warm meanwhile."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.now = batches

    def __call__(self, epoch: int) -> Iterable[Any]:
        return self.now


def torch_threads() -> int | None:
    """Threads of torch's operations now; None where the program has not loaded torch."""
    torch = loaded("torch", "Tensor")
    return None if torch is None else int(torch.get_num_threads())


@contextmanager
def threads_restored() -> Iterator[None]:
    """Whatever number of threads torch is given inside, afterwards it has the one from before."""
    before = torch_threads()
    try:
        yield
    finally:
        if before is not None:
            set_threads(before)


def set_threads(count: int) -> None:
    """Give torch's operations so many threads, where torch is loaded."""
    torch = loaded("torch", "Tensor")
    if torch is not None:
        torch.set_num_threads(count)


def time_training(
    step: TrainStep | None, batches: Sequence[Any], threads: Sequence[int], table: Timetable
) -> dict[int, Cost]:
    """What a training step takes with each number of threads; the first is never left out."""
    if step is None:
        return dict.fromkeys(threads, NOTHING_SPENT)
    spent: dict[int, list[Cost]] = {count: [] for count in threads}
    with threads_restored():
        step(batches[0])  # the first makes what others find
        watch, turn = Clock(), 0
        seconds, longest = table.part("train"), 0.0
        while turn < 2 or (watch.seconds < seconds and turn < PROFILE_PASSES_MAX):
            if turn and table.left("train") < longest:
                break
            for count in threads:
                if (
                    turn == 0
                    and longest
                    and table.leaves_out("train", f"training with {counted(count, 'thread')}", longest)
                ):
                    continue
                if turn and not spent[count]:
                    continue
                set_threads(count)
                begun = Clock()
                if turn == 0:
                    step(batches[0])  # wakes the threads
                clock, done = Clock(), 0
                for batch in batches:
                    step(batch)
                    done += 1
                    if table.left("train") < 0:
                        break
                spent[count].append(clock.cost(done))
                longest = max(longest, begun.seconds)
            turn += 1
    return {
        count: Cost(
            statistics.median(c.seconds for c in all_), statistics.median(c.cpu_seconds for c in all_)
        )
        for count, all_ in spent.items()
        if all_
    }
