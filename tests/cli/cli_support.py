"""What the tests of the command share beside fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

ROWS, COLUMNS = 3000, 16

#: What the JSON of `inspect` and of `pack` has alike.
STORE_KEYS = {
    "schema", "store", "uuid", "format_version", "generation", "tables", "graphs", "arrays", "files",
    "read_only_because", "provenance", "family", "keys",
}  # fmt: skip

Call = Callable[..., Result]


def parsed(result: Result) -> dict[str, Any]:
    """The JSON on stdout: all of it, one object."""
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data
