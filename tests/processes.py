"""Forked children of a test, which cannot outlive it for long."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any


def own_threads() -> list[str]:
    """Names of the threads of ours that are there for something: not that of the one that closes what is
    dropped, which stays."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("featstore") and name != "featstore-closer")


def child(work: Callable[[], Any]) -> int:
    """The process id of a forked child that does some work; it ends with 0 if that gave something true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int, seconds: float = 20.0) -> int:
    """How a child ended; -1 where it had to be killed after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def in_child(work: Callable[[], Any]) -> int:
    """0 if ``work`` ran in a forked child and gave something true."""
    return exit_code(child(work))
