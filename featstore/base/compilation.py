"""Compiled kernels: what numba keeps on disk belongs to the sources of the whole package.

numba keeps a kernel's machine code beside the module that defines it and looks at that module alone, though
the code holds everything that was inlined from other modules: after a change there (a pull into an editable
installation), the old code would go on running. So the names of these files carry a digest of all sources of
the package, and files of other digests are removed when a kernel is saved. What was compiled by a process
whose sources have changed meanwhile is not kept: nobody knows of which state it is.

Of processes that want the same kernel at once one compiles it, the others wait for what it keeps
(:mod:`featstore.base.turns`).

Machine code that cannot be kept is compiled in each process anew: that is slow and nothing else, so it is a
warning.
"""

from __future__ import annotations

import gc
import glob
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import rtsys

from featstore.base.turns import end_turn, take_turn
from featstore.base.warning import warn

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_announced = False
_warned = False


def _sources() -> list[str]:
    """Paths of the package's modules, sorted."""
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(_PACKAGE)
        for name in names
        if name.endswith(".py")
    ]
    return sorted(found)


def _times() -> list[tuple[str, int, int]]:
    """What changes when a source does: (path, mtime in ns, bytes) of each."""
    states = [(path, os.stat(path)) for path in _sources()]
    return [(path, state.st_mtime_ns, state.st_size) for path, state in states]


def _unchanged() -> bool:
    """Whether the sources are those that this process began with."""
    try:
        return _times() == _TIMES
    except FileNotFoundError:  # one has gone between listing and looking
        return False


def _digest() -> str:
    """Twelve hexadecimal digits of the SHA-256 over paths and contents of all sources."""
    whole = hashlib.sha256()
    for path in _sources():
        with open(path, "rb") as file:
            content = file.read()
        whole.update(f"{os.path.relpath(path, _PACKAGE)}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()[:12]


# Before any module with kernels is loaded: one that changes from here on has another digest, never this one.
_TIMES = _times()
_DIGEST = _digest()


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}-{_DIGEST}"


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel, in files whose names carry the digest of the package."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._load(sig, target_context)
        if found is None:
            with suppress(OSError):  # without locks each compiles it
                if take_turn(self.cache_path, self._turn):
                    found = self._load(sig, target_context)
        return found

    def compiled(self) -> None:
        """No other process has to wait any more."""
        with suppress(OSError):
            end_turn(self.cache_path, self._turn)

    @property
    def _turn(self) -> str:
        return f"{self._py_func.__module__}.{self._py_func.__qualname__}"

    def _load(self, sig: Any, target_context: Any) -> Any:
        """What is kept, or None. numba's own way has all loaded first that a compiler knows, which takes
        longer than most programs take to load their kernels: these need the runtime alone. What is then
        compiled all the same has it loaded by itself."""
        try:
            rtsys.initialize(target_context)
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        # a bad disk, or a write that was cut off
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _warn(f"cannot use the compiled kernels in {self.cache_path} ({error!r})")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            if not _unchanged():
                return
            super().save_overload(sig, data)
            self._remove_others()
        except OSError as error:
            _warn(f"cannot keep compiled kernels in {self.cache_path} ({error})")

    def _remove_others(self) -> None:
        """Remove what is kept of this kernel for other states of the sources."""
        function = self._py_func
        stem = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}-"
        for path in glob.glob(os.path.join(glob.escape(self.cache_path), f"{glob.escape(stem)}*.nb[ic]")):
            if f"-{_DIGEST}." not in os.path.basename(path):
                with suppress(FileNotFoundError):  # another process does the same
                    os.unlink(path)


def _warn(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn(
            f"{what}: each process compiles them anew, which takes some seconds; set NUMBA_CACHE_DIR "
            "to a directory that can be written and has room",
        )


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit``; with ``cache``, machine code is kept on disk for exactly these sources of the
    package."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(**options)(function)
        compiled = isinstance(kernel, Dispatcher)  # NUMBA_DISABLE_JIT gives the function itself
        if cache and compiled:
            try:
                _keep(kernel, _Cache(function))
            except RuntimeError as error:  # of all places where numba may keep it, none can be written
                _warn(f"compiled kernels cannot be kept ({error})")
        return kernel

    return decorate


def _keep(kernel: Any, cache: _Cache) -> None:
    """Have a kernel's machine code kept, and turns end however compiling did."""
    kernel._cache, compile_it = cache, kernel.compile

    def compile_in_turn(signature: Any) -> Any:
        try:
            with _no_collections():
                return compile_it(signature)
        finally:
            cache.compiled()

    kernel.compile = compile_in_turn


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage is looked for meanwhile: numba makes many objects that refer to each other, hardly any of
    them garbage, and looking takes about a fifth of the time of compiling."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def announce_compilation(kernel: Any) -> None:
    """Say on stderr, once a process, when the kernels, of which this is one, are not on disk yet: compiling
    them takes some seconds."""
    global _announced
    if _announced or _compiled(kernel):
        return
    _announced = True
    print(
        "featstore: compiling its kernels for this processor; this happens once and takes some seconds",
        file=sys.stderr,
    )


def _compiled(kernel: Any) -> bool:
    """Whether numba has a compiled form of a kernel in memory or on disk."""
    folder = kernel._cache.cache_path
    prefix = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.__name__}-"
    return bool(kernel.signatures) or (
        folder is not None
        and os.path.isdir(folder)
        and any(name.startswith(prefix) and f"-{_DIGEST}." in name for name in os.listdir(folder))
    )
