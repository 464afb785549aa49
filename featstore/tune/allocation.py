"""Allocation: how many threads each stage of online training gets, and how it reads (after BGL, NSDI'23,
section 3.4).

BGL profiles its stages, assumes that CPU work divides evenly among cores, and searches all integer splits of
the cores for the one whose slowest stage is fastest. Here the stages of one machine share its cores, and each
may use what another leaves idle. So the model does not cut the cores up; it knows of each stage two numbers
for every setting, both measured with nothing else going on:

- ``seconds`` a mini-batch, which the stage takes however many cores are free;
- ``cpu_seconds`` a mini-batch, summed over all threads and processes.

All stages work at the same time, each on another mini-batch. So a mini-batch takes as long as the slowest
stage, or as long as all cores together need for the CPU time of all stages, whichever is longer:

    seconds = max(seconds of each stage, sum of cpu_seconds / cores)

A second thread for the training, say, makes that stage faster and costs CPU time (threads wait for each other
while they hold a core): worth it where cores are idle, and not where they are not. The second term says so.

All combinations are tried out: there are few, because each stage has a handful of settings. Among equally
fast ones the one that takes the least CPU time wins (in hundredths of what the cores have to give: the rest
is noise), then the one with fewer workers, fewer threads, and then what stands first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from featstore.errors import ArgumentError

#: The stages in the order in which a mini-batch passes through them.
STAGES = ("sample", "read", "extract", "train")
CORES = "all cores"  # what is slowest where no stage is: the cores are busy all the time


@dataclass(frozen=True)
class Cost:
    """What a mini-batch takes in one stage: ``seconds`` while nothing else goes on, and ``cpu_seconds`` of
    all threads and processes."""

    seconds: float
    cpu_seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.cpu_seconds >= 0):
            raise ArgumentError(
                f"a stage cannot take {self.seconds} seconds and {self.cpu_seconds} of CPU time"
            )


NOTHING_SPENT = Cost(0.0, 0.0)


@dataclass(frozen=True)
class Reading:
    """How missed rows are read: ``engine``, ``queue_depth`` (reads under way); where the loader can be told,
    ``extracted`` (mini-batches read at once), ``reader_bytes`` (memory of the reader; the buffer has the
    rest) and ``threads`` (of the reader, at most), else None."""

    engine: str
    queue_depth: int
    extracted: int | None = None
    reader_bytes: int | None = None
    threads: int | None = None

    @property
    def words(self) -> str:
        """All of it in words."""
        parts = [f"{self.engine}, {self.queue_depth} deep"]
        parts += [] if self.extracted is None else [f"{self.extracted} mini-batches"]
        parts += [] if self.reader_bytes is None else [f"{self.reader_bytes >> 20} MiB"]
        parts += [] if self.threads is None else [f"{self.threads} thread{'s' * (self.threads > 1)}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Choice:
    """A setting of all stages. ``workers``: processes that sample, 0 for a thread of the loader.
    ``train_threads``: of the step."""

    workers: int
    train_threads: int
    reading: Reading


@dataclass(frozen=True)
class Profile:
    """What each stage costs by its setting; of ``read``, with the misses that the memory left to the buffer
    makes. ``cores``: to use."""

    cores: int
    sample: Mapping[int, Cost]
    read: Mapping[Reading, Cost]
    extract: Cost
    train: Mapping[int, Cost]

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ArgumentError(f"there is at least 1 core, not {self.cores}")
        for stage, settings in (("sample", self.sample), ("read", self.read), ("train", self.train)):
            if not settings:
                raise ArgumentError(f"nothing is known of the stage {stage!r}")


@dataclass(frozen=True)
class LoaderForecast:
    """What a choice comes to: ``seconds`` a mini-batch when all stages work at once, ``stages`` by name,
    ``cpu_seconds`` of all of them, and the share of the cores' time that is (``busy``)."""

    choice: Choice
    seconds: float
    cpu_seconds: float
    busy: float
    stages: Mapping[str, Cost]

    @property
    def slowest(self) -> str:
        """The stage that the others wait for, or :data:`CORES`."""
        stage = max(self.stages, key=lambda name: self.stages[name].seconds)
        return stage if self.stages[stage].seconds >= self.seconds else CORES


def forecast_loader(profile: Profile, choice: Choice) -> LoaderForecast:
    """What a choice comes to, by the model of the module's text. Raises KeyError for a setting that was not
    profiled."""
    costs = (
        profile.sample[choice.workers],
        profile.read[choice.reading],
        profile.extract,
        profile.train[choice.train_threads],
    )
    cpu_seconds = sum(cost.cpu_seconds for cost in costs)
    seconds = max(*(cost.seconds for cost in costs), cpu_seconds / profile.cores)
    busy = cpu_seconds / (profile.cores * seconds) if seconds else 0.0
    return LoaderForecast(choice, seconds, cpu_seconds, busy, dict(zip(STAGES, costs, strict=True)))


def ranked(profile: Profile) -> list[LoaderForecast]:
    """For each pair of workers and training threads the best way to read; the best of all first, and that is
    the solution."""
    place = {reading: k for k, reading in enumerate(profile.read)}

    def rank(one: LoaderForecast) -> tuple[float, int, int, int, int]:
        choice = one.choice
        return one.seconds, round(100 * one.busy), choice.workers, choice.train_threads, place[choice.reading]

    found = [
        min(
            (forecast_loader(profile, Choice(workers, threads, reading)) for reading in profile.read),
            key=rank,
        )
        for workers in profile.sample
        for threads in allowed_threads(profile)
    ]
    return sorted(found, key=rank)


def allowed_threads(profile: Profile) -> list[int]:
    """Numbers of training threads that may be chosen: others are beyond the cores, for comparison."""
    return [threads for threads in profile.train if threads <= profile.cores] or [*profile.train]


def counts_up_to(most: int) -> list[int]:
    """Numbers of threads worth measuring: every one up to four, then steps of about a half, and ``most``."""
    found = list(range(1, min(most, 4) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] * 3 // 2))
    return found
