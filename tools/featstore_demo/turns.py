"""Demo turns: processes that train, an epoch each in turn. Who has none stands still, with all its threads.

A machine that others use as well is faster at one time than at another, by more than ways to train differ.
What was measured within the same few seconds can be compared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from featstore.errors import FeatstoreError
from featstore_demo.worker import Job, Progress

__all__ = ["Trainer"]

# The worker imports from where its parent does: an installed package, or a checkout.
_START_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from featstore_demo.worker import serve; serve(sys.argv[1])"
)
_STANDS, _ENDED = "Tt", "ZX"  # states of a process, as /proc has them


class Trainer:
    """A process that trains in the way of a job (:mod:`featstore_demo.worker`). It begins with its first
    turn. ``progress`` is told what it is at."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self._progress = job, progress
        self._process: subprocess.Popen[str] | None = None
        self._results: dict[str, Any] | None = None
        self._message: str | None = None

    @property
    def results(self) -> dict[str, Any]:
        """What it has measured; after its last turn."""
        assert self._results is not None
        return self._results

    def turn(self) -> float | None:
        """Have it train until it stands still after an epoch, which took so many seconds; None where it is
        through. Raises FeatstoreError where it fails."""
        process = self._process
        if process is None:
            process = self._process = self._start()
        else:
            process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        for text in process.stdout:
            event = json.loads(text)
            if event["event"] == "progress":
                self._progress(f"{self.job.way}: {event['stage']}", event["done"], event["total"])
            elif event["event"] == "epoch":
                while _state(process.pid) not in _STANDS + _ENDED:
                    time.sleep(0.001)
                return float(event["seconds"])
            else:
                self._results, self._message = event.get("results"), event.get("message")
        self._check_end(process.wait())
        return None

    def _start(self) -> subprocess.Popen[str]:
        path = self._file("json")
        self.job.write(path)
        search = json.dumps([os.path.abspath(part) for part in sys.path])
        # In all ways: PyTorch's threads that wait for each other leave the cores to whoever reads.
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        with self._file("stderr").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _START_WORKER, str(path), search],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip

    def _file(self, suffix: str) -> Path:
        return Path(self.job.directory) / f"{self.job.way}.{suffix}"

    def _check_end(self, code: int) -> None:
        way = self.job.way
        if self._message is not None:
            raise FeatstoreError(
                f"{way}: {self._message} (--memory, memory=, gives all ways more; ways= leaves this one out)"
            )
        if code != 0 or self._results is None:
            tail = "\n".join(self._file("stderr").read_text().splitlines()[-15:])
            raise FeatstoreError(f"the training process ({way}) ended with {code}:\n{tail}")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, whatever it is at."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def _state(pid: int) -> str:
    """Of a process of this one's, one letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
