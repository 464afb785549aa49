"""``featstore verify``: every byte of a store, and of the traces compiled for it, against what their
manifests promise."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import print_json, progress, rate_text, remark, seconds_text, show, table

if TYPE_CHECKING:
    from featstore.scrub.report import VerifyReport

_CORRUPT = 3
_GENERATION = re.compile(r"g[0-9]{6,}")


@click.command("verify")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--buffered",
    is_flag=True,
    help="Read through the page cache: faster when warm, but the device is not asked.",
)
@json_option
@shared_options
@click.pass_context
def command(ctx: click.Context, store: Path, buffered: bool, as_json: bool) -> None:
    """Read all of STORE, a store or a trace, and name every file and page (every mini-batch) that is not as
    it was written.

    Traces that were compiled for the store (packs/) are part of it here. Exits with 0 where all is well, with
    3 where something is corrupt, and with 1 where it could not be verified.
    """
    from featstore.errors import FormatError, FormatVersionError
    from featstore.trace.trace import is_trace

    begin = time.perf_counter()
    try:
        if is_trace(store):
            from featstore_cli.sample import verify_trace_at

            ctx.exit(0 if verify_trace_at(store, buffered, as_json) else _CORRUPT)
        report = _verify(store, "", buffered)
    except FormatVersionError:
        raise  # nothing is wrong with it
    except FormatError as error:
        click.echo(f"featstore: error: {error}", err=True)
        ctx.exit(_CORRUPT)
    compiled = [_verify_compiled(path, report, buffered) for path in _compiled_in(store)]
    sound = report.ok and all(c["ok"] for c in compiled)
    corrupt = not report.ok or any(not (c["ok"] or c["unknown"]) for c in compiled)
    seconds = time.perf_counter() - begin
    if as_json:
        data = report.to_dict() | {"ok": sound, "compiled": [_plain(c) for c in compiled], "seconds": seconds}
        print_json("featstore.verify/1", data)
    else:
        _show(report, compiled, sound, seconds)
    if not sound:
        ctx.exit(_CORRUPT if corrupt else 1)


def _verify(path: Path, prefix: str, buffered: bool) -> VerifyReport:
    from featstore.scrub.store import verify

    with progress("verifying") as tell:
        return verify(
            path,
            progress=lambda p: tell(prefix + p.path, p.done_bytes, p.total_bytes),
            access="buffered" if buffered else "direct",
        )


def _compiled_in(store: Path) -> list[Path]:
    """The compiled traces of a store that are finished, what is left of one, and what cannot be looked at."""
    folder, found = store / "packs", list[Path]()
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [folder]
    for path in paths:
        try:
            names = os.listdir(path)
        except NotADirectoryError:
            continue
        except OSError:
            names = ["featstore.json"]  # as far as anybody knows
        unfinished = any(name.startswith("g") and name.endswith(".journal") for name in names)
        if unfinished:
            remark(f"{path} holds an unfinished compiled trace, which is not verified")
        left = not unfinished and any(_GENERATION.fullmatch(name) for name in names)
        if left and "featstore.json" not in names and _is_of_loader(path):
            remark(f"{path} is left from a loader of fresh mini-batches, and not verified: featstore gc")
            continue
        if "featstore.json" in names or (left and not _is_busy(path)):
            found.append(path)
    return found


def _is_of_loader(path: Path) -> bool:
    """Whether it has the name of an episode, which loaders remove when they end, or are killed."""
    from featstore.storage.packs import EPISODES, ROLLING

    episodes = [ending for ending in EPISODES if path.name.endswith(ending)]
    return any(path.with_name(path.name.removesuffix(one) + ROLLING).is_file() for one in episodes)


def _is_busy(path: Path) -> bool:
    """Whether another process makes a compiled trace there, or removes one; said where it does."""
    from featstore.errors import FeatstoreError, StoreLockedError
    from featstore.storage.generations import writer_lock

    try:
        with writer_lock(path, look=True):
            return False
    except StoreLockedError as error:
        remark(f"{path} is not verified: {error}")
        return True
    except (FeatstoreError, OSError):  # which is told when it is looked at
        return False


def _verify_compiled(path: Path, base: VerifyReport, buffered: bool) -> dict[str, Any]:
    """What became of one: name, ok, unknown (it cannot be said), stale, because (where there is nothing to
    verify against) and the report."""
    from featstore.errors import FeatstoreError, FormatError, FormatVersionError, IncompleteStoreError
    from featstore.storage.manifest_reading import read_manifest

    found: dict[str, Any] = {
        "name": path.name, "ok": False, "unknown": False, "stale": False, "because": "", "report": None
    }  # fmt: skip
    try:
        if path.is_dir():
            os.listdir(path)  # or it is told why not
        compiled = read_manifest(path)[0].compiled
        report = _verify(path, f"packs/{path.name}/", buffered)
    except IncompleteStoreError as error:
        if not path.exists():  # removed meanwhile
            return found | {"ok": True, "because": "it is gone"}
        if (path / "featstore.json").exists():
            return found | {"because": str(error)}
        if _is_busy(path):  # it was there when they were listed
            return found | {"ok": True, "because": "it is being made or removed"}
        because = "it has no featstore.json: compile it again, or remove what is left of it (featstore gc)"
        return found | {"because": because}
    except (FeatstoreError, OSError) as error:
        known = isinstance(error, FormatError) and not isinstance(error, FormatVersionError)
        return found | {"unknown": not known, "because": str(error)}
    stale = compiled is not None and compiled.base_uuid != base.uuid
    return found | {"ok": report.ok, "stale": stale, "report": report}


def _plain(compiled: dict[str, Any]) -> dict[str, Any]:
    report = compiled["report"]
    return (report.to_dict() if report else {}) | {k: v for k, v in compiled.items() if k != "report"}


def _show(report: VerifyReport, compiled: list[dict[str, Any]], sound: bool, seconds: float) -> None:
    reports = [("", report), *((f"packs/{c['name']}/", c["report"]) for c in compiled if c["report"])]
    problems = [
        [prefix + p.path, "" if p.page is None else f"{p.page:,}", p.what, p.expected, p.actual]
        for prefix, one in reports
        for p in one.problems
    ]
    if problems:
        show(table(["file", "page", "what", "expected", "found"], problems, left=5))
    for _, one in reports:
        if one.problem_count > len(one.problems):
            show(f"and {one.problem_count - len(one.problems):,} problems more in these files")
    for one in compiled:
        if one["because"] and not one["ok"]:
            show(f"packs/{one['name']}: {one['because']}")
    if settings().quiet and sound:
        return
    for _, one in reports:
        show(_summary(one))
    for one in compiled:
        if one["stale"]:
            show(f"packs/{one['name']} was compiled for another state of the store, and is of no use to it")
    total = sum(one.bytes for _, one in reports)
    show(f"in {seconds_text(seconds)}, {rate_text(total / seconds)}, {report.access} reads")


def _summary(report: object) -> str:
    """The report's own words, without the list of problems."""
    lines = str(report).splitlines()
    problems = len(getattr(report, "problems", ()))
    return "\n".join([lines[0], *lines[1 + problems :]])
