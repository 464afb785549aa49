"""Compiled traces: bytes against the lower bound, placement under a disk limit, packing, training, and an
epoch in little memory.

    python benchmarks/compiled.py --dir /a/directory/on/the/ssd
    python benchmarks/compiled.py --part bytes --part packing       # the results of the other parts are kept

A power-law graph whose mini-batches touch about 3 % of its nodes (those of the last part, 0.4 %), sampled
once and recorded. *bytes*: what an epoch reads over what Belady's MIN must read, and over DiskGNN's design
(the most frequent rows for good, all others packed); its speed against fio on the same files. *disk*: the
same under limits of 2, 3 and 5 tables, against DiskGNN's placement, forecast and measured, and against brute
force on a small case. *packing*: against packing each mini-batch on its own, against fio, and its memory.
*training*: losses against a run in memory, the loop against its slowest stage, and episodes that are sampled
and packed while others train. *end*: epochs in a memory cgroup over np.memmap, the online reader, DiskGNN's
design and ours, against memory and disk.

Bytes read are the kernel's count for the process. All reads are direct, and the page cache is dropped before
each pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from compiled_data import EDGES_A_NODE, FANOUTS, NARROW, WIDE, Data
from harness import RESULTS, Report, Settings, note, shared_options
from system import free_memory_bytes, touch_memory

PARTS = ("bytes", "disk", "packing", "training", "end")


@dataclass
class PartsReport(Report):
    """A report in parts, each measured by itself; the file keeps those that are not measured this time."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, part: Report, points: dict[str, Any]) -> None:
        """Take a part's results in."""
        found = part.to_dict()
        kept = {key: found[key] for key in ("claims", "series", "tables", "notes", "date", "commit")}
        self.parts[name] = kept | {"points": points}

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        for key in ("claims", "series", "tables", "notes"):
            found[key] = [
                one for name in PARTS if name in self.parts for one in self.parts[name].get(key, [])
            ]
        command = found["command"].split()
        while "--part" in command:
            at = command.index("--part")
            del command[at : at + 2]
        return found | {
            "command": " ".join(word for word in command if word != "--resume"),
            "parts": self.parts,
        }

    def keep(self, out: Path | None) -> None:
        """Write the file."""
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def measure(
    name: str,
    report: PartsReport,
    data: Data,
    settings: Settings,
    folder: Path | None,
    seconds: float,
    out: Path | None,
    resume: bool,
) -> None:
    """Measure one part and write what is known by then."""
    import compiled_storage
    import compiled_training
    from tables_text import print_result

    part = Report("compiled", name, {}, settings.workspace)
    points: dict[str, Any] = report.parts.get(name, {}).get("points", {}) if resume else {}

    def save() -> None:
        report.parts.setdefault(name, {})["points"] = points
        report.keep(out)

    parts: dict[str, Callable[[], None]] = {
        "bytes": lambda: compiled_storage.measure_bytes(part, data, settings, folder),
        "disk": lambda: compiled_storage.UnderLimits(data, settings, points, save).measure(part),
        "packing": lambda: compiled_storage.measure_packing(part, data, settings),
        "training": lambda: compiled_training.measure_training(part, data, settings),
        "end": lambda: compiled_training.measure_end(part, data, settings, points, seconds, save),
    }
    note(f"part {name}")
    parts[name]()
    report.add(name, part, points)
    report.keep(out)
    print_result(part.to_dict())


@click.command()
@click.option("--part", "names", multiple=True, type=click.Choice(PARTS), help="[default: all of them]")
@click.option("--resume", is_flag=True, help="Of the parts disk and end, keep what has been measured.")
@click.option("--data", "folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="A folder with ogbn_arxiv_tape40.npz, to count its bytes as well.")  # fmt: skip
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    help="Time limit of an epoch of np.memmap, and of the online reader.",
)
@shared_options(size="1GiB", quick_size="64MiB", rounds=3)
def main(
    settings: Settings, names: tuple[str, ...], resume: bool, folder: Path | None, seconds: float
) -> None:
    """Compiled traces against MIN, fio, DiskGNN's design, the online reader and np.memmap."""
    data = Data(settings.workspace, settings.size_bytes // 512, settings.quick)
    touch_memory(min(free_memory_bytes() // 2, 4 << 30))
    report = PartsReport("compiled", "Compiled traces", {
        "nodes": data.nodes, "edges_a_node": EDGES_A_NODE, "row_bytes": data.row_bytes,
        "fanouts": list(FANOUTS), "rounds": settings.rounds, "seeds": data.nodes // WIDE,
        "seeds_end": data.nodes // NARROW, "seconds": seconds, "order": "ldg",
    }, settings.workspace)  # fmt: skip
    out = settings.out or (None if settings.quick else RESULTS / "compiled.json")
    if out is not None and out.exists():
        before = json.loads(out.read_text())
        if before["parameters"] == report.parameters:
            report.parts = before["parts"]
    try:
        for name in names or PARTS:
            measure(name, report, data, settings, folder, 2.0 if settings.quick else seconds, out, resume)
    finally:
        data.close()


if __name__ == "__main__":
    main()
