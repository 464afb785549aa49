"""What tuning has found: the choice, what each stage took before and takes now, what was tried out, what
other buffers would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from featstore.tune import profiling as pf
from featstore.tune.allocation import STAGES, Choice, LoaderForecast, Profile


@dataclass(frozen=True)
class Point:
    """What a buffer of ``buffer_bytes`` would do: its hit rate, and what a mini-batch would take then."""

    buffer_bytes: int
    slots: int
    hit_rate: float
    read_seconds: float
    seconds: float


@dataclass(frozen=True)
class Trial:
    """A choice that was tried out: what a mini-batch took, by the model and by the clock."""

    choice: Choice
    forecast_seconds: float
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """What tuning has found.

    ``choice``: workers, training threads, and how to read. ``before``, ``after``: the model's forecast for a
    loader without options, and for the choice. ``seconds_before``, ``seconds``: of a mini-batch, as tried
    out, else as forecast. ``epoch_batches``: mini-batches of an epoch, None where nobody knows. ``tried``: in
    the model's order. ``hit_rate``: expected of the buffer. ``filling``: it was not full when the profile
    ended, and will do better. ``curve``: what other sizes of the buffer would do. ``memory_bytes``,
    ``memory``: the loader's budget, and by use. ``left_out``: what there was no time to measure, in words.
    ``given``: the options of the loader that it was tuned with.
    """

    choice: Choice
    before: LoaderForecast
    after: LoaderForecast
    seconds_before: float
    seconds: float
    epoch_batches: int | None
    tried: tuple[Trial, ...]
    hit_rate: float
    filling: bool
    curve: tuple[Point, ...]
    memory_bytes: int
    memory: Mapping[str, int]
    policy: Mapping[str, str]
    profile: Profile
    left_out: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def epoch_seconds(self) -> float | None:
        """Predicted for an epoch, in seconds."""
        return None if self.epoch_batches is None else self.epoch_batches * self.seconds

    @property
    def workers(self) -> int:
        """Processes that sample: DataLoader's ``num_workers``."""
        return self.choice.workers

    @property
    def train_threads(self) -> int:
        """Threads of the training step, for ``torch.set_num_threads``; :meth:`apply` sets them."""
        return self.choice.train_threads

    def loader_options(self) -> dict[str, Any]:
        """Options of :meth:`featstore.Store.loader`, mode online: those found, and those that were given to
        tune with, but for ``nodes``."""
        reading = self.choice.reading
        found = {"memory": self.memory_bytes, "engine": reading.engine, "queue_depth": reading.queue_depth,
                 "extracted": reading.extracted, "reader_memory": reading.reader_bytes,
                 "threads": reading.threads}  # fmt: skip
        return {key: value for key, value in found.items() if value is not None} | dict(self.given)

    def apply(self) -> None:
        """Set the number of torch's threads in this process, where torch is loaded."""
        pf.set_threads(self.train_threads)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        before, after = self.before.choice, self.after.choice
        rows = [
            {
                "stage": stage,
                "setting_before": setting_of(before, stage),
                "setting": setting_of(after, stage),
                "before": asdict(self.before.stages[stage]),
                "after": asdict(self.after.stages[stage]),
            }
            for stage in STAGES
        ]
        plain = (str, int, float, type(None))
        options = {
            key: value if isinstance(value, plain) else str(value)
            for key, value in self.loader_options().items()
        }
        return {
            "choice": asdict(self.choice), "loader_options": options,
            "cores": self.profile.cores, "stages": rows, "slowest_before": self.before.slowest,
            "slowest": self.after.slowest, "forecast_seconds_before": self.before.seconds,
            "forecast_seconds": self.after.seconds, "seconds_before": self.seconds_before,
            "seconds": self.seconds, "epoch_batches": self.epoch_batches, "epoch_seconds": self.epoch_seconds,
            "tried": [asdict(t) for t in self.tried], "hit_rate": self.hit_rate, "filling": self.filling,
            "curve": [asdict(p) for p in self.curve], "memory": dict(self.memory),
            "policy": dict(self.policy), "left_out": list(self.left_out), "profile": {
                "sample": {str(k): asdict(v) for k, v in self.profile.sample.items()},
                "train": {str(k): asdict(v) for k, v in self.profile.train.items()},
                "extract": asdict(self.profile.extract),
                "read": [asdict(k) | asdict(v) for k, v in self.profile.read.items()],
            },
        }  # fmt: skip


def setting_of(choice: Choice, stage: str) -> str:
    """A stage's setting in words."""
    if stage == "sample":
        return (
            "in the loader" if choice.workers == 0 else f"{choice.workers} worker{'s' * (choice.workers > 1)}"
        )
    if stage == "train":
        return f"{choice.train_threads} thread{'s' * (choice.train_threads > 1)}"
    if stage == "extract":
        return "in the loader"
    return choice.reading.words
