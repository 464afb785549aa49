"""``featstore export``: rows of a table as a file that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featstore_cli.options import SIZE, engine_option, json_option, read_ids, shared_options
from featstore_cli.output import print_json, progress, remark


@click.command("export")
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("table")
@click.option(
    "--to", type=click.Path(path_type=Path), required=True, help="The file: .npy, .zarr or .parquet."
)
@click.option(
    "--ids",
    type=click.Path(path_type=Path),
    help="Node ids whose rows are written, in this order: .npy, or text with one a line. All by default.",
)
@click.option("--columns", metavar="FIRST:END|N,N...", help="Elements of each row; all by default.")
@click.option("--dtype", help="To write, where it holds every value of the table's own.")
@click.option("--memory", type=SIZE, default="1GiB", show_default=True, help="What may be held in memory.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there already.")
@engine_option
@json_option
@shared_options
def command(
    store: Path, table: str, to: Path, ids: Path | None, columns: str | None, dtype: str | None, memory: int,
    overwrite: bool, engine: str, as_json: bool,
) -> None:  # fmt: skip
    """Write rows of TABLE of STORE to a file, in the order of their node ids.

    A .parquet file has a column `id`, one `key` where nodes have keys, and one of the table's name; a .zarr
    directory is an array of zarr v3.
    """
    import featstore

    wanted = None if ids is None else read_ids(ids)
    with progress("exporting", unit="steps") as tell:
        featstore.export(
            store, table, to, ids=wanted, columns=_columns(columns), dtype=dtype, memory=memory,
            overwrite=overwrite, progress=tell, engine=engine,
        )  # fmt: skip
    if as_json:
        print_json("featstore.export/1", {"path": str(to), "table": table})
    else:
        remark(f"wrote {to}")


def _columns(text: str | None) -> Any:
    """A slice, or a list of numbers."""
    if text is None:
        return None
    try:
        if ":" in text:
            first, _, end = text.partition(":")
            return slice(int(first) if first else None, int(end) if end else None)
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither FIRST:END nor numbers with commas between them", param_hint="--columns"
        ) from None
