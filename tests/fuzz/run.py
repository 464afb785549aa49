"""The fuzzer: stores, compiled traces, traces and saved caches as a stranger might make them, with digests
and uuid that fit.

    python tests/fuzz/run.py [--seconds 60] [--runs N] [--seed S] [--dir DIR] [--processes P] [--memory MIB]
        [--guard] [--bounds]

Each run changes something in a small corpus (corpus.py), seals it again (mutants.py) and does with it what
users do (uses.py), in a child that was forked when all kernels had been compiled. What a run must not do: die
of a signal, hang, take more memory than the bound, raise anything but featstore's errors, or give wrong rows.
Each such run is a finding; its number, with the same seed, repeats it: ``--replay NUMBER``. ``--guard``:
memory that kernels reach by address lies between pages that nobody may touch. ``--bounds``: with kernels that
check the bounds of arrays (NUMBA_BOUNDSCHECK), in a cache of their own.

Takes one core a process, the memory bound for each, and a few MiB below DIR. Ends with 1 where there are
findings.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HANG_SECONDS = 30
CHILD_RUNS = 1500  # then a new child is forked: whatever a run leaves behind is gone
USES = 4  # of one mutant, at most
KINDS = ("store", "store", "store", "pack", "pack", "trace", "cache")


class Worker:
    """One corpus of its own, and children that try mutants of it, one after the other."""

    def __init__(self, folder: Path, seed: int, memory_bytes: int) -> None:
        self.folder, self.seed, self.memory_bytes = folder, seed, memory_bytes
        self.shared = mmap.mmap(
            -1, mmap.PAGESIZE
        )  # the number of the run under way; how many uses have ended in an error; what it does
        self.pid = 0
        self.stopped = 0
        self.seen, self.since = -1, time.monotonic()
        self.log = folder / "died.txt"

    # In the parent.

    def renew(self) -> None:
        """A fresh copy of the corpus: one that died in the middle leaves a mutant."""
        for name in ("store", "trace"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            shutil.copytree(self.folder.parent / "corpus" / name, self.folder / name)

    def start(self, first: int, step: int, end: int) -> None:
        self.renew()
        self.note(first, 0)
        self.seen, self.since = first, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.work(range(first, min(end, first + CHILD_RUNS * step), step))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def note(self, number: int, refused: int) -> None:
        self.shared[:16] = number.to_bytes(8, "little") + refused.to_bytes(8, "little")

    @property
    def number(self) -> int:
        return int.from_bytes(self.shared[:8], "little")

    @property
    def refused(self) -> int:
        return int.from_bytes(self.shared[8:16], "little")

    def say(self, what: str) -> None:
        text = what.encode()[:2000]
        self.shared[16 : 18 + len(text)] = len(text).to_bytes(2, "little") + text

    @property
    def said(self) -> str:
        return self.shared[18 : 18 + int.from_bytes(self.shared[16:18], "little")].decode(errors="replace")

    def poll(self) -> str | None:
        """How the child ended: "" for well, else how; None while it works."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done:
            self.pid = 0
            code = os.waitstatus_to_exitcode(status)
            return (
                ""
                if code == 0
                else f"signal {signal.Signals(-code).name}"
                if code < 0
                else f"exit code {code}"
            )
        if self.number != self.seen:
            self.seen, self.since = self.number, time.monotonic()
        if time.monotonic() - self.since > HANG_SECONDS:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            return "hang"
        return None

    # In the child.

    def work(self, numbers: range) -> None:
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (virtual + self.memory_bytes, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        log = self.log.open("w")
        faulthandler.enable(log)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        bench = Bench(self.folder, self.seed)
        refused = 0
        for number in numbers:
            self.note(number, refused)
            finding, errors = bench.run(number, self.say)
            refused += errors
            if finding is not None:
                with (self.folder / "findings.jsonl").open("a") as file:
                    file.write(json.dumps(finding) + "\n")
        self.note(numbers[-1] + numbers.step if len(numbers) else 0, refused)


class Bench:
    """Makes mutants of one copy of the corpus, and tries them."""

    def __init__(self, folder: Path, seed: int) -> None:
        import corpus
        import mutants
        import uses

        self.seed, self.uses, self.mutants = seed, uses, mutants
        self.store, self.trace = folder / corpus.STORE, folder / corpus.TRACE
        self.stores = {
            path: mutants.StoreMutant(path)
            for path in (self.store, *(self.store / "packs" / n for n in corpus.PACKS))
        }
        self.log, self.cache = self.trace / "trace.log", self.store / "caches/warm.cache"
        self.right = {path: path.read_bytes() for path in (self.log, self.cache)}
        self.truth = uses.Truth(seed)

    def run(self, number: int, say: Any = lambda what: None) -> tuple[dict[str, Any] | None, int]:
        """(what must not be, or None; how many uses ended in one of featstore's errors). Leaves the corpus as
        it was."""
        import numpy as np

        rng = np.random.default_rng([self.seed, number])
        kind, mutants, uses = KINDS[rng.integers(len(KINDS))], self.mutants, self.uses
        path, what, error = self.store, "", ""
        try:
            if kind in ("store", "pack"):
                path = self.store if kind == "store" else list(self.stores)[1 + rng.integers(2)]
                what = mutants.mutate_store(self.stores[path], rng)
                choices = uses.OF_STORES if kind == "store" else uses.OF_PACKS
            elif kind == "trace":
                path, choices = self.trace, uses.OF_TRACES
                what = mutants.mutate_trace(self.log, self.right[self.log], rng)
            else:
                choices = uses.OF_CACHES
                what = mutants.mutate_cache(self.cache, self.right[self.cache], rng)
            # Whether rows and what finds them are as they were: then they must come out right.
            pristine = kind != "store" or not any(
                p in what for p in ("manifest", "_node", "node_of", "checksums", "graphs/")
            )
            errors = 0
            for use in rng.permutation(np.array(list(dict.fromkeys(choices)), object))[:USES]:
                say(f"{kind}: {what}; {use.__name__}")
                try:
                    use(path, self.truth, rng, pristine)
                except uses.FINE:
                    errors += 1
                except (Exception, SystemExit) as caught:
                    error = f"{type(caught).__name__}: {caught}"[:400]
                    frames = traceback.extract_tb(caught.__traceback__)
                    where = [f"{Path(f.filename).name}:{f.lineno}" for f in frames][-5:]
                    return {
                        "run": number,
                        "what": f"{kind}: {what}; {use.__name__}",
                        "error": error,
                        "where": where,
                    }, errors
                finally:
                    gc.collect(0)
            return None, errors
        finally:
            if kind in ("store", "pack"):
                self.stores[path].restore()
            for file, data in self.right.items():
                if kind in ("trace", "cache"):
                    file.write_bytes(data)


def prepare(folder: Path, seed: int, guard_pages: bool) -> None:
    """Make the corpus, and use all of it once: kernels are compiled, and nothing of featstore runs any more
    when children are forked."""
    import corpus
    import numpy as np
    import uses

    (folder / "corpus").mkdir(parents=True)
    corpus.make(folder / "corpus", seed)
    if guard_pages:
        import guard

        guard.install()
    truth, store = uses.Truth(seed), folder / "corpus" / corpus.STORE
    targets = [(use, store) for use in (*uses.OF_STORES, *uses.OF_CACHES)]
    targets += [(use, store / "packs" / name) for use in uses.OF_PACKS for name in corpus.PACKS]
    targets += [(use, folder / "corpus" / corpus.TRACE) for use in uses.OF_TRACES]
    for turn in range(2):
        for use, path in targets:
            use(path, truth, np.random.default_rng([seed, 7, turn]), True)
    shutil.rmtree(store / "packs/again", ignore_errors=True)


def fuzz(
    folder: Path, *, seed: int = 0, seconds: float = 60, runs: int = 2**62, processes: int = 1,
    memory_bytes: int = 2**30, first: int = 0, guard_pages: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Try mutants until ``seconds`` or ``runs`` are over; what was found."""
    prepare(folder, seed, guard_pages)
    workers = []
    for k in range(processes):
        (folder / f"worker{k}").mkdir()
        workers.append(Worker(folder / f"worker{k}", seed, memory_bytes))
    begin, died, done, refused = time.monotonic(), [], 0, 0
    nexts = [first + k for k in range(processes)]
    end = first + runs
    for k, worker in enumerate(workers):
        worker.start(nexts[k], processes, end)
    while any(worker.pid for worker in workers):
        time.sleep(0.02)
        over = time.monotonic() - begin > seconds
        for k, worker in enumerate(workers):
            if not worker.pid:
                continue
            if over:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                worker.pid, ended = 0, ""
            else:
                polled = worker.poll()
                if polled is None:
                    continue
                ended = polled
            at = worker.number
            if ended:
                log = worker.log.read_text(errors="replace").splitlines()[:14] if worker.log.exists() else []
                died.append({"run": at, "what": worker.said, "error": ended, "where": log})
                at += processes
            done += (at - nexts[k]) // processes
            refused += worker.refused
            nexts[k] = at
            if not over and at < end:
                worker.start(at, processes, end)
    found = list(died)
    for worker in workers:
        path = worker.folder / "findings.jsonl"
        found += [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wall = time.monotonic() - begin
    return {
        "runs": done,
        "refused": refused,
        "seconds": round(wall, 1),
        "rate": round(done / wall, 1),
        "findings": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--runs", type=int, default=2**62)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--memory", type=int, default=1024, help="MiB that a run may take")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--replay", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="fuzz-") as name:
        folder = Path(name)
        os.environ["FEATSTORE_CACHE"] = name
        if given.bounds:
            os.environ |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str((given.dir or folder) / "bounds")}
        if given.replay is not None:
            prepare(folder, given.seed, given.guard)
            finding, refused = Bench(folder / "corpus", given.seed).run(given.replay, print)
            print(json.dumps(finding, indent=1) if finding else "refused" if refused else "nothing found")
            return int(finding is not None)
        result = fuzz(
            folder, seed=given.seed, seconds=given.seconds, runs=given.runs, processes=given.processes,
            first=given.first, memory_bytes=given.memory * 2**20, guard_pages=given.guard,
        )  # fmt: skip
    kinds: dict[str, list[Any]] = {}
    for one in result.pop("findings"):
        key = (
            f"{one['error'].split(':')[0]} at {one['where'][-1] if ':' in (one['where'] or [''])[-1] else ''}"
        )
        kinds.setdefault(key, []).append(one)
    for key, several in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(several)} x {key}")
        for one in several[:3]:
            print("   ", json.dumps(one))
    print(json.dumps(result | {"findings": sum(map(len, kinds.values()))}))
    return int(bool(kinds))


sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[2]),
    str(Path(__file__).parents[2] / "tools"),
]
if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
