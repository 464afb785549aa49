"""What belongs to one process: threads, locks and what is under way stay there when it forks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from featstore.errors import ArgumentError, ClosedError


def is_stopped(process: int) -> bool:
    """Whether a process of this system stands still, as SIGSTOP has it; False for one that cannot be seen."""
    try:
        said = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return said.rpartition(b")")[2].split()[:1] == [b"T"]


class OneProcess:
    """Something that belongs to the process that made it, until it is closed. ``called``: what messages call
    it."""

    called: str

    def __init__(self) -> None:
        self._closed, self._pid = False, os.getpid()

    def is_closed(self) -> bool:
        return self._closed

    @property
    def here(self) -> bool:
        """Whether this is the process that made it."""
        return self._pid == os.getpid()

    def check_process(self) -> None:
        """Raise ClosedError in any other process than its own."""
        if not self.here:
            raise ClosedError(f"{self.called} belongs to the process that made it; make another one here")

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"{self.called} belongs to the process that made it, and cannot be pickled: pickle the "
            "store, which is a handle, and make one of it in each process"
        )

    def check_open(self) -> None:
        """Raise ClosedError where it is closed, or belongs to another process."""
        self.check_process()
        if self._closed:
            raise ClosedError(f"{self.called} is closed; open or make another")
