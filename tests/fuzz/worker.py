"""A process that tries mutants: forked when all kernels have been compiled, watched, and forked anew when it
has died or tried enough."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np

HANG_SECONDS = 30
CHILD_RUNS = 4000  # then a new child is forked: whatever a run leaves behind is gone
FILE_BYTES_MAX = 64 * 2**20
_SAID = 2048
_PR_SET_PDEATHSIG = 1


class Worker:
    """One copy of the corpus, and children that try mutants of it, one after the other. What they have done
    is in memory that they share with their parent: the number of the run under way, what it does, counts."""

    def __init__(self, folder: Path, seed: int, memory_bytes: int, kinds: Sequence[str]) -> None:
        self.folder, self.seed, self.memory_bytes, self.kinds = folder, seed, memory_bytes, kinds
        size = int(np.prod(bench.SHAPE))
        self._shared = mmap.mmap(-1, 8 + _SAID + 8 * size)
        self._number = np.frombuffer(self._shared, np.int64, 1)
        self.counts = np.frombuffer(self._shared, np.int64, size, 8 + _SAID).reshape(bench.SHAPE)
        self.pid = 0
        self.seen, self.since = -1, time.monotonic()
        self.log, self.findings = folder / "died.txt", folder / "findings.jsonl"

    # In the parent.

    def start(self, first: int, step: int, end: int) -> None:
        """Go on from run number ``first``, in steps. A fresh copy of the corpus: one that died in the middle
        leaves a mutant."""
        shutil.rmtree(self.folder / "corpus", ignore_errors=True)
        shutil.copytree(self.folder.parent / "corpus", self.folder / "corpus")
        self._number[0] = first
        self.say("")
        self.seen, self.since = first, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._work(range(first, min(end, first + CHILD_RUNS * step), step))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    @property
    def number(self) -> int:
        """Of the run under way."""
        return int(self._number[0])

    def say(self, what: str) -> None:
        text = what.encode(errors="replace")[: _SAID - 2]
        self._shared[8 : 10 + len(text)] = len(text).to_bytes(2, "little") + text

    @property
    def said(self) -> str:
        return self._shared[10 : 10 + int.from_bytes(self._shared[8:10], "little")].decode(errors="replace")

    def poll(self) -> str | None:
        """How the child ended: "" for well, else how; None while it works."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done:
            self.pid = 0
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return f"signal {signal.Signals(-code).name}"
            return f"exit code {code}" if code else ""
        if self.number != self.seen:
            self.seen, self.since = self.number, time.monotonic()
        if time.monotonic() - self.since > HANG_SECONDS:
            self.kill()
            return "hang"
        return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def died(self, how: str) -> dict[str, Any]:
        """What is told of a run that ended its process."""
        log = self.log.read_text(errors="replace").splitlines()[:14] if self.log.exists() else []
        return {"run": self.number, "what": self.said, "error": how, "where": log}

    def found(self) -> list[dict[str, Any]]:
        """What runs have found since this was asked last."""
        try:
            lines = self.findings.read_text().splitlines()
        except FileNotFoundError:
            return []
        self.findings.unlink()
        return [json.loads(line) for line in lines]

    # In the child.

    def _work(self, numbers: range) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (virtual + self.memory_bytes, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        log = self.log.open("w")
        faulthandler.enable(log, all_threads=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        own = bench.Bench(self.folder / "corpus", self.seed, self.counts, self.say, self.kinds)
        for number in numbers:
            self._number[0] = number
            finding = own.run(number)
            if finding is not None:
                with self.findings.open("a") as file:
                    file.write(json.dumps(finding) + "\n")
        self._number[0] = numbers[-1] + numbers.step if len(numbers) else 0
