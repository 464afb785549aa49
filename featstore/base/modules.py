"""Modules that others may have loaded, and that nothing here loads for a look at a type."""

from __future__ import annotations

import sys
from typing import Any


def loaded(name: str, holds: str) -> Any:
    """A module that is loaded as far as ``holds``, which stands near its end; else None. Another thread may
    be loading it now: nobody has made anything of what it does not have yet."""
    module = sys.modules.get(name)
    return module if hasattr(module, holds) else None
