"""What a step of the model costs beside a core that is busy: why a loop that loads beside its training can be
slower than training alone, though neither waits for the other.

    python benchmarks/beside.py --dir /a/directory/on/the/ssd

The model, fan-outs and mini-batches are those of ``modes.py``, torch with one thread, everything in memory.
Between the steps another thread fills a mini-batch's rows, as a loader does; during them it does nothing,
computes in registers, or copies memory. A step over rows that the same core has just gathered, as those of a
plain loop are, stands beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click
import numpy as np
import torch
from compiled_model import Training
from harness import Claim, Contender, Report, Sample, Settings, measure_rounds, paired_ratio, shared_options
from modes import BATCH, COLUMNS, FANOUTS

from featstore.base.compilation import njit
from featstore.sampling.neighbors import NeighborSampler

NODES, EDGES_A_NODE = 1 << 16, 15
STEPS = 8
COPIED_BYTES = 64 << 20
ALONE, HOT, COMPUTES, COPIES = (
    "nothing beside it", "nothing beside it, rows gathered by this core", "beside a core that computes",
    "beside a core that copies memory",
)  # fmt: skip


@njit(nogil=True)
def compute(steps: int, value: int) -> int:
    """Busy in registers alone."""
    for _ in range(steps):
        value = value * 25214903917 + 11
        value ^= value >> 29
    return value


class Steps:
    """Steps on mini-batches whose rows somebody else gathers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        sources = rng.integers(0, NODES, NODES * EDGES_A_NODE).astype(np.int32)
        sampler = NeighborSampler(np.arange(NODES + 1) * EDGES_A_NODE, sources, FANOUTS)
        self._samples = [
            sampler.sample(rng.choice(NODES, BATCH, replace=False), number) for number in range(STEPS)
        ]
        self._rows = np.ones((NODES, COLUMNS), np.float32)
        self._training = Training(COLUMNS, np.zeros(NODES, np.uint8))
        self._from, self._to = np.ones((2, COPIED_BYTES), np.uint8)

    def _computes(self, stop: threading.Event) -> None:
        while not stop.is_set():
            compute(200_000, 1)

    def _copies(self, stop: threading.Event) -> None:
        while not stop.is_set():
            np.copyto(self._to, self._from)

    def _gather(self, number: int, out: list[np.ndarray]) -> None:
        nodes = self._samples[number].node
        x = np.empty((len(nodes), COLUMNS), np.float32)
        np.take(self._rows, nodes, axis=0, out=x, mode="clip")
        out.append(x)

    def contender(self, name: str) -> Contender:
        beside: Callable[[threading.Event], None] | None = {
            COMPUTES: self._computes, COPIES: self._copies
        }.get(name)  # fmt: skip

        def run(_: int) -> Sample:
            seconds = 0.0
            for number, sample in enumerate(self._samples):
                made: list[np.ndarray] = []
                self._done_by(name == HOT, lambda n=number, to=made: self._gather(n, to))
                given = {
                    "seeds": sample.node[:BATCH].astype(np.int32), "row": sample.row.astype(np.int32),
                    "col": sample.col.astype(np.int32), "nodes": list(sample.num_sampled_nodes),
                    "edges": list(sample.num_sampled_edges),
                }  # fmt: skip
                stop = threading.Event()
                thread = None if beside is None else threading.Thread(target=beside, args=(stop,))
                if thread is not None:
                    thread.start()
                    time.sleep(0.002)
                begin = time.perf_counter()
                self._training.step(made[0], given)
                seconds += time.perf_counter() - begin
                stop.set()
                if thread is not None:
                    thread.join()
            return Sample(STEPS, seconds)

        return Contender(name, "steps/s", "all in memory", run)

    @staticmethod
    def _done_by(this_core: bool, work: Callable[[], None]) -> None:
        if this_core:
            work()
            return
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


@click.command()
@shared_options(size="256MiB", quick_size="256MiB", rounds=40)
def main(settings: Settings) -> None:
    """A step of the model beside a core that is busy, over one that is alone."""
    torch.set_num_threads(1)
    compute(1, 1)
    steps = Steps()
    contenders = [steps.contender(name) for name in (ALONE, HOT, COMPUTES, COPIES)]
    for one in contenders:
        one.run(0)
    series = measure_rounds(contenders, settings.rounds)
    report = Report("beside", "A step of the model beside a busy core", {
        "nodes": NODES, "edges_a_node": EDGES_A_NODE, "row_bytes": 4 * COLUMNS, "fanouts": list(FANOUTS),
        "batch_size": BATCH, "rounds": settings.rounds, "steps": STEPS, "torch_threads": 1,
    }, settings.workspace)  # fmt: skip
    alone = series[ALONE]
    report.claims = [
        Claim(f"time of a step, {name}, over one with {ALONE}", paired_ratio(alone, series[name]))
        for name in (HOT, COMPUTES, COPIES)
    ]
    report.series = list(series.values())
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
