"""``featstore.verify``."""

from __future__ import annotations

import os
from collections.abc import Callable

from featstore.arguments import as_callback, as_path
from featstore.base.progress import watched
from featstore.engine.files import Access
from featstore.scrub import store as stores
from featstore.scrub import trace as traces
from featstore.scrub.report import Progress, TraceReport, VerifyReport
from featstore.trace.trace import is_trace

__all__ = ["verify"]


@watched
def verify(
    path: str | os.PathLike[str],
    *,
    progress: bool | Callable[[Progress], None] | None = None,
    access: Access = "direct",
) -> VerifyReport | TraceReport:
    """Read a whole store, compiled trace or trace, and report everything that is not as it was written.

    Args:
        path: of the store or trace. It is not written to.
        progress: called now and then with a :class:`featstore.scrub.report.Progress`; True for a line on
            standard error, see :func:`featstore.pack`.
        access: ``"direct"`` to read past the page cache where the file system allows it, or ``"buffered"``.

    Raises as :func:`featstore.scrub.store.verify` and :func:`featstore.scrub.trace.verify_trace` do where
    there is nothing to verify against. Whatever is wrong beyond that is in the report.
    """
    path, progress = as_path(path, "path"), as_callback(progress, "progress")
    if is_trace(path):
        return traces.verify_trace(path, progress=progress, access=access)
    return stores.verify(path, progress=progress, access=access)
