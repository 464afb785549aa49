"""Trying choices out for real: a second or so of an epoch with each, in turns, with a buffer that stays
warm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from featstore.errors import SourceError
from featstore.loaders.online.loader import OnlineLoader
from featstore.tune import profiling as pf
from featstore.tune.allocation import (
    Choice,
    LoaderForecast,
    Profile,
    Reading,
    allowed_threads,
    forecast_loader,
)
from featstore.tune.timetable import Timetable, counted
from featstore.tune.tuned import Trial

TRIAL_ROUNDS = 2  # in which choices are tried out in turns


def candidates(best: Sequence[LoaderForecast], trials: int, compared: Choice) -> list[Choice]:
    """What to try out, in the model's order, all with the best way of reading: half of the trials for the
    best of different numbers of training threads, the rest for the best of all; and what the choice is
    compared with."""
    first_of = {one.choice.train_threads: one for one in reversed(best)}
    different = [one for one in best if first_of[one.choice.train_threads] is one][: -(-trials // 2)]
    rest = [one for one in best if one not in different][: trials - len(different)]
    chosen = [
        replace(one.choice, reading=compared.reading) for one in best if one in different or one in rest
    ]
    return chosen + [compared] * (compared not in chosen)


class Trials:
    """What choices take.

    Args:
        loader: makes an online loader of mini-batches that reads in a given way.
        batches: mini-batches by the number of workers.
        known: how many an epoch has about.
        step: the training step, or None.
        time: whose stage ``"try"`` this is.
    """

    def __init__(
        self, loader: Callable[[Any, Reading], OnlineLoader], batches: Callable[[int], Iterable[Any]],
        known: int, step: pf.TrainStep | None, time: Timetable,
    ) -> None:  # fmt: skip
        self._loader, self._batches, self._known, self._step, self._time = loader, batches, known, step, time

    def run(
        self, profile: Profile, best: Sequence[LoaderForecast], before: Choice, trials: int
    ) -> tuple[Trial, ...]:
        """Try out the best choices and what they are compared with; nothing where there is no time for two of
        them."""
        if trials == 0:
            return ()
        reading = best[0].choice.reading
        chosen = candidates(best, trials, replace(before, reading=reading))
        seconds = self._time.part("try", (TRIAL_ROUNDS + 1) * (len(chosen) + 2))
        tried = self._pace(chosen, seconds)
        if (
            tried and reading != before.reading
        ):  # the profile of reading has been wrong: what is chosen is tried with the other, too
            allowed = [one for one in tried if one.train_threads in allowed_threads(profile)]
            fastest = min(allowed or tried, key=lambda choice: tried[choice])
            tried |= self._pace(
                list(dict.fromkeys([replace(fastest, reading=before.reading), before])), seconds
            )
        return tuple(
            Trial(choice, forecast_loader(profile, choice).seconds, took) for choice, took in tried.items()
        )

    def _pace(self, choices: Sequence[Choice], seconds: float) -> dict[Choice, float]:
        """What a mini-batch takes by each of these choices, which read alike, the better of two rounds where
        there is time for two. What comes last, with which the others are compared, is tried first; where
        there is no time for any other, nothing is."""
        spent: dict[Choice, list[float]] = {choice: [] for choice in choices}
        if self._time.leaves_out("try", f"trying out reading by {choices[0].reading.engine}", 3 * seconds):
            return {}
        switch = pf.Switch(self._batches(0))
        with self._loader(switch, choices[0].reading) as loader:
            clock = pf.Clock()
            self._try_one(loader, switch, choices[0], 2 * seconds)  # warms the buffer
            longest = clock.seconds
            for turn in range(TRIAL_ROUNDS):
                for choice in choices if turn else [*choices[-1:], *choices[:-1]]:
                    if turn and self._time.left("try") < longest:
                        break
                    if not turn and self._time.leaves_out("try", f"trying out {_words(choice)}", longest):
                        continue
                    clock = pf.Clock()
                    spent[choice].append(self._try_one(loader, switch, choice, seconds))
                    longest = max(longest, clock.seconds)
        found = {choice: min(one) for choice, one in spent.items() if one}
        return found if len(found) > 1 or len(choices) == 1 else {}

    def _try_one(self, loader: OnlineLoader, switch: pf.Switch, choice: Choice, seconds: float) -> float:
        """What a mini-batch takes when all stages work at once."""
        switch.now = self._batches(choice.workers)
        pf.set_threads(choice.train_threads)
        skip = min(3 + 2 * choice.workers, (self._known - 1) // 2)
        counted, spent, watch = 0, 0.0, pf.Clock()
        for _ in range(pf.PROFILE_PASSES_MAX):
            number, begun, begin = -1, -1, pf.Clock()
            walk: Any = iter(loader)
            with closing(walk):
                for number, batch in enumerate(walk):
                    if self._step is not None:
                        self._step(batch)
                    del batch
                    if number == skip:  # from here on the pace is steady
                        begun, begin = number, pf.Clock()
                    elif watch.seconds > seconds and number >= skip + pf.least_timed(watch, seconds):
                        break
                spent += begin.seconds
            counted += number - begun
            if number <= 0 or (counted and watch.seconds > seconds):
                break
        if counted == 0 or number <= 0:
            raise SourceError(
                f"make_batches({choice.workers}) gave {number + 1} mini-batches when it was iterated "
                "again: return what can be iterated more than once"
            )
        return spent / counted


def _words(choice: Choice) -> str:
    return f"{counted(choice.workers, 'worker')} with {counted(choice.train_threads, 'training thread')}"
