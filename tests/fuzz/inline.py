"""What the library does in threads, done at once in the thread that asks: where tables have a few pages,
handing work over costs several times what the work does.

Engines read with the kernel of the threads engine, where a lane is started; executors run what they are
given. Where one thread goes ahead of another (prefetching) there are threads as ever, and so where
:data:`threads` is set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

#: Whether what is opened now has its threads, and ``engine="auto"`` its ring.
threads = False


class _Inline:
    """An executor without threads."""

    _max_workers = 1
    _threads: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._closed = False

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _pool(count: int, thread_name_prefix: str = "") -> Any:
    return ThreadPoolExecutor(count, thread_name_prefix) if threads else _Inline()


def install() -> None:
    """Put executors and engines without threads into every module of featstore that makes them."""
    import featstore.engine as engines

    choose = engines.choose

    def choose_here(wanted: str = "auto", *more: Any, **named: Any) -> engines.EngineChoice:
        return choose("threads" if wanted == "auto" and not threads else wanted, *more, **named)

    from featstore.reader.reader import Reader

    load = Reader._load_kernels

    def load_kernels(reader: Reader) -> None:
        if threads:  # else they are loaded, and nobody forks
            load(reader)

    Reader._load_kernels = load_kernels  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("featstore"):
            if hasattr(module, "ThreadPoolExecutor"):
                module.ThreadPoolExecutor = _pool  # type: ignore[attr-defined]
            if getattr(module, "choose", None) is choose:
                module.choose = choose_here  # type: ignore[attr-defined]
