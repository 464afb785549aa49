"""What the library tells of itself: the logger ``featstore`` of the standard library's ``logging``.

It says what was decided, at level INFO: a loader's mode, a reader's engine; and at level DEBUG each piece of
a request, with its reads and its time. Nothing is printed unless the
program configures logging, or the environment has ``FEATSTORE_LOG=info``, which spawned processes inherit.
"""

from __future__ import annotations

import logging

from featstore.base.environment import variable
from featstore.errors import ArgumentError

LOG = logging.getLogger("featstore")
LOG.addHandler(logging.NullHandler())
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(said: str) -> None:
    """Print what the logger is told, on standard error, from a level on; nothing for the empty text."""
    if not said:
        return
    if said.lower() not in _LEVELS:
        raise ArgumentError(f"FEATSTORE_LOG={said}: it is one of {', '.join(_LEVELS)}")
    printing = logging.StreamHandler()
    printing.setFormatter(logging.Formatter("%(asctime)s featstore[%(process)d] %(levelname)s: %(message)s"))
    LOG.addHandler(printing)
    LOG.setLevel(_LEVELS[said.lower()])
    LOG.propagate = False  # or a program that configures logging, too, has each line twice


configure(variable("FEATSTORE_LOG"))
