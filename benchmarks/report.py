"""Put the results into the documentation: rewrites the tables of ``docs/performance.md`` between their markers.

    python benchmarks/report.py            # from benchmarks/results/*.json
    python benchmarks/report.py --check    # exit status 1 where the page is not up to date

``<!-- NAME:claims -->`` ... ``<!-- end -->`` holds a result's claims, ``NAME:tables`` all of its other tables and notes, and
``machine`` the machine; every result must come from the same one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
from harness import RESULTS, ROOT, SCHEMA
from tables_text import all_cells, claim_cells, markdown

from featstore.units import format_bytes

PAGE = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"<!-- (?P<what>[a-z_]+(?::[a-z]+)?) -->\n.*?<!-- end -->", re.DOTALL)
_SAME = ("cpu", "cores", "memory_bytes", "kernel", "disk")


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


def block(what: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of one block."""
    if what == "machine":
        return machine(results)
    name, _, part = what.partition(":")
    if name not in results:
        return f"*Not measured yet: `python benchmarks/run.py {name}`.*"
    result = results[name]
    if part == "claims":
        source = f"`{result['command']}`, {result['date'][:10]}, commit `{result['commit'][:12]}`"
        return f"{source}\n\n{markdown(*claim_cells(result))}"
    texts = [f"{title}:\n\n{markdown(*cells)}" for title, cells in all_cells(result) if title != "Claims"]
    notes = "\n".join(f"- {text}" for text in result["notes"])
    return "\n\n".join([*texts, *([notes] if notes else [])])


def machine(results: dict[str, dict[str, Any]]) -> str:
    """One paragraph. Raises ClickException where the results come from different machines."""
    if not results:
        return "*Nothing has been measured yet.*"
    machines = [r["machine"] for r in results.values()]
    for key in _SAME:
        if any(m[key] != machines[0][key] for m in machines):
            raise click.ClickException(
                f"the results come from machines that differ in {key}; run all benchmarks on one"
            )
    one = machines[0]
    disk = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in one["disk"].items() if value)
    packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items())
    virtual = " (a virtual machine)" if one["virtual"] else ""
    return (
        f"{one['cores']} cores of {one['cpu']}{virtual}, {format_bytes(one['memory_bytes'])} of memory, Linux {one['kernel']}; {disk}. "
        f"{one['fio'] or 'no fio'}, Python {one['python']}, {packages}."
    )


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail where the page differs.")
@click.option("--results", "directory", default=RESULTS, type=click.Path(path_type=Path, file_okay=False))
@click.option("--page", default=PAGE, type=click.Path(path_type=Path, dir_okay=False))
def main(check: bool, directory: Path, page: Path) -> None:
    """Rewrite the tables of docs/performance.md from the results."""
    results = load(directory)
    old = page.read_text()
    new = _BLOCK.sub(lambda m: f"<!-- {m['what']} -->\n{block(m['what'], results)}\n<!-- end -->", old)
    if check and new != old:
        raise click.ClickException(f"{page.name} is not up to date; run python benchmarks/report.py")
    if not check:
        page.write_text(new)


if __name__ == "__main__":
    main()
