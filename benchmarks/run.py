"""Run benchmarks one after the other and print their tables.

    python benchmarks/run.py --dir /a/directory/on/the/ssd            # all of them
    python benchmarks/run.py --quick gather tier                      # some, small: do they work?
    python benchmarks/run.py --dir /a/directory --data FOLDER        # those on real graphs, too: hours

Each writes ``benchmarks/results/NAME.json``; ``python benchmarks/report.py`` puts these into
``docs/performance.md``. They share their tables, which are removed at the end. The exit status is 1 where a
benchmark failed, not where a bar was missed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
from harness import HERE, note

NAMES = (
    "gather",
    "dense",
    "tier",
    "packing",
    "order_quality",
    "mega",
    "sampling",
    "compiled",
    "compiled_small",
    "policies",
    "online",
    "online_workers",
    "modes",
    "loader_costs",
    "hosts",
    "hosts_memory",
    "hosts_sampling",
    "row_sizes",
    "tune",
)
#: On real graphs, with labels, of a folder that each of them describes.
ON_GRAPHS = ("hit_rates", "order_accuracy", "hosts_accuracy", "mega_accuracy", "replay_accuracy", "pyg")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice((*NAMES, *ON_GRAPHS)))
@click.option(
    "--dir",
    "directory",
    default=".",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="A directory on the device to measure.",
)
@click.option("--size", help="Size of the tables, the same for all. [default: each benchmark's own]")
@click.option("--rounds", type=click.IntRange(1), help="[default: each benchmark's own]")
@click.option("--quick", is_flag=True, help="Small and short; writes no results.")
@click.option("--keep", is_flag=True, help="Leave the tables.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A folder of real graphs, for those benchmarks that are on such; without it they are left out.",
)
def main(
    names: tuple[str, ...], directory: Path, size: str | None, rounds: int | None, quick: bool, keep: bool,
    data: Path | None,
) -> None:  # fmt: skip
    """Run all benchmarks, or those NAMEd."""
    options = ["--dir", str(directory), "--keep", *(["--quick"] if quick else [])]
    options += [*(["--size", size] if size else []), *(["--rounds", str(rounds)] if rounds else [])]
    failed = []
    if data is None and set(names) & set(ON_GRAPHS):
        raise click.UsageError(f"{', '.join(ON_GRAPHS)} need --data")
    for name in names or (*NAMES, *(ON_GRAPHS if data is not None else ())):
        begin = time.perf_counter()
        given = ["--data", str(data)] if name in ON_GRAPHS else []
        command = [sys.executable, str(HERE / f"{name}.py"), *options, *given]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        note(f"{name}: {time.perf_counter() - begin:.0f} s\n")
    if not keep:
        shutil.rmtree(directory.resolve() / "bench.fs", ignore_errors=True)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
