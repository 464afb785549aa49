"""Mini-batches asked for ahead of who goes through them: from disk, several are sampled at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from numpy.typing import NDArray

from featstore.base.threads import Runner
from featstore.sampling.under_way import UNDER_WAY_MAX

#: Seeds, number and epoch of a mini-batch.
SeedsOf = tuple[NDArray[Any], int, int]


def sampled_ahead(sampler: Any, asked: Iterator[SeedsOf]) -> Iterator[Any]:
    """The mini-batches asked for, in order, of which the next ones are under way, or there, already. They end
    with this; a forked child, which has none of the threads, samples the rest one at a time."""
    pid, number = os.getpid(), 0
    runners = [Runner(f"featstore-sample-{k}") for k in range(UNDER_WAY_MAX)]
    waiting: deque[tuple[SeedsOf, Future[Any]]] = deque()
    try:
        while True:
            while len(waiting) < UNDER_WAY_MAX and os.getpid() == pid and (one := next(asked, None)):
                waiting.append((one, runners[number % UNDER_WAY_MAX].submit(partial(_sample, sampler, one))))
                number += 1
            if not waiting:
                break
            one, made = waiting.popleft()
            yield made.result() if os.getpid() == pid else _sample(sampler, one)
            del made
        for one in asked:
            yield _sample(sampler, one)
    finally:
        for _, made in waiting:
            made.cancel()
        for runner in runners:
            runner.end()


def _sample(sampler: Any, one: SeedsOf) -> Any:
    seeds, number, epoch = one
    return sampler.sample(seeds, number, epoch=epoch)
