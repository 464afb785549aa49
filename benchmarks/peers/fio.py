"""fio: what the device gives to a program that does nothing but read or write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FioResult:
    """One direction of one fio job. ``cpu_seconds``: user and system time of the job; ``seconds``: its own
    run time."""

    operations: int
    bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def operations_per_second(self) -> float:
        return self.operations / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


def available() -> bool:
    return shutil.which("fio") is not None


def names(paths: Sequence[Path]) -> str:
    """Files as fio takes them in one option, relative to :func:`folder`: it takes 4096 characters at most."""
    return ":".join(
        os.path.relpath(path, folder(paths)).replace("\\", "\\\\").replace(":", "\\:") for path in paths
    )


def folder(paths: Sequence[Path]) -> Path:
    """The directory in which fio runs."""
    return paths[0].parent


def _run(arguments: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    common = ["--output-format=json", "--direct=1", "--ioengine=io_uring"]
    done = subprocess.run(
        ["fio", *common, *arguments], capture_output=True, text=True, check=False, cwd=directory
    )
    if done.returncode != 0:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[:500]}")
    text = done.stdout[done.stdout.index("{") :]  # warnings come before
    jobs: list[dict[str, Any]] = json.loads(text)["jobs"]
    for job in jobs:
        if job["error"]:
            raise RuntimeError(f"fio job {job['jobname']} ended with error {job['error']}")
    return jobs


def _result(job: dict[str, Any], direction: str) -> FioResult:
    side = job[direction]
    seconds = side["runtime"] / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return FioResult(side["total_ios"], side["io_bytes"], seconds, cpu)


def _several(processes: int) -> list[str]:
    return [] if processes == 1 else [f"--numjobs={processes}", "--group_reporting"]


def _registered(registered: bool) -> list[str]:
    return ["--fixedbufs=1"] if registered else []


def random_read(
    paths: Sequence[Path],
    seconds: float,
    block_bytes: int = 4096,
    depth: int = 128,
    seed: int = 1,
    processes: int = 1,
    registered: bool = False,
) -> FioResult:
    """Random direct reads of one block over all files for some seconds, any block as often as it comes;
    by so many processes, each with this depth; into ``registered`` buffers."""
    jobs = _run([
        "--name=random", f"--filename={names(paths)}", "--rw=randread", f"--bs={block_bytes}",
        f"--iodepth={depth}", "--readonly", "--norandommap", "--file_service_type=random", "--time_based",
        f"--runtime={seconds}", f"--randseed={seed}", "--allow_file_create=0", *_several(processes),
        *_registered(registered),
    ], folder(paths))  # fmt: skip
    return _result(jobs[0], "read")


def sequential_read(
    paths: Sequence[Path],
    seconds: float | None = None,
    block_bytes: int = 512 * 1024,
    depth: int = 32,
    processes: int = 1,
    registered: bool = False,
) -> FioResult:
    """Direct reads from the first to the last byte, file after file; once, or again and again for some
    seconds; by so many processes, each of all files; into ``registered`` buffers."""
    limits = [] if seconds is None else ["--time_based", f"--runtime={seconds}"]
    jobs = _run([
        "--name=sequential", f"--filename={names(paths)}", "--rw=read", f"--bs={block_bytes}",
        f"--iodepth={depth}", "--readonly", "--file_service_type=sequential", "--allow_file_create=0",
        *limits, *_several(processes), *_registered(registered),
    ], folder(paths))  # fmt: skip
    return _result(jobs[0], "read")


def sequential_write(
    path: Path, size_bytes: int, block_bytes: int = 512 * 1024, depth: int = 32
) -> FioResult:
    """Direct writes of a new file of so many bytes, synced at the end. The file stays."""
    path.unlink(missing_ok=True)
    jobs = _run([
        "--name=write", f"--filename={names([path])}", "--rw=write", f"--bs={block_bytes}",
        f"--iodepth={depth}", f"--size={size_bytes}", "--end_fsync=1",
    ], folder([path]))  # fmt: skip
    return _result(jobs[0], "write")


def read_beside_write(
    source: Path,
    read_bytes: int,
    target: Path,
    write_bytes: int,
    block_bytes: int = 512 * 1024,
    depth: int = 32,
) -> float:
    """Seconds for reading so many bytes of a file (again from its start at its end) while writing so many to
    a new one."""
    target.unlink(missing_ok=True)
    shared = [f"--bs={block_bytes}", f"--iodepth={depth}"]
    jobs = _run([
        *shared, "--name=read", f"--filename={names([source])}", "--rw=read", f"--io_size={read_bytes}",
        "--allow_file_create=0", "--name=write", f"--filename={os.path.relpath(target, folder([source]))}",
        "--rw=write", f"--size={write_bytes}", "--end_fsync=1",
    ], folder([source]))  # fmt: skip
    return float(max(job["job_runtime"] for job in jobs)) / 1e3
