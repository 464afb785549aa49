"""Variables of the environment that the library reads. Spawned processes inherit them."""

from __future__ import annotations

import os
from difflib import get_close_matches

from featstore.base.warning import warn

_PREFIX = "FEATSTORE_"
#: What each one says.
VARIABLES = {
    "FEATSTORE_CACHE": "folder of what `featstore calibrate` measures",
    "FEATSTORE_ENGINE": "what reads where `engine=` is not given, or is `auto`",
    "FEATSTORE_LOG": "print what the library decides: `debug`, `info`, `warning` or `error`",
    "FEATSTORE_MEMORY": "the budget of readers, loaders, arrays and samplers where `memory=` is not given",
}


class Unsaid(str):
    """A default in place of which :data:`VARIABLES` may say something: what is given is told from it."""

    __slots__ = ()


#: Of ``memory=``; see :func:`featstore.reader.options.as_memory`.
MEMORY = Unsaid("1GiB")


def variable(name: str) -> str:
    """The text of one of :data:`VARIABLES`; empty where it is not set."""
    assert name in VARIABLES
    return os.environ.get(name, "")


def warn_of_unknown() -> None:
    """Name what begins like ours and is none: it would have no effect."""
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, 1, cutoff=0.85)
            hint = f"is {near[0]} meant?" if near else f"there are {', '.join(VARIABLES)}"
            warn(f"the environment has {name}, which featstore does not read: {hint}")


warn_of_unknown()
