"""``featstore verify``: every byte of a store against what the manifest promises."""

from __future__ import annotations

import time
from pathlib import Path

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import print_json, progress, rate_text, seconds_text, show, table

_CORRUPT = 3


@click.command("verify")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--buffered", is_flag=True, help="Read through the page cache: faster when warm, but the device is not asked."
)
@json_option
@shared_options
@click.pass_context
def command(ctx: click.Context, store: Path, buffered: bool, as_json: bool) -> None:
    """Read all of STORE, a store or a trace, and name every file and page (every mini-batch) that is not as it was written.

    Exits with 0 where all is well, with 3 where the store is corrupt, and with 1 where it could not be verified.
    """
    import featstore
    from featstore.errors import FormatError, FormatVersionError
    from featstore.trace import is_trace

    begin = time.perf_counter()
    try:
        if is_trace(store):
            from featstore_cli.sample import verify_trace_at

            ctx.exit(0 if verify_trace_at(store, buffered, as_json) else _CORRUPT)
        with progress("verifying") as tell:
            report = featstore.verify(
                store,
                progress=lambda p: tell(p.path, p.done_bytes, p.total_bytes),
                access="buffered" if buffered else "direct",
            )
    except FormatVersionError:
        raise  # nothing is wrong with it
    except FormatError as error:
        click.echo(f"featstore: error: {error}", err=True)
        ctx.exit(_CORRUPT)
    seconds = time.perf_counter() - begin
    if as_json:
        print_json("featstore.verify/1", report.to_dict() | {"seconds": seconds})
    else:
        if report.problems:
            rows = [
                [p.path, "" if p.page is None else f"{p.page:,}", p.what, p.expected, p.actual] for p in report.problems
            ]
            show(table(["file", "page", "what", "expected", "found"], rows, left=5))
        if not (settings().quiet and report.ok):
            show(
                _summary(report),
                *([f"in {seconds_text(seconds)}, {rate_text(report.bytes / seconds)}, {report.access} reads"]),
            )
    if not report.ok:
        ctx.exit(_CORRUPT)


def _summary(report: object) -> str:
    """The report's own words, without the list of problems."""
    lines = str(report).splitlines()
    problems = len(getattr(report, "problems", ()))
    return "\n".join([lines[0], *lines[1 + problems :]])
