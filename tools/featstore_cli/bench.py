"""``featstore bench``: this store on this disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featstore.base.environment import MEMORY
from featstore_cli.options import SIZE, chosen_table, engine_option, json_option, shared_options
from featstore_cli.output import facts, print_json, progress, rate_text, remark, seconds_text, show, table


@click.command("bench", context_settings={"show_default": True})
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--table", "table_name", metavar="NAME", help="The table, where the store has several.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=2.0,
    help="About how long to measure each way of reading.",
)
@click.option("--memory", type=SIZE, default=MEMORY, help="The reader's memory budget.")
@engine_option
@json_option
@shared_options
def command(
    store: Path, table_name: str | None, seconds: float, memory: int, engine: str, as_json: bool
) -> None:
    """Measure how fast rows of STORE are read here: random rows, half of the pages, a scan, rows in memory.
    Checksums are verified.
    """
    import featstore
    from featstore.measure.bench import bench

    with featstore.open(store) as opened, progress("measuring", unit="steps") as tell:
        target = chosen_table(opened, table_name)
        report = bench(opened, target.name, engine=engine, seconds=seconds, memory=memory, progress=tell)
    if as_json:
        print_json("featstore.bench/1", report.to_dict())
        return
    _render(report.to_dict())
    if not report.calibrated:
        remark(
            "featstore: this device was never calibrated, so that forecasts are rough: run `featstore "
            "calibrate`"
        )


def _render(data: dict[str, Any]) -> None:
    from featstore.units import format_bytes

    rows = []
    for case in data["cases"]:
        ratio = case["forecast_ratio"]
        limit = case["limit_ratio"]
        rows.append(
            [
                case["name"],
                f"{case['rows_per_second']:,.0f}",
                rate_text(case["row_bytes_per_second"]),
                rate_text(case["read_bytes_per_second"]) if case["reads"] else "-",
                f"{case['reads_per_second']:,.0f}" if case["reads"] else "-",
                "-" if limit is None else f"{limit:.2f} of {case['limit']}",
                "-" if ratio is None else f"{ratio:.2f}",
            ]
        )
    show(
        facts(
            [
                ("store", data["store"]),
                (
                    "table",
                    f"{data['table']!r}: {data['rows']:,} rows of {data['row_bytes']:,} B, "
                    f"{format_bytes(data['bytes'])}",
                ),
                ("engine", f"{data['engine']}: {data['engine_because']}"),
                ("cache state", data["cache_state"]),
                ("measured for", seconds_text(data["seconds"])),
            ]
        ),
        table(
            ["", "rows/s", "rows' bytes", "bytes read", "reads/s", "of the limit", "forecast/measured"], rows
        ),
    )
