"""What a loader has counted, for what draws curves: flat names and numbers, and OpenMetrics text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from featstore.errors import ArgumentError

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
#: Of a mapping of a report, the label that its names become.
_LABELS = {"seconds": "stage", "row_bytes": "source", "buffers": "table", "devices": "table"}
#: What may fall; all else only grows.
_GAUGES = ("hit_rate", "kept_share")


def counters(facts: Mapping[str, Any]) -> dict[str, float]:
    """See :meth:`featstore.loaders.report.LoaderReport.counters`."""
    return {"/".join(path): value for path, value in _flat((), facts)}


def openmetrics(facts: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """See :meth:`featstore.loaders.report.LoaderReport.openmetrics`."""
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name in _LABELS.values() or not isinstance(value, str):
            raise ArgumentError(
                f"a label is a name of letters, digits and _ with a text, and none of "
                f"{', '.join(sorted({*_LABELS.values()}))}: {name!r} is {value!r}"
            )
    families: dict[str, list[str]] = {}
    for (first, *rest), number in _flat((), facts):
        name, of = f"featstore_loader_{'_'.join((first, *rest[1:]))}", dict(labels)
        if rest:
            of[_LABELS[first]] = rest[0]
        told = ",".join(f'{key}="{_escaped(text)}"' for key, text in of.items())
        sample = name if first in _GAUGES else f"{name}_total"
        families.setdefault(name, []).append(f"{sample}{{{told}}} {number!r}")
    lines = []
    for name, samples in families.items():
        kind = "gauge" if name.removeprefix("featstore_loader_") in _GAUGES else "counter"
        lines += [f"# TYPE {name} {kind}", *samples]
    return "\n".join([*lines, "# EOF", ""])


def _flat(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat((*path, str(name)), one)
    elif isinstance(value, int | float):
        yield path, float(value) if isinstance(value, float) else int(value)


def _escaped(text: str) -> str:
    """A label's value, as OpenMetrics writes it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
