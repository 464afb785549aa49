"""Put the results into the documentation: rewrites the tables of ``docs/performance.md`` between their
markers.

    python benchmarks/report.py            # from benchmarks/results/*.json
    python benchmarks/report.py --check    # exit status 1 where the page or a plot is not up to date

``<!-- NAME:claims -->`` ... ``<!-- end -->`` holds a result's claims, ``NAME:tables`` all of its other tables
and notes, ``machine`` the machine, and ``summary`` what was missed. Every result must come from the same
machine, but those for an accelerator or for many cores, whose claims name theirs. Plots lie beside the page,
in ``plots``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
from harness import RESULTS, ROOT, SCHEMA
from plots import plot_of_table
from tables_text import all_cells, claim_cells, markdown

from featstore.units import format_bytes

PAGE = ROOT / "docs" / "performance.md"
#: Files in ``plots``: the result and the table they are made of, the title, what is on the axes.
PLOTS = {
    "compiled_memory.svg": (
        "compiled",
        "An epoch against memory",
        "An epoch in a memory cgroup",
        "memory beyond the bare process, of the features",
        "seconds",
    ),
    "compiled_disk.svg": (
        "compiled",
        "An epoch against disk",
        "An epoch in the bare process + 10 % of the features",
        "disk for packed rows, in tables",
        "seconds",
    ),
}
#: Claims that stand at the top of the page, by benchmark.
HEADLINES = {
    ("gather", "rows/s of uring over fio's reads/s"),
    ("gather", "uring over np.memmap, cold"),
    ("fast_device", "random rows/s over fio's reads/s, its best number of processes"),
    ("modes", "compiled: epoch over that with everything in memory"),
    ("modes", "online, random order: epoch over that with everything in memory"),
}
_BLOCK = re.compile(r"<!-- (?P<what>[a-z_]+(?::[a-z]+)?) -->\n.*?<!-- end -->", re.DOTALL)
_SAME = ("cpu", "cores", "memory_bytes", "disk")


def load(directory: Path) -> dict[str, dict[str, Any]]:
    """Results by name. Raises ClickException for one of another schema."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("schema") != SCHEMA:
            raise click.ClickException(
                f"{path} has schema {result.get('schema')}, not {SCHEMA}; run that benchmark again"
            )
        found[result["benchmark"]] = result
    return found


def summary(results: dict[str, dict[str, Any]]) -> str:
    """A few ratios that say most, and every claim that is not met."""
    head, missed = [], []
    for name, result in results.items():
        _, rows = claim_cells(result)
        head += [[name, *row[:2]] for row in rows if (name, row[0]) in HEADLINES]
        missed += [[name, *row[:3]] for row in rows if row[3] == "NOT MET"]
    count = sum(claim["met"] is not None for result in results.values() for claim in result["claims"])
    texts = ["Ratios that say most:", markdown(["benchmark", "claim", "measured"], head)] if head else []
    texts.append(f"Not met, {len(missed)} of {count} claims with a bar (that of the run):")
    return "\n\n".join([*texts, markdown(["benchmark", "claim", "measured", "bar"], missed)])


def block(what: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of one block."""
    if what == "machine":
        return machine(results)
    if what == "summary":
        return summary(results)
    name, _, part = what.partition(":")
    if name not in results:
        return f"*Not measured yet: `python benchmarks/run.py {name}`.*"
    result = results[name]
    if part == "claims":
        commit = result["commit"][:12] + "+" * result["commit"].endswith("+")
        load = result["machine"].get("load_average")
        busy = "" if load is None else f", load {load:.1f} when it began"
        source = f"`{result['command']}`, {result['date'][:10]}, commit `{commit}`{busy}"
        if accelerator := result["parameters"].get("accelerator"):
            source += f". {accelerator} beside {described(result['machine'])}"
        elif _is_of_its_own_machine(result):
            source += f". On {described(result['machine'])}"
        return f"{source}\n\n{markdown(*claim_cells(result))}"
    texts = [f"{title}:\n\n{markdown(*cells)}" for title, cells in all_cells(result) if title != "Claims"]
    notes = "\n".join(f"- {text}" for text in result["notes"])
    return "\n\n".join([*texts, *([notes] if notes else [])])


def _alike(value: Any) -> Any:
    """Sizes of memory to a mebibyte: what the kernel keeps for itself differs from start to start."""
    return value >> 20 if isinstance(value, int) else value


def _is_of_its_own_machine(result: dict[str, Any]) -> bool:
    return bool({"accelerator", "machine_cores"} & result["parameters"].keys())


def machine(results: dict[str, dict[str, Any]]) -> str:
    """One paragraph. Raises ClickException where the results come from different machines."""
    if not results:
        return "*Nothing has been measured yet.*"
    results = {name: r for name, r in results.items() if not _is_of_its_own_machine(r)}
    machines = [r["machine"] for r in results.values()]
    on_disk = [r["machine"] for r in results.values() if not r["parameters"].get("zram")] or machines
    for key in _SAME:  # compressed RAM is a device of its own
        among = on_disk if key == "disk" else machines
        if any(_alike(m[key]) != _alike(among[0][key]) for m in among):
            raise click.ClickException(
                f"the results come from machines that differ in {key}; run all benchmarks on one"
            )
    kernels = " and ".join(sorted({m["kernel"] for m in machines}))
    return described(on_disk[0] | {"kernel": kernels})


def described(one: dict[str, Any]) -> str:
    """A machine, in a sentence or two."""
    disk = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in one["disk"].items() if value)
    packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items())
    virtual = " (a virtual machine)" if one["virtual"] else ""
    return (
        f"{one['cores']} cores of {one['cpu']}{virtual}, {format_bytes(one['memory_bytes'])} of "
        f"memory, Linux {one['kernel']}; {disk}. {one['fio'] or 'no fio'}, Python {one['python']}, "
        f"{packages}."
    )


def plots(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The plots that results have tables for, by file name."""
    found = {}
    for file, (name, title, *texts) in PLOTS.items():
        for table in results.get(name, {}).get("tables", []):
            if table["title"] == title:
                found[file] = plot_of_table(table, *texts)
    return found


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail where the page differs.")
@click.option("--results", "directory", default=RESULTS, type=click.Path(path_type=Path, file_okay=False))
@click.option("--page", default=PAGE, type=click.Path(path_type=Path, dir_okay=False))
def main(check: bool, directory: Path, page: Path) -> None:
    """Rewrite the tables and plots of docs/performance.md from the results."""
    results = load(directory)
    old = page.read_text()
    new = _BLOCK.sub(lambda m: f"<!-- {m['what']} -->\n{block(m['what'], results)}\n<!-- end -->", old)
    drawn = {page.parent / "plots" / file: text for file, text in plots(results).items()}
    stale = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    if check and (new != old or stale):
        names = ", ".join(p.name for p in [*([page] if new != old else []), *stale])
        raise click.ClickException(f"{names}: not up to date; run python benchmarks/report.py")
    if not check:
        page.write_text(new)
        for path in stale:
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn[path])


if __name__ == "__main__":
    main()
