"""``featstore calibrate``: measure a device, so that plans and forecasts fit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import facts, print_json, progress, rate_text, remark, seconds_text, show, table

if TYPE_CHECKING:
    from featstore.measure.calibration import Calibration
    from featstore.measure.engine_rates import EngineRate

_SPREAD_MAX = 0.5


@click.command("calibrate", context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=Path), default=".")
@click.option(
    "--engine",
    type=click.Choice(["auto", "all", "uring", "threads", "mmap"]),
    default="auto",
    help="The engine to measure with.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=5.0, help="About how long to measure each engine."
)
@click.option("--dry-run", is_flag=True, help="Measure, but keep nothing.")
@json_option
@shared_options
def command(path: Path, engine: str, seconds: float, dry_run: bool, as_json: bool) -> None:
    """Measure the device that holds PATH, a store or a directory, and keep the result for all readers.

    A store whose largest table has less than 512 MiB, or a directory without one, gets a temporary store
    beside it. Let nothing else use the device meanwhile.
    """
    from featstore.engine import ENGINES
    from featstore.measure.calibrate import keep, measure
    from featstore.plan.cost import models_path

    engines = [engine]
    if engine == "all":
        engines = [name for name in ENGINES if _works_here(name)]
    results = []
    for name in engines:
        with progress(f"calibrating {name}", unit="steps") as tell:
            results.append(measure(path, name, seconds=seconds, progress=tell))
        if not dry_run:
            keep(results[-1])
    saved = None if dry_run else str(models_path())
    for left_open in filter(None, (result.left_open for result in results)):
        remark(f"featstore: {left_open}")
    if as_json:
        print_json("featstore.calibrate/2", {"saved": saved, "calibrations": [r.to_dict() for r in results]})
        return
    for result in results:
        if not settings().quiet:
            _render(result)
        disturbed = [s for s in result.samples if s.spread > _SPREAD_MAX]
        if disturbed:
            worst = max(s.spread for s in disturbed)
            remark(
                f"featstore: the rounds differ by up to {worst:.0%}: something else may be using the device; "
                "calibrate again when it is idle"
            )
    if saved and not settings().quiet:
        show(f"kept in {saved}")


def _works_here(engine: str) -> bool:
    from featstore.engine import choose
    from featstore.errors import EngineError

    try:
        choose(engine)
    except EngineError:
        return False
    return True


def _render(result: object) -> None:
    from featstore.measure.calibration import Calibration
    from featstore.units import format_bytes

    assert isinstance(result, Calibration)
    model = result.model
    rows = [
        [
            format_bytes(s.extent_bytes),
            f"{s.reads:,}",
            f"{1 / s.seconds_per_read:,.0f}",
            rate_text(s.extent_bytes / s.seconds_per_read),
            seconds_text(s.seconds_per_read),
            seconds_text(model.read_seconds + s.extent_bytes * model.byte_seconds),
            f"{s.spread:.0%}",
        ]
        for s in result.samples
    ]
    because = f" ({result.access_because})" if result.access_because else ""
    where = "a temporary store beside it" if result.temporary else "the store's own files"
    show(
        table(
            ["read size", "reads", "reads/s", "rate", "a read takes", "by the model", "spread"],
            rows,
            title=f"{result.engine}, {result.access} I/O{because}, on {where}",
        ),
        facts(
            [
                ("a read", f"{seconds_text(model.read_seconds)} + {rate_text(1 / model.byte_seconds)}"),
                ("a request", f"{seconds_text(model.request_seconds)} on top"),
                (
                    "plans",
                    f"read through gaps of up to {model.gap_pages_max} pages; model within "
                    f"{result.error:.0%} of every size",
                ),
                ("taken", _taken(result)),
                *(("  measured", _rate(one)) for one in result.rates),
            ]
        ),
        "",
    )


def _taken(result: Calibration) -> str:
    """Which engine, and how many threads of it, and whether that was the question."""
    threads = result.model.threads
    rings = "" if threads is None else f" with {threads} ring{'s' * (threads > 1)}"
    if result.open_because:
        return f"{result.engine}: left open, because {result.open_because}"
    return f"{result.engine}{rings}{': fastest of those below' if len(result.rates) > 1 else ''}"


def _rate(one: EngineRate) -> str:
    """An engine's rate, in words."""
    rings = "" if one.threads is None else f" with {one.threads} ring{'s' * (one.threads > 1)}"
    return (
        f"{one.engine}{rings}: {one.reads_per_second:,.0f} reads of a page a second, "
        f"{seconds_text(one.cpu_seconds)} of a core each, spread {one.spread:.0%}"
    )
