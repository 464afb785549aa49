"""The state of the machine around a measurement: page cache, memory limits, memory that exists only once
touched, counters."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DROP = Path("/proc/sys/vm/drop_caches")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_CGROUP_V2 = Path("/sys/fs/cgroup")
#: A file is cold when no more than this share of its pages is in the page cache.
RESIDENT_MAX = 0.01
GATHER_PARTS = 64
#: An environment in which mini-batches that were freed are given back at once, so that processes hold what
#: they use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


@cache
def can_drop_caches() -> bool:
    """Whether this process may empty the page cache of the machine (root may)."""
    return os.access(_DROP, os.W_OK)


def drop_caches(paths: Sequence[Path]) -> None:
    """Get files out of the page cache: as root with everything else, otherwise only their own clean pages.

    Raises RuntimeError where they are still there afterwards, as with a file that some process has mapped.
    """
    if can_drop_caches():
        os.sync()
        _DROP.write_text("3")
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        share = resident_share(path)
        if share > RESIDENT_MAX:
            raise RuntimeError(
                f"{share:.0%} of {path.name} is still in the page cache: is it mapped, or being written?"
            )


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache (mincore)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        failed = mincore(view.ctypes.data, len(mapped), pages.ctypes.data)
        del view  # the mapping cannot be closed while it is looked at
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return float((pages & 1).mean())


def warm_cache(paths: Sequence[Path]) -> None:
    """Read the files into the page cache."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def gather_until(x: NDArray[Any], ids: NDArray[np.integer[Any]], end: float) -> tuple[NDArray[Any], float]:
    """Rows of an array, part by part until a time of ``time.perf_counter`` has come, and the share of ``ids``
    that these are: in little memory one mini-batch over a memory map may take minutes."""
    out = np.empty((len(ids), *x.shape[1:]), x.dtype)
    for low in range(0, len(ids), part := max(1, len(ids) // GATHER_PARTS)):
        high = min(low + part, len(ids))
        np.take(x, ids[low:high], axis=0, out=out[low:high], mode="clip")
        if high < len(ids) and time.perf_counter() > end:
            return out[:high], high / len(ids)
    return out, 1.0


def go_through(
    batches: Iterator[tuple[Any, Any]], seconds_max: float, step: Callable[[Any, Any], object]
) -> dict[str, Any]:
    """An epoch, or as much of it as the time allows: its seconds and mini-batches. What the iterator returns
    at its end is the share of a last mini-batch that there was no time for all of."""
    begin, count = time.perf_counter(), 0.0
    while time.perf_counter() - begin <= seconds_max:
        try:
            x, sample = next(batches)
        except StopIteration as over:
            count += over.value or 0.0
            break
        step(x, sample)
        count += 1
        del x, sample
    return {"seconds": time.perf_counter() - begin, "batches": count}


def touch_memory(size_bytes: int) -> None:
    """Touch and free memory, so that a virtual machine whose memory is backed on first touch has it backed
    before measuring."""
    with mmap.mmap(-1, size_bytes) as memory:
        for at in range(0, size_bytes, mmap.PAGESIZE):
            memory[at] = 1


def free_memory_bytes() -> int:
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))


def cpu_seconds() -> float:
    """User and system time of this process, all of its threads (those of io_uring's workers too)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def status_bytes(name: str) -> int:
    """A size of this process from /proc/self/status, such as VmHWM."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))


def process_io() -> dict[str, int]:
    """Bytes this process (with its threads) made the device read and write so far."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    values = {key: int(value) for key, value in pairs}
    return {"read_bytes": values["read_bytes"], "write_bytes": values["write_bytes"]}


def device_io(directory: Path) -> dict[str, int] | None:
    """Bytes that everything on the machine made the device under a directory read and write; None where it is
    not known."""
    number = os.stat(directory).st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not stat.exists():
        return None
    fields = stat.read_text().split()
    return {"read_bytes": int(fields[2]) * 512, "write_bytes": int(fields[6]) * 512}


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup: where its process list is, and which version it is."""

    directory: Path
    version: int

    def peak_bytes(self) -> int:
        """The most that its processes were charged with so far, page cache included."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.directory / name).read_text())

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command, run inside the group."""
        return ["/bin/sh", "-c", f'echo $$ > "{self.directory}/cgroup.procs" && exec "$@"', "sh", *command]


@contextlib.contextmanager
def compressed_ram(size_bytes: int, at: Path) -> Iterator[Path]:
    """A file system at ``at`` on a block device of compressed RAM (zram), which is faster than one core can
    drive. Raises PermissionError where none can be made."""
    try:
        number = Path("/sys/class/zram-control/hot_add").read_text().strip()
    except OSError as error:
        raise PermissionError(f"no zram device can be made ({error.strerror}); run as root") from error
    device, settings = Path(f"/dev/zram{number}"), Path(f"/sys/block/zram{number}")
    at.mkdir(exist_ok=True)
    try:
        (settings / "disksize").write_text(str(size_bytes))
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        subprocess.run(["mount", str(device), str(at)], check=True)
        try:
            yield at
        finally:
            subprocess.run(["umount", str(at)], check=True)
    finally:
        (settings / "reset").write_text("1")
        Path("/sys/class/zram-control/hot_remove").write_text(number)
        at.rmdir()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A memory cgroup with a limit, page cache included. Raises PermissionError where none can be made."""
    v1 = (_CGROUP_V1 / "memory.limit_in_bytes").exists()
    parent, limit_file = (_CGROUP_V1, "memory.limit_in_bytes") if v1 else (_CGROUP_V2, "memory.max")
    directory = parent / f"featstore-bench-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        raise PermissionError(
            f"no memory cgroup can be made in {parent} ({error.strerror}); run as root"
        ) from error
    try:
        if not (directory / limit_file).exists():
            raise PermissionError(f"{parent} has no memory controller; add it to cgroup.subtree_control")
        (directory / limit_file).write_text(str(limit_bytes))
        yield MemoryGroup(directory, 1 if v1 else 2)
    finally:
        directory.rmdir()


def run_child(
    script: Path,
    arguments: dict[str, Any],
    group: MemoryGroup | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a script of this directory in a fresh process; it is given and prints one JSON object."""
    command = [sys.executable, str(script), json.dumps(arguments)]
    done = subprocess.run(
        command if group is None else group.wrap(command), env=os.environ | (environment or {}),
        stdout=subprocess.PIPE, text=True, check=True, timeout=3600,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result
