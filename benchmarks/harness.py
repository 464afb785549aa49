"""What every benchmark shares: interleaved rounds, claims, and a record of where and how they were measured.

A machine drifts: a shared disk is faster in one minute than in the next, caches of the host fill, other
programs run. So a benchmark measures all its contenders in *rounds*: each once, then each once more, in an
order that moves on by one place per round; and a ratio is the median of the ratios *within* the rounds, not
the ratio of two medians taken minutes apart. A contender returns how long it took and how much it did, and
the benchmark compares what it returned with the truth, so that a wrong answer cannot be a fast one.

A result is a JSON file ``results/NAME.json``: series (the figures of each contender, round by round, with the
state of the cache), claims (a ratio, its bar, whether it was met) and the machine. ``report.py`` turns these
files into the tables of ``docs/performance.md``.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SCHEMA = 1
_PACKAGES = ("numpy", "numba", "liburing", "torch", "pylance", "pyarrow", "pymetis")


@dataclass(frozen=True)
class Sample:
    """One measurement: ``amount`` units of work in ``seconds``, with the CPU time it took and whatever else
    is worth keeping."""

    amount: float
    seconds: float
    cpu_seconds: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True)
class Contender:
    """Something to be measured once per round. ``cache`` tells the state of the page cache it is measured
    in."""

    name: str
    unit: str
    cache: str
    run: Callable[[int], Sample]  # is given the round


@dataclass
class Series:
    """The samples of one contender, one for each round."""

    name: str
    unit: str
    cache: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(s.rate for s in self.samples)

    @property
    def cpu_microseconds(self) -> float | None:
        """CPU time for each unit of work."""
        values = [s.cpu_seconds / s.amount * 1e6 for s in self.samples if s.cpu_seconds is not None]
        return median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        rates = [s.rate for s in self.samples]
        return {
            "name": self.name, "unit": self.unit, "cache": self.cache, "median": self.rate, "min": min(rates),
            "max": max(rates), "cpu_microseconds": self.cpu_microseconds,
            "samples": [dataclasses.asdict(s) for s in self.samples],
        }  # fmt: skip


def measure_rounds(contenders: Sequence[Contender], rounds: int) -> dict[str, Series]:
    """Measure all contenders ``rounds`` times, interleaved; round r begins with the r-th."""
    series = {c.name: Series(c.name, c.unit, c.cache) for c in contenders}
    for number in range(rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            sample = contender.run(number)
            series[contender.name].samples.append(sample)
            note(f"round {number + 1}/{rounds}: {contender.name}: {sample.rate:,.4g} {contender.unit}")
    return series


def paired_ratio(ours: Series, other: Series) -> float:
    """Median over the rounds of our rate over the other's in the same round."""
    return median(a.rate / b.rate for a, b in zip(ours.samples, other.samples, strict=True))


def paired_cpu_ratio(ours: Series, other: Series) -> float:
    """Median over the rounds of our CPU time per unit of work over the other's."""
    pairs = zip(ours.samples, other.samples, strict=True)
    return median((a.cpu_seconds or 0) / a.amount / ((b.cpu_seconds or 0) / b.amount) for a, b in pairs)


@dataclass(frozen=True)
class Claim:
    """A figure of merit. ``bar`` None: reported, not promised."""

    text: str
    value: float
    bar: float | None = None
    direction: Literal[">=", "<="] = ">="
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.direction == ">=" else self.value <= self.bar

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "met": self.met}


@dataclass
class Report:
    """All that a benchmark found out; :meth:`save` writes it."""

    name: str
    title: str
    parameters: dict[str, Any]
    directory: Path
    series: list[Series] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table of figures that are no series."""
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(r) for r in rows]})

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "title": self.title,
            "command": "python benchmarks/"
            + " ".join([Path(sys.argv[0]).name, *_public_arguments(sys.argv[1:])]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": git_commit(),
            "machine": machine(self.directory),
            "parameters": self.parameters,
            "claims": [c.to_dict() for c in self.claims],
            "series": [s.to_dict() for s in self.series],
            "tables": self.tables,
            "notes": self.notes,
        }

    def save(self, out: Path | None, quick: bool = False) -> None:
        """Print the tables and write the JSON file; what was quick is no result and is only written where
        ``out`` says."""
        from tables_text import print_result

        result = self.to_dict()
        print_result(result)
        path = out or (None if quick else RESULTS / f"{self.name}.json")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")


def _public_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line without the places it names, which say nothing to others."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument == "--keep":
            skip = False
        elif argument in ("--dir", "--out"):
            skip = True
        elif not argument.startswith(("--dir=", "--out=")):
            kept.append(Path(argument).name if os.sep in argument else argument)
    return kept


def git_commit() -> str:
    """The commit that is checked out, with ``+`` where files differ from it; or "unknown"."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "featstore")
    return commit + ("+" if changed else "")


def machine(directory: Path) -> dict[str, Any]:
    """What the figures depend on; ``directory`` is where the data lie. No names of machines or places."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "virtual": any(
            "hypervisor" in line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ),
        "disk": disk(directory),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
        "fio": _fio_version(),
    }


def disk(directory: Path) -> dict[str, Any]:
    """File system and block device under a directory, as far as the system tells."""
    number = os.stat(directory).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    found: dict[str, Any] = {"file_system": _file_system(number)}
    if not device.exists():
        return found
    real = device.resolve()
    whole = real if (real / "queue").exists() else real.parent
    for key, name in (
        ("scheduler", "queue/scheduler"),
        ("rotational", "queue/rotational"),
        ("read_ahead_kib", "queue/read_ahead_kb"),
        ("model", "device/model"),
    ):
        if (whole / name).exists():
            text = (whole / name).read_text().strip()
            found[key] = (
                text[text.index("[") + 1 : text.index("]")] if "[" in text else text
            )  # of schedulers, the one in use
    found["kind"] = whole.name.rstrip("0123456789")
    return found


def _file_system(number: int) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == f"{os.major(number)}:{os.minor(number)}":
            return fields[fields.index("-") + 1]
    return "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _fio_version() -> str | None:
    try:
        return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError:
        return None


def note(text: str) -> None:
    """Progress, on stderr."""
    click.echo(text, err=True)


@dataclass(frozen=True)
class Settings:
    """The options that all benchmarks share."""

    size_bytes: int
    workspace: Path
    rounds: int
    seconds: float
    quick: bool
    keep: bool
    out: Path | None


def shared_options(
    size: str, quick_size: str, rounds: int
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a benchmark command; it is called with :class:`Settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapped(
            size_given: str | None,
            directory: Path,
            rounds_given: int | None,
            quick: bool,
            keep: bool,
            out: Path | None,
            **rest: Any,
        ) -> None:
            from featstore.units import parse_bytes

            workspace = directory.resolve() / "bench.fs"
            workspace.mkdir(parents=True, exist_ok=True)
            settings = Settings(
                parse_bytes(size_given or (quick_size if quick else size)), workspace,
                rounds_given or (2 if quick else rounds), 1.0 if quick else 3.0, quick, keep, out,
            )  # fmt: skip
            try:
                command(settings, **rest)
            finally:
                if not keep:
                    import shutil

                    shutil.rmtree(workspace)

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        for option in reversed(
            (
                click.option(
                    "--size",
                    "size_given",
                    help=f"Size of the table. [default: {size}; with --quick {quick_size}]",
                ),
                click.option(
                    "--dir",
                    "directory",
                    default=".",
                    show_default=True,
                    type=click.Path(path_type=Path, file_okay=False),
                    help="A directory on the device to measure; a folder bench.fs is made in it.",
                ),
                click.option(
                    "--rounds",
                    "rounds_given",
                    type=click.IntRange(1),
                    help=f"[default: {rounds}; with --quick 2]",
                ),
                click.option(
                    "--quick",
                    is_flag=True,
                    help="Small and short: tells whether the benchmark works, not how fast anything is.",
                ),
                click.option(
                    "--keep",
                    is_flag=True,
                    help="Leave bench.fs, so that the next benchmark finds its tables there.",
                ),
                click.option(
                    "--out",
                    type=click.Path(path_type=Path, dir_okay=False),
                    help="[default: benchmarks/results/NAME.json; with --quick none]",
                ),
            )
        ):
            wrapped = option(wrapped)
        return wrapped

    return decorate
