"""Tuning: profile a workload on this machine, solve for the allocation, try the best out, and say what it
brings.

:func:`tune` measures each stage by itself (:mod:`featstore.tune.profiling`), puts the numbers into the model
of :mod:`featstore.tune.allocation`, and gets all settings in order. A model of stages that do not disturb
each other is good at how to read, where the device decides, and less good at workers and threads, which share
caches, memory bandwidth and Python's lock. So the few best pairs of workers and training threads are tried
out for real in turns, each a second or so of an epoch, with a buffer that stays warm; then the fastest of
them with the way of reading of someone who has chosen nothing, and his setting. What was fastest is the
choice; where several are as good as equal, the one that the model prefers.

It keeps to the seconds it was given (:mod:`featstore.tune.timetable`): where mini-batches are slow, options
are left out, and named.

The training step is called in earnest, some dozens of times: give it a model that may be thrown away, or
restore it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from featstore import arguments as args
from featstore.base.environment import MEMORY
from featstore.base.progress import OnStep
from featstore.base.system import available_cores
from featstore.engine import choose
from featstore.engine.ring_count import BUSY
from featstore.errors import BudgetError, SourceError
from featstore.loaders.online.budget import BudgetSplit
from featstore.loaders.online.loader import OnlineLoader
from featstore.loaders.options import LoaderOptions
from featstore.plan.budget import TableNeed, own_bytes
from featstore.reader.lookup import table_need
from featstore.reader.options import QUEUE_DEPTH_MAX, READING, READING_THREADS_MAX, as_memory, chosen_engine
from featstore.reader.reader import QUEUE_DEPTH
from featstore.storage.store import as_store
from featstore.tiers.slots import layout
from featstore.tiers.slots.rows import slots_for
from featstore.tiers.slots.simulation import simulate
from featstore.tune import profiling as pf
from featstore.tune.allocation import (
    Choice,
    Cost,
    LoaderForecast,
    Profile,
    Reading,
    allowed_threads,
    counts_up_to,
    forecast_loader,
    ranked,
)  # fmt: skip
from featstore.tune.timetable import Timetable, counted
from featstore.tune.trials import Trials
from featstore.tune.tuned import Point, Trial, Tuning

if TYPE_CHECKING:
    from featstore.storage.store import OpenStore

#: What is tried where the caller says nothing. ``mmap`` is no candidate: what it caches is outside every
#: budget.
ENGINES_TRIED = ("uring", "threads")
QUEUE_DEPTHS = (QUEUE_DEPTH, 32, 64, 256)
EXTRACTED_TRIED = (2, 4, 6)  # mini-batches read at once
READER_BYTES = (4 * 2**20, 8 * 2**20, 16 * 2**20, 32 * 2**20)  # of the loader's reader
CURVE = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the buffer's memory
TUNING_SECONDS = 20.0
_ROUNDS = 2  # of reading
_EQUAL = 1.02  # as good as equal
_OURS = ("batches", "memory", "engine", "queue_depth", "extracted", "reader_memory", "warm")


def tune(
    store: OpenStore, make_batches: pf.MakeBatches, step: pf.TrainStep | None = None, *,
    memory: int | str = MEMORY, cores: int | None = None, workers: Iterable[int] | None = None,
    engines: Sequence[str] | None = None, queue_depths: Sequence[int] = QUEUE_DEPTHS,
    seconds: float = TUNING_SECONDS, trials: int = 4, progress: OnStep | None = None, **loader: Any,
) -> Tuning:  # fmt: skip
    """Find workers, threads and the way of reading by which online training from ``store`` is fastest on this
    machine.

    Args:
        store: the open store.
        make_batches: a function of a number of workers that makes mini-batches as
            :meth:`featstore.Store.loader` takes them, sampled by so many processes, or for 0 where they are
            iterated. It is called once for each number. Each iteration over what it returns should be another
            epoch: the same mini-batches again would find all of their rows in the buffer.
        step: trains on what the loader hands out; None where only loading is to be fast.
        memory: of the loader, bytes or ``"2GiB"``.
        cores: to use; by default those that this process may run on.
        workers: the numbers of workers to consider; by default 0 and up to ``cores``.
        engines, queue_depths: to consider for reading; the first of each is what is compared with.
        seconds: how long to measure, about: at least some 5 seconds, and once everything is loaded and
            compiled. What there is no time for is left out, and named in ``left_out``.
        trials: how many pairs of workers and threads to try out; with 0 the model's word is taken.
        progress: told the stage, and how many of how many steps are done.
        loader: further options of the loader: ``policy``, ``nodes``, ``device`` ...

    Raises SourceError, BudgetError; what sampling, reading and ``step`` raise.
    """
    as_store(store), args.as_function(make_batches, "make_batches")
    cores = available_cores() if cores is None else args.as_count(cores, "cores", 1, 2**16)
    given = (
        counts_up_to(cores) if workers is None else args.as_sequence(workers, "workers", "numbers of workers")
    )
    counts = sorted({0, *(args.as_count(one, "a number of workers", 0, 2**16) for one in given)})
    depths = args.as_sequence(queue_depths, "queue_depths", "numbers")
    depths = [args.as_count(depth, "queue_depths", 1, QUEUE_DEPTH_MAX) for depth in depths]
    tell = (lambda *_: None) if progress is None else args.as_function(progress, "progress")
    seconds, trials = args.as_number(seconds, "seconds", above=True), args.as_count(trials, "trials", 0)
    _check(depths, step, loader)
    names = _engines(store, engines)
    with pf.threads_restored():
        work = _Tuner(store, make_batches, step, as_memory(memory), cores, counts, seconds, loader, tell)
        return work.run(names, list(dict.fromkeys(depths)), trials)


def _check(depths: Sequence[int], step: Any, loader: Mapping[str, Any]) -> None:
    if not depths:
        raise SourceError("queue_depths is empty: give at least one")
    if step is not None and not callable(step):
        raise SourceError(f"step must be a function of a mini-batch, or None, not a {type(step).__name__}")
    for name in _OURS:
        if name in loader:
            raise SourceError(f"{name}= of the loader is for tune itself to find or to give; leave it out")
    known = [name for name in (*args.options_of(OnlineLoader), *READING) if name not in (*_OURS, "memory")]
    args.check_options(loader, known, "the loader that tune tries out")


def _engines(store: OpenStore, wanted: Sequence[str] | None) -> list[str]:
    """The engines to consider, as they are called."""
    if wanted is not None:
        found = [choose(name).name for name in args.as_sequence(wanted, "engines", "names")]
        if not found:
            raise SourceError("engines is empty: give at least one")
        return list(dict.fromkeys(found))
    first, works = chosen_engine(store.path, "auto", None, None).name, choose("auto").name
    return list(dict.fromkeys((first, works, *ENGINES_TRIED[ENGINES_TRIED.index(works) :])))


class _Tuner:
    """One tuning; see :func:`tune`."""

    def __init__(
        self, store: OpenStore, make_batches: pf.MakeBatches, step: pf.TrainStep | None, memory_bytes: int,
        cores: int, workers: list[int], seconds: float, loader: dict[str, Any], tell: OnStep,
    ) -> None:  # fmt: skip
        self._store, self._step, self._memory_bytes, self._cores = store, step, memory_bytes, cores
        self._workers, self._time, self._options, self._tell = workers, Timetable(seconds), loader, tell
        self._made: dict[int, Iterable[Any]] = {}
        self._make_batches = make_batches
        self._done = 0

    def _say(self, what: str) -> None:
        self._tell(what, self._done, 6)
        self._done += 1

    def _batches(self, workers: int) -> Iterable[Any]:
        if workers not in self._made:
            self._made[workers] = pf.made(self._make_batches, workers)
        return self._made[workers]

    def run(self, engines: list[str], depths: list[int], trials: int) -> Tuning:
        default = Reading(engines[0], depths[0])
        switch = pf.Switch(())
        with self._loader(switch, default) as loader:  # first, because it looks at the options
            self._say("sampling")
            pf.first(self._batches(0))  # loads what sampling needs
            self._time.start()
            self._seen = pf.see(self._batches, self._options.get("nodes"), self._time.part("sample"))
            switch.now = self._seen.held
            kept = list(loader)
            self._look_at(loader)
            self._say("extracting")
            extract = pf.time_extraction(loader, switch, self._fitting(), self._time.part("extract"))
        del loader  # and its rows, before others are there
        self._say("sampling with workers")
        sample = self._sampling()
        self._say("reading")
        read = self._reading(default, engines, depths)
        self._say("training")
        threads = self._threads()
        train = pf.time_training(self._step, kept, threads, self._time)
        del kept
        profile = Profile(self._cores, sample, read, extract, train)
        before = forecast_loader(profile, Choice(0, threads[0], default))
        best = ranked(profile)
        self._say("trying out")
        trial = Trials(self._loader, self._batches, self._seen.batches, self._step, self._time)
        tried = trial.run(profile, best, before.choice, trials)
        return self._tuning(profile, best[0], before, tried)

    # The stages.

    def _sampling(self) -> dict[int, Cost]:
        """By workers."""
        alone, found = self._seen.cost, {}
        for workers in self._workers:
            if workers == 0:
                found[0] = alone
                continue
            if self._time.leaves_out(
                "workers", f"sampling with {counted(workers, 'worker')}", 3 * alone.seconds
            ):
                continue
            seconds = self._time.part("workers", len(self._workers))
            own = pf.pace(self._batches(workers), workers, self._seen.batches, seconds)
            found[workers] = Cost(own.seconds, own.cpu_seconds + alone.cpu_seconds)
        return found

    def _loader(self, batches: Any, reading: Reading) -> OnlineLoader:
        options: dict[str, Any] = {"engine": reading.engine, "queue_depth": reading.queue_depth}
        options |= {} if reading.extracted is None else {"extracted": reading.extracted}
        options |= {} if reading.reader_bytes is None else {"reader_memory": reading.reader_bytes}
        options |= {} if reading.threads is None else {"threads": reading.threads}
        return OnlineLoader(self._store, batches, memory=self._memory_bytes, **options, **self._options)

    def _look_at(self, loader: OnlineLoader) -> None:
        """What a loader has made of the budget."""
        self._memory, self._policy = loader.memory(), loader.policy
        extraction = loader.extraction
        self._slots = {table: buffer.slots for table, buffer in extraction.buffers.items()}
        of = extraction.table_of
        self._trace: list[pf.Rows] = [
            {of[t]: ids for t, ids in batch.items() if t in of} for batch in self._seen.ids
        ]
        half = self._trace[len(self._trace) // 2 :]
        # rows of a mini-batch
        self._asked = sum(len(ids) for batch in half for ids in batch.values()) / len(half)

    def _fitting(self) -> list[Any]:
        """Of the mini-batches that are kept, the first ones whose rows fit in the buffers with room to
        spare."""
        for count in range(len(self._seen.held), 1, -1):
            asked = {t: sum(len(batch.get(t, ())) for batch in self._trace[:count]) for t in self._slots}
            if all(3 * asked[t] <= slots for t, slots in self._slots.items()):
                return self._seen.held[:count]
        return self._seen.held[:1]

    def _reading(self, default: Reading, engines: list[str], depths: list[int]) -> dict[Reading, Cost]:
        """By reading, the one to compare with first: engines and depths; around the best mini-batches at
        once, the reader's memory and threads. What does not fit is left out."""
        extracted = [None, *EXTRACTED_TRIED]
        memory = [None, *READER_BYTES]
        self._missed: dict[int | None, list[pf.Rows]] = {}
        for given in memory:
            slots = self._slots_with(given)
            if slots is not None:
                self._missed[given] = pf.missed_rows(self._trace, slots, self._policy)
        first = [
            default,
            *(one for one in (Reading(e, d) for e in engines for d in depths) if one != default),
        ]
        found = self._timed(first, 2 * len(first), default)
        best = min(found, key=lambda one: found[one].seconds)
        others = [replace(best, extracted=n) for n in extracted] + [
            replace(best, reader_bytes=n) for n in self._missed
        ]
        others += [replace(best, threads=n) for n in self._reader_threads(best, found[best])]
        others = [one for one in dict.fromkeys(others) if one not in found and self._room_for(one)]
        return found | self._timed(others, 2 * max(1, len(others)), default)

    def _reader_threads(self, best: Reading, cost: Cost) -> list[int]:
        """Numbers of the reader's threads worth trying: it may take cores that another stage needs more."""
        one_will_do = best.engine != "uring" or cost.cpu_seconds < BUSY * cost.seconds
        most = 0 if one_will_do or "threads" in self._options else min(self._cores, READING_THREADS_MAX)
        return counts_up_to(most) if most else []

    def _timed(self, readings: Sequence[Reading], parts: int, default: Reading) -> dict[Reading, Cost]:
        """The cost of each, the better of two rounds; each has one of so many parts of the time for reading,
        and the default its time always."""
        found: dict[Reading, list[Cost]] = {one: [] for one in readings}
        for turn in range(_ROUNDS):
            for one in readings:
                if turn and self._time.left("read") < 0:
                    break
                if one != default and not turn and self._time.leaves_out("read", f"reading by {one.words}"):
                    continue
                cost = pf.time_reading(
                    self._store, self._missed[one.reader_bytes], one, self._reader_memory(one.reader_bytes),
                    self._time.part("read", _ROUNDS * parts), self._options,
                )  # fmt: skip
                found[one].append(cost)
        return {one: min(costs, key=lambda c: c.seconds) for one, costs in found.items() if costs}

    def _slots_with(self, reader_bytes: int | None) -> dict[str, int] | None:
        """Slots by table where the reader has so much memory; None where there would not be enough of
        them."""
        if reader_bytes is None:
            return self._slots
        buffers = {f"buffer of {t}" for t in self._slots}
        total = sum(self._memory[name] for name in buffers)
        others = sum(size for name, size in self._memory.items() if name not in buffers and name != "reader")
        try:
            rest = self._memory_bytes - others - self._reader_memory(reader_bytes)
        except BudgetError:  # rows of which so little memory cannot stage one
            return None
        found = {t: self._slots_in(t, self._memory[f"buffer of {t}"] * rest // total) for t in self._slots}
        return found if all(found[t] >= self._largest(t) for t in found) else None

    def _slots_in(self, table: str, memory_bytes: int) -> int:
        entry = self._store.tables[table]
        policy = layout.POLICIES[self._policy[table]]
        try:
            return min(entry.rows, slots_for(memory_bytes, entry.row_bytes, policy))
        except BudgetError:
            return 0

    def _largest(self, table: str) -> int:
        return max(len(batch.get(table, ())) for batch in self._trace)

    def _room_for(self, reading: Reading) -> bool:
        """Whether the buffer holds as many mini-batches as are to be read at once."""
        slots = self._slots_with(reading.reader_bytes)
        share = BudgetSplit.PINNED_SHARE
        return reading.extracted is None or (
            slots is not None and all(reading.extracted * self._largest(t) <= share * slots[t] for t in slots)
        )

    def _reader_memory(self, reader_bytes: int | None) -> int:
        """The budget of a reader as the loader makes it."""
        return own_bytes(self._memory_bytes, self._needs(), reader_bytes)

    def _needs(self) -> list[TableNeed]:
        verify = self._options.get("verify", True)
        return [table_need(self._store.tables[t], verify) for t in self._slots]

    def _threads(self) -> list[int]:
        """Numbers of threads of the training step, the present one first."""
        now = pf.torch_threads()
        if now is None or self._step is None:
            return [now or 1]
        return [now, *(n for n in counts_up_to(self._cores) if n != now)]

    # What came out.

    def _tuning(
        self, profile: Profile, best: LoaderForecast, before: LoaderForecast, tried: tuple[Trial, ...]
    ) -> Tuning:
        after, seconds, seconds_before = best, best.seconds, before.seconds
        allowed = [one for one in tried if one.choice.train_threads in allowed_threads(profile)]
        if allowed:
            first = next(o for o in allowed if o.seconds <= _EQUAL * min(x.seconds for x in allowed))
            after, seconds = forecast_loader(profile, first.choice), first.seconds
            clocked = [trial.seconds for trial in tried if trial.choice == before.choice]
            seconds_before = clocked[0] if clocked else before.seconds
        missed = self._missed[after.choice.reading.reader_bytes]
        per_batch = sum(len(rows) for batch in missed for rows in batch.values()) / max(1, len(missed))
        slots = self._slots_with(after.choice.reading.reader_bytes) or self._slots
        distinct = {t: len(pf.frequent([b[t] for b in self._trace if t in b], 2**62)) for t in slots}
        return Tuning(
            after.choice, before, after, seconds_before, seconds, self._seen.epoch_batches, tried,
            1 - per_batch / max(1.0, self._asked),
            any(distinct[t] < slots[t] < self._store.tables[t].rows for t in slots),
            tuple(self._curve(profile, after, slots, per_batch)), self._memory_bytes, self._memory,
            self._policy, profile, tuple(self._time.left_out),
            {n: one for n, one in self._options.items() if n in {*LoaderOptions.__annotations__} - {"nodes"}},
        )  # fmt: skip

    def _curve(
        self, profile: Profile, after: LoaderForecast, slots: Mapping[str, int], missed: float
    ) -> list[Point]:
        """What other sizes of the buffer would do, by the hit rates simulated and the price of a missed row
        measured."""
        row = (
            Cost(after.stages["read"].seconds / missed, after.stages["read"].cpu_seconds / missed)
            if missed
            else Cost(0, 0)
        )
        points: list[Point] = []
        for share in CURVE:
            size = {t: min(self._store.tables[t].rows, int(share * count)) for t, count in slots.items()}
            if any(size[t] < self._largest(t) for t in size) or (
                points and points[-1].slots == sum(size.values())
            ):
                continue
            rows = sum(self._missed_at(t, count) for t, count in size.items())
            read = Cost(rows * row.seconds, rows * row.cpu_seconds)
            then = forecast_loader(replace(profile, read={after.choice.reading: read}), after.choice)
            memory = sum(count * self._store.tables[t].row_bytes for t, count in size.items())
            points.append(
                Point(
                    memory, sum(size.values()), 1 - rows / max(1.0, self._asked), read.seconds, then.seconds
                )
            )
        return points

    def _missed_at(self, table: str, slots: int) -> float:
        """Rows that a mini-batch misses of a table where the buffer has so many slots."""
        policy = self._policy[table]
        rows = [batch[table] for batch in self._trace if table in batch]
        if not rows:
            return 0.0
        half = len(rows) // 2
        if policy == "static":
            return sum(map(len, pf.misses(self._trace, table, slots, policy))) / (len(rows) - half)
        warm = simulate(rows[:half], slots, policy)[1] if half else 0
        return (simulate(rows, slots, policy)[1] - warm) / (len(rows) - half)
