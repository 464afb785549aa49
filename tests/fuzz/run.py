"""The fuzzer: whatever featstore reads back, as a stranger might make it, with digests and uuid that fit.

    python tests/fuzz/run.py [--seconds 60] [--runs N] [--seed S] [--dir DIR] [--processes P] [--memory MIB]
        [--guard] [--bounds] [--both] [--kinds KIND ...]

Each run changes something in a small corpus (corpus.py), seals it again (mutants.py, files.py) and does with
it up to four things that users do (uses.py), in a child that was forked when all kernels had been compiled.
What a run must not do: die of a signal, hang, take more memory than the bound, raise anything but featstore's
errors, or give wrong rows. Each such run is a finding, told at once; its number, with the same options,
repeats it: ``--replay NUMBER``. ``--guard``: memory that kernels reach by address lies between pages that
nobody may touch. ``--bounds``: with kernels that check the bounds of arrays (NUMBA_BOUNDSCHECK), compiled
anew. ``--both``: a tenth of the time with ``--bounds``, the rest without.

Takes one core a process, the memory bound for each, and a few MiB: in /dev/shm where that is a file system in
memory with room, else below DIR. Ends with 1 where there are findings. At the end, and each minute, it counts
runs, uses, and those that were refused (ended in one of featstore's errors); at the end by kind of file and
by kind of use, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TELL_SECONDS = 60
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 512 * 2**20


def fuzz(
    folder: Path, *, seed: int = 0, seconds: float = 60, runs: int = 2**62, processes: int = 1,
    memory_bytes: int = 2**30, first: int = 0, guard_pages: bool = False, kinds: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Try mutants until ``seconds`` or ``runs`` are over; what was done and found."""
    from bench import prepare
    from worker import Worker

    prepare(folder, seed, guard_pages, kinds)
    workers = []
    for k in range(processes):
        (folder / f"worker{k}").mkdir()
        workers.append(Worker(folder / f"worker{k}", seed, memory_bytes, kinds))
    begin = told = time.monotonic()
    found: list[dict[str, Any]] = []
    nexts, end = [first + k for k in range(processes)], first + runs

    def note(findings: list[dict[str, Any]]) -> None:
        for one in findings:
            print("FOUND", json.dumps(one), flush=True)
        found.extend(findings)

    for k, worker in enumerate(workers):
        worker.start(nexts[k], processes, end)
    while any(worker.pid for worker in workers):
        time.sleep(0.02)
        now = time.monotonic()
        over = now - begin > seconds
        for k, worker in enumerate(workers):
            if worker.pid:
                ended = "" if over else worker.poll()
                if over:
                    worker.kill()
                if ended is not None:
                    note(worker.found())
                    if ended:
                        note([worker.died(ended)])
                    nexts[k] = worker.number + (processes if ended else 0)
                    if not over and nexts[k] < end:
                        worker.start(nexts[k], processes, end)
        if now - told > TELL_SECONDS:
            told = now
            for worker in workers:
                note(worker.found())
            print(json.dumps(counted(workers, now - begin, found)["in all"]), flush=True)
    return counted(workers, time.monotonic() - begin, found) | {"found": found}


def counted(workers: list[Any], seconds: float, found: list[Any]) -> dict[str, Any]:
    """What was done, in numbers."""
    import uses
    from bench import FILES

    counts = sum(worker.counts for worker in workers)
    mutants, used = counts[:, 0, 0], counts[:, 1:]
    total, refused = (int(n) for n in used.sum(axis=(0, 1)))
    return {
        "by file": {
            name: {
                "mutants": int(mutants[k]),
                "uses": int(used[k, :, 0].sum()),
                "refused": int(used[k, :, 1].sum()),
            }
            for k, name in enumerate(FILES)
        },
        "by use": {
            name: {"uses": int(used[:, k, 0].sum()), "refused": int(used[:, k, 1].sum())}
            for k, name in enumerate(uses.NAMES)
        },
        "in all": {
            "mutants": int(mutants.sum()),
            "uses": total,
            "refused": refused,
            "findings": len(found),
            "seconds": round(seconds, 1),
            "mutants_per_second": round(mutants.sum() / seconds, 1),
            "uses_per_second": round(total / seconds, 1),
        },
    }


def memory_folder(given: Path | None) -> Path | None:
    """A directory in memory, where this machine has one with room; else the one given."""
    try:
        status = os.statvfs(_MEMORY)
        kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    except OSError:
        return given
    room = status.f_bavail * status.f_frsize >= _ROOM_BYTES and os.access(_MEMORY, os.W_OK)
    return _MEMORY if room and kinds.get(str(_MEMORY)) == "tmpfs" else given


def both(given: argparse.Namespace) -> int:
    """A tenth of the time with bounds, the rest without, in processes of their own: Numba asks once."""
    codes = []
    for share, bounds in ((0.1, True), (0.9, False)):
        command = [sys.executable, __file__, "--seed", str(given.seed), "--memory", str(given.memory)]
        command += ["--seconds", str(given.seconds * share), "--runs", str(int(given.runs * share))]
        command += ["--processes", str(given.processes), *(["--dir", str(given.dir)] if given.dir else [])]
        command += ["--kinds", *given.kinds] if given.kinds else []
        command += ["--guard"] * given.guard + ["--bounds"] * bounds
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


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
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--replay", type=int)
    parser.add_argument("--kinds", nargs="*", default=(), help="of mutants; all by default")
    given = parser.parse_args()
    if given.dir is not None:
        given.dir.mkdir(parents=True, exist_ok=True)
    if given.both:
        return both(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    with (
        tempfile.TemporaryDirectory(dir=memory_folder(given.dir), prefix="fuzz-") as name,
        tempfile.TemporaryDirectory(dir=given.dir, prefix="bounds-") as kernels,
    ):
        if given.bounds:
            os.environ |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": kernels}
        if given.replay is not None:
            return replay(Path(name), given)
        result = fuzz(
            Path(name), seed=given.seed, seconds=given.seconds, runs=given.runs, processes=given.processes,
            first=given.first, memory_bytes=given.memory * 2**20, guard_pages=given.guard, kinds=given.kinds,
        )  # fmt: skip
    found = result.pop("found")
    for part in ("by file", "by use"):
        for key, counts in result.pop(part).items():
            print(f"{part}: {key:16}", *(f"{name} {count:9,}" for name, count in counts.items()))
    kinds: dict[str, list[Any]] = {}
    for one in found:
        place = one["where"][-1] if one["where"] and ":" in one["where"][-1] else ""
        kinds.setdefault(f"{one['error'].split(':')[0]} at {place}", []).append(one)
    for key, several in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(several)} x {key}: runs {', '.join(str(one['run']) for one in several[:5])}")
    print(json.dumps(result["in all"]))
    return int(bool(found))


def replay(folder: Path, given: argparse.Namespace) -> int:
    """Repeat a run, in this process."""
    import numpy as np
    from bench import SHAPE, Bench, prepare

    prepare(folder, given.seed, given.guard, given.kinds)
    finding = Bench(folder / "corpus", given.seed, np.zeros(SHAPE, np.int64), print, given.kinds).run(
        given.replay
    )
    print(json.dumps(finding, indent=1) if finding else "nothing found")
    return int(finding is not None)


sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("", "tools")]  # if nothing is installed
if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
