"""What ``compiled.py`` runs in a process of its own. Given and prints JSON.

``bare``: nothing but imports, kernels and a step of a tiny model, which is what the other modes begin with,
too. ``step``: what steps on the largest mini-batch take beyond its rows and its sample. ``pack``: compile a
trace. ``memmap``, ``advised``, ``online``, ``compiled``: an epoch that nobody trains on, then one of
GraphSAGE. All of these take the mini-batches' graphs from the same trace; what differs is where the rows come
from. memmap's (one epoch only, with training) and online's stop after ``seconds_max``.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from graphs import GraphFiles
from system import cpu_seconds, gather_until, go_through, process_io, status_bytes

import featstore
import featstore.loaders.train
from featstore.errors import BudgetError
from featstore.front.compiling import compile_trace
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.online.loader import OnlineLoader

TINY_ROWS, TINY_BATCHES = 4096, 8
TOUCHED = 1 << 16  # of a row's bytes one in so many is looked at where nobody trains


def load_kernels(folder: Path, columns: int) -> None:
    """Compile and load a tiny trace in two ways, so that the library's machine code is in memory."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name)
        batches = [
            (rng.permutation(TINY_ROWS)[:900], {"row": np.zeros(2, np.int32)}) for _ in range(TINY_BATCHES)
        ]
        featstore.Trace.record(batches, path / "trace").close()
        rows = np.zeros((TINY_ROWS, columns), np.float32)
        with (
            featstore.pack(path / "store", rows, memory="64MiB") as store,
            featstore.Trace(path / "trace") as trace,
        ):
            store.reader(memory="16MiB", static=None).close()
            for disk, cache in ((None, TINY_ROWS * 32), ("1x", 0)):
                compile_trace(store, trace, memory="64MiB", disk=disk, cache=cache, overwrite=True).close()  # type: ignore[union-attr]
                with store.compiled() as compiled, CompiledLoader(compiled) as loader:
                    for batch in loader:
                        del batch
            with OnlineLoader(store, batches, memory="64MiB", policy="lru") as online:
                for batch in online:
                    del batch


def reset_peak() -> None:
    """Let the peak of this process's memory begin anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


# Training.


def tiny_step(columns: int) -> None:
    """What the first step loads belongs to the imports."""
    from compiled_model import Training

    index = np.zeros(2, np.int32)
    sample = {"seeds": np.zeros(1, np.int32), "row": index, "col": index, "nodes": [1, 1, 1], "edges": [1, 1]}
    Training(columns, np.zeros(1, np.uint8)).step(np.zeros((3, columns), np.float32), sample)


def steps_on_largest(given: dict[str, Any]) -> dict[str, Any]:
    """Memory of steps on the largest mini-batch, beyond what the process has with its rows and its sample in
    memory."""
    from compiled_model import Training

    with featstore.Trace(given["trace"]) as trace:
        largest = int(np.argmax(next(iter(trace.counts.values()))))
        ids, sample = trace.batch(largest)
        x = np.ones((len(next(iter(ids.values()))), given["columns"]), np.float32)
        training = Training(given["columns"], np.load(given["labels"]))
        before = status_bytes("VmRSS")
        reset_peak()
        for _ in range(3):
            training.step(x, sample)  # type: ignore[arg-type]
        return {"step_bytes": status_bytes("VmHWM") - before, "batch_bytes": x.nbytes}


#: What is returned is the share of a last mini-batch that there was no time for all of.
Batches = Generator[tuple[Any, dict[str, Any]], None, float]


def over_memmap(given: dict[str, Any]) -> Batches:
    """Rows from a memory map of the features."""
    x = GraphFiles(Path(given["folder"]), given["nodes"], given["columns"]).load("features", mapped=True)
    if given["mode"] == "advised":
        x._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    end = time.perf_counter() + given["seconds_max"]
    with featstore.Trace(given["trace"]) as trace:
        for ids, sample in trace:
            rows, share = gather_until(x, next(iter(ids.values())), end)
            if share < 1:
                return share
            yield rows, sample  # type: ignore[misc]
    return 0.0


def recorded(trace: featstore.Trace) -> Iterator[tuple[Any, Any]]:
    """The trace's mini-batches, as a sampler would give them."""
    for ids, sample in trace:
        yield next(iter(ids.values())), sample


def epoch_of(batches: Iterator[Any], seconds_max: float, training: Any) -> dict[str, Any]:
    """An epoch, or as much as the time allows. Without training, the rows are only looked at here and
    there."""
    looked = [0.0]

    def look(x: Any, _: Any) -> None:
        looked[0] += float(x.reshape(-1)[::TOUCHED].sum())

    return go_through(batches, seconds_max, look if training is None else training.step) | {
        "looked": looked[0]
    }


def one_epoch(source: OnlineLoader, seconds_max: float, training: Any) -> dict[str, Any]:
    """An epoch of an online loader, with the time of each stage."""
    before = source.report()
    found = epoch_of(((b.x, b.sample) for b in source), seconds_max, training)
    after = source.report()
    seconds = {stage: after.seconds[stage] - before.seconds.get(stage, 0.0) for stage in after.seconds}
    hits, misses = (
        sum(getattr(buffer, name) for buffer in after.buffers.values())
        - sum(getattr(buffer, name) for buffer in before.buffers.values())
        for name in ("hits", "misses")
    )
    return found | {"stages": seconds, "hits": hits, "misses": misses}


def epochs(given: dict[str, Any]) -> dict[str, Any]:
    """Both epochs of a mode."""
    from compiled_model import Training

    training, results = Training(given["columns"], np.load(given["labels"])), {}
    begin = time.perf_counter()
    with featstore.open(given["store"]) as store:
        if given["mode"] == "compiled":
            with store.compiled(given["name"]) as compiled, CompiledLoader(compiled, tensors=False) as source:
                opened = time.perf_counter() - begin
                for what, trained in (("load", None), ("train", training)):
                    results[what] = epoch_of(((b.x, b.sample) for b in source), given["seconds_max"], trained)
                results["report"] = source.report().to_dict()
        elif given["mode"] == "online":
            with (
                featstore.Trace(given["trace"]) as trace,
                OnlineLoader(
                    store,
                    lambda _: recorded(trace),
                    memory=given["memory_bytes"],
                    policy=given.get("policy", "static"),
                    warm=given.get("warm"),
                    tensors=False,
                ) as source,
            ):
                opened = time.perf_counter() - begin
                for what in given.get("epochs", ["load", "train"]):
                    results[what] = one_epoch(
                        source, given["seconds_max"], training if what == "train" else None
                    )
                results |= {
                    "hit_rate": source.report().hit_rate,
                    "policy": source.policy,
                    "memory": source.memory(),
                }
                if given.get("save"):
                    source.save_cache(given["save"])
        else:
            opened = 0.0
            results["train"] = epoch_of(over_memmap(given), given["seconds_max"], training)
            results["load"] = results["train"] | {"seconds": results["train"]["seconds"] - training.seconds}
    if "train" in results:
        results["train"] |= {"model_seconds": training.seconds, "loss": float(np.mean(training.losses[-20:]))}
    return results | {"open_seconds": opened}


def pack(given: dict[str, Any]) -> dict[str, Any]:
    """Compile a trace. The pass over the base table begins when its first piece has been read."""
    passes: list[float] = []

    def progress(done: Any) -> None:
        if done.stage == "read" and not passes:
            passes.append(time.perf_counter())

    begin = time.perf_counter()
    try:
        compile_trace(
            given["store"], given["trace"], given["name"], progress=progress, **given["options"]
        ).close()  # type: ignore[union-attr]
    except BudgetError as error:
        return {"seconds": 0.0, "needed_bytes": error.needed_bytes, "failed": str(error)}
    end = time.perf_counter()
    return {"seconds": end - begin, "pass_seconds": end - passes[0]}


def main() -> None:
    """Do what the argument says."""
    given = json.loads(sys.argv[1])
    load_kernels(Path(given["workspace"]), given["columns"])
    if given["mode"] != "pack":
        import torch

        torch.set_num_threads(given["threads"])
        tiny_step(given["columns"])
    reset_peak()
    base = status_bytes("VmRSS")
    io, cpu = process_io(), cpu_seconds()
    result: dict[str, Any] = {}
    if given["mode"] != "bare":
        result = {"pack": pack, "step": steps_on_largest}.get(given["mode"], epochs)(given)
    after = process_io()
    result |= {key: after[key] - io[key] for key in io} | {"cpu_seconds": cpu_seconds() - cpu}
    print(json.dumps(result | {"base_bytes": base, "peak_bytes": status_bytes("VmHWM")}))


if __name__ == "__main__":
    main()
