"""What a loader has counted, for what draws curves: flat names and numbers, and OpenMetrics text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from featstore.engine.counters import LATENCY_BUCKETS, latency_edge
from featstore.errors import ArgumentError

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
#: Of a mapping of a report, the label that its names become.
_LABELS = {"seconds": "stage", "row_bytes": "source", "buffers": "table", "devices": "table"}
_LATENCIES, _EDGE = "latencies", "le"  # of a report; the label of a histogram's buckets
#: What may fall; all else only grows.
_GAUGES = ("hit_rate", "kept_share", "padded", "dropped")


def counters(facts: Mapping[str, Any]) -> dict[str, float]:
    """See :meth:`featstore.loaders.report.LoaderReport.counters`."""
    return {"/".join(path): value for path, value in _flat((), facts)}


def openmetrics(facts: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """See :meth:`featstore.loaders.report.LoaderReport.openmetrics`."""
    taken = sorted({*_LABELS.values(), _EDGE})
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name in taken or not isinstance(value, str):
            raise ArgumentError(
                f"a label is a name of letters, digits and _ with a text, and none of "
                f"{', '.join(taken)}: {name!r} is {value!r}"
            )
    families: dict[str, list[str]] = {}
    single = {name: value for name, value in facts.items() if name != _LATENCIES}
    for (first, *rest), number in _flat((), single):
        name, of = f"featstore_loader_{'_'.join((first, *rest[1:]))}", dict(labels)
        if rest:
            of[_LABELS[first]] = rest[0]
        sample = name if first in _GAUGES else f"{name}_total"
        families.setdefault(name, []).append(f"{sample}{_told(of)} {number!r}")
    lines = []
    for name, samples in families.items():
        kind = "gauge" if name.removeprefix("featstore_loader_") in _GAUGES else "counter"
        lines += [f"# TYPE {name} {kind}", *samples]
    if _LATENCIES in facts:
        lines += _histogram("featstore_loader_read_latency_seconds", facts[_LATENCIES], labels)
    return "\n".join([*lines, "# EOF", ""])


def _histogram(name: str, reads: Mapping[float, int], labels: Mapping[str, str]) -> Iterator[str]:
    """Reads by the upper edge of what they took, in microseconds, as a histogram in seconds. Its buckets
    are the same in every report, so that rates of them can be taken; it has no sum, and hence no count,
    because only buckets are counted."""
    yield f"# TYPE {name} histogram"
    yield f"# UNIT {name} seconds"
    for bucket in range(LATENCY_BUCKETS - 1):  # the last one has whatever took longer
        edge = latency_edge(bucket)
        below = sum(count for other, count in reads.items() if other <= edge)
        yield f"{name}_bucket{_told({**labels, _EDGE: repr(edge / 1e6)})} {below}"
    yield f"{name}_bucket{_told({**labels, _EDGE: '+Inf'})} {sum(reads.values())}"


def _told(labels: Mapping[str, str]) -> str:
    """Labels as they stand behind a name."""
    return "{" + ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items()) + "}"


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
