"""Disks for tests: one that records what a pack does, one that fails at the N-th operation; and crash states
of a record.

The crash model (after ALICE, OSDI'14, and CrashMonkey, OSDI'18): a write is durable once its file has been
fsynced later, a name (create, rename, unlink, mkdir) once its directory has. Whatever is not durable may be
there or not, each on its own, and a write may be torn at a sector.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featstore.storage.disk import Disk, File

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Op:
    kind: str
    path: str
    offset: int = 0
    data: bytes = b""
    target: str = ""


class RecordingDisk(Disk):
    """The real disk, and a record of every operation in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self._lock = threading.Lock()

    def _note(self, kind: str, path: Path, **more) -> None:
        with self._lock:
            self.ops.append(Op(kind, str(path.relative_to(self.root)), **more))

    def mkdir(self, path):
        super().mkdir(path)
        self._note("mkdir", path)

    def create(self, path, *, keep=False, direct=False):
        existed = path.exists()
        file = super().create(path, keep=keep, direct=direct)
        if not existed:
            self._note("create", path)
        elif not keep:
            self._note("truncate", path, offset=0)
        return file

    def write(self, file, offset, data):
        copy = np.frombuffer(memoryview(data).cast("B"), np.uint8).tobytes()
        super().write(file, offset, data)
        self._note("write", file.path, offset=offset, data=copy)

    def allocate(self, file, size_bytes):
        before = os.fstat(file.descriptor).st_size
        super().allocate(file, size_bytes)
        if os.fstat(file.descriptor).st_size != before:  # it only ever grows
            self._note("truncate", file.path, offset=size_bytes)

    def truncate(self, file, size_bytes):
        super().truncate(file, size_bytes)
        self._note("truncate", file.path, offset=size_bytes)

    def fsync(self, file):
        super().fsync(file)
        self._note("fsync", file.path)

    def fsync_dir(self, path):
        super().fsync_dir(path)
        if path == self.root or self.root in path.parents:
            self._note("fsync_dir", path)

    def rename(self, source, target):
        super().rename(source, target)
        self._note("rename", source, target=str(target.relative_to(self.root)))

    def unlink(self, path):
        existed = path.exists()
        super().unlink(path)
        if existed:
            self._note("unlink", path)

    def rmtree(self, path, own):
        for entry in sorted(path.rglob("*")) if path.exists() else ():
            if entry.is_file():
                self._note("unlink", entry)
        return super().rmtree(path, own)


class Lost(OSError):
    """The process 'dies' here: nothing after it happens."""


class FailingDisk(Disk):
    """Fails at operation number ``at`` (from 0). With an errno, that operation fails with it and later ones
    work; without, it and everything after it raise Lost, as if the process had been killed."""

    def __init__(self, at: int, errno: int | None = None) -> None:
        self.left = at
        self.errno = errno
        self.dead = False
        self._lock = threading.Lock()

    def _step(self) -> None:
        with self._lock:
            if self.dead:
                raise Lost("dead")
            self.left -= 1
            if self.left >= 0 or self.errno == 0:
                return
            if self.errno is None:
                self.dead = True
                raise Lost("killed")
            code, self.errno = self.errno, 0
        raise OSError(code, "injected")

    def _wrap(self, path: Path, call, *args, **kwargs):
        from featstore.base.system import refusal

        try:
            self._step()
        except Lost:
            raise
        except OSError as error:
            raise refusal(error, path, "do an injected operation on") from error
        return call(*args, **kwargs)

    def mkdir(self, path):
        return self._wrap(path, super().mkdir, path)

    def create(self, path, *, keep=False, direct=False):
        return self._wrap(path, super().create, path, keep=keep, direct=direct)

    def write(self, file, offset, data):
        return self._wrap(file.path, super().write, file, offset, data)

    def allocate(self, file, size_bytes):
        return self._wrap(file.path, super().allocate, file, size_bytes)

    def truncate(self, file, size_bytes):
        return self._wrap(file.path, super().truncate, file, size_bytes)

    def fsync(self, file):
        return self._wrap(file.path, super().fsync, file)

    def fsync_dir(self, path):
        return self._wrap(path, super().fsync_dir, path)

    def rename(self, source, target):
        return self._wrap(target, super().rename, source, target)

    def unlink(self, path):
        return self._wrap(path, super().unlink, path)

    def rmtree(self, path, own):
        return self._wrap(path, super().rmtree, path, own)

    def close(self, file: File) -> None:
        super().close(file)


def _parent(path: str) -> str:
    return str(Path(path).parent)


def loose_ops(ops: list[Op]) -> list[int]:
    """Indices of the operations whose effect is not durable after the last one."""
    loose = []
    files: set[str] = set()  # names under which a file is fsynced later, seen from where the scan is
    folders: set[str] = set()
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if op.kind in ("write", "truncate"):
            durable = op.path in files
        elif op.kind in ("create", "rename", "unlink", "mkdir"):
            durable = _parent(op.target or op.path) in folders
        else:
            durable = True
        if not durable:
            loose.append(i)
        if op.kind == "fsync":
            files.add(op.path)
        elif op.kind == "fsync_dir":
            folders.add(op.path)
        elif op.kind == "rename":  # what has the old name before has the new one after
            (files.add if op.target in files else files.discard)(op.path)
    return loose[::-1]


def crash_states(ops: list[Op]) -> Iterator[tuple[str, list[Op]]]:
    """(label, operations that reached the disk) for every prefix, crossed with what of its loose end was lost
    or torn."""
    for n in range(len(ops) + 1):
        done = ops[:n]
        loose = loose_ops(done)
        yield f"{n}:all", done
        if not loose:
            continue
        yield f"{n}:none", [o for i, o in enumerate(done) if i not in loose]
        for i in loose:
            yield f"{n}:without {i}", [o for j, o in enumerate(done) if j != i]
            yield f"{n}:only {i}", [o for j, o in enumerate(done) if j not in loose or j == i]
            op = done[i]
            if op.kind == "write" and len(op.data) > SECTOR_BYTES:
                cut = len(op.data) // 2 // SECTOR_BYTES * SECTOR_BYTES or SECTOR_BYTES
                torn = Op("write", op.path, op.offset, op.data[:cut])
                yield f"{n}:torn {i}", [torn if j == i else o for j, o in enumerate(done)]


def materialise(ops: list[Op], root: Path) -> None:
    """Lay out under ``root`` what these operations leave behind. A write to a name that was never created is
    lost with it."""
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    identity: dict[str, int] = {}
    folders: set[str] = set()
    for op in ops:
        if op.kind == "mkdir":
            folders.add(op.path)
        elif op.kind == "create":
            names[op.path] = identity[op.path] = len(contents)
            contents[len(contents)] = bytearray()
        elif op.kind in ("write", "truncate"):
            file = names.get(op.path, identity.get(op.path))
            if file is None:
                continue
            data = contents[file]
            end = op.offset + len(op.data)
            if op.kind == "truncate":
                del data[end:]
            data.extend(bytes(max(0, end - len(data))))
            data[op.offset : end] = op.data if op.kind == "write" else data[op.offset : end]
        elif op.kind == "rename" and op.path in names:
            names[op.target] = identity[op.target] = names.pop(op.path)
        elif op.kind == "unlink":
            names.pop(op.path, None)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)

    def reachable(path: str) -> bool:
        return all(str(p) in folders or str(p) == "." for p in list(Path(path).parents))

    for folder in sorted(folders):
        if reachable(folder):
            (root / folder).mkdir(parents=True, exist_ok=True)
    for name, file in names.items():
        if reachable(name):
            (root / name).write_bytes(contents[file])
