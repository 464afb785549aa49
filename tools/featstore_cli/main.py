"""The ``featstore`` command: commands that are loaded when they are called, and errors that become one line.

What every command keeps: data go to stdout, progress and remarks to stderr, progress only to a terminal. Exit
codes: 0 ok; 1 failure; 2 usage; 3 corrupt store; 130 interrupted. An error that featstore (or the operating
system) raises is one message on stderr, ``featstore: error: ...``; ``--debug`` shows where it came from.
Anything else is a mistake of ours and keeps its traceback.

``featstore --help`` has to be quick, so that this module imports click alone; rich, NumPy and the library
come with commands.
"""

from __future__ import annotations

import errno
import importlib
import io
import sys
import traceback
import warnings
from typing import Any

import click

from featstore_cli.options import Settings, settings, shared_options

EXIT_FAILURE = 1
EXIT_CORRUPT = 3
EXIT_INTERRUPTED = 130

#: Each command's module in this package, and what ``featstore --help`` says of it.
_COMMANDS = {
    "pack": "Pack features, graphs and arrays into a store.",
    "split": "Split a store by hosts, for training on several.",
    "inspect": "Show what a store consists of.",
    "verify": "Read a whole store and check every byte.",
    "sample": "Sample mini-batches from a store's graph into a trace.",
    "export": "Write rows of a table to a .npy, .zarr or .parquet file.",
    "explain": "Show what a request would read, and how long that takes.",
    "calibrate": "Measure what reads cost on a device.",
    "bench": "Measure how fast a store's rows are read.",
    "tune": "Choose threads and reads for online training here.",
    "loader-costs": "Forecast what each mode of training costs here.",
    "plan-memory": "Tell where a loader's memory goes, before packing or opening.",
    "completion": "Print what has a shell complete this command.",
    "gc": "Remove what old or unfinished packs have left.",
    "demo": "Train a GNN in every way, from memory and from a store, and compare.",
}

_shown = warnings.showwarning


class CommandGroup(click.Group):
    """Loads a command's module when it is called; turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"featstore_cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], _COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_COMMANDS)}"
            ctx.fail(f"no command is called {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(f"\nfeatstore: interrupted{_advice(settings(ctx))}", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except (OSError, ImportError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever read our output has gone: click ends in silence
            if isinstance(error, ImportError) and (error.name or "").startswith("featstore"):
                raise  # not a missing package but a mistake of ours
            _fail(ctx, error)
        except Exception as error:
            # Imported here because whoever raised it has loaded it already.
            from featstore.errors import FeatstoreError

            if not isinstance(error, FeatstoreError):
                raise
            _fail(ctx, error)


def _fail(ctx: click.Context, error: Exception) -> None:
    from featstore.errors import CorruptionError, StoreExistsError, StoreLockedError

    own = settings(ctx)
    if own.debug:
        traceback.print_exception(error)
    click.echo(f"featstore: error: {_text(error)}", err=True)
    if not isinstance(error, StoreLockedError | StoreExistsError) and own.resumable() and not own.debug:
        click.echo(f"featstore: {own.what} is unfinished{_advice(own)}", err=True)
    ctx.exit(EXIT_CORRUPT if isinstance(error, CorruptionError) else EXIT_FAILURE)


def _text(error: Exception) -> str:
    """One message, without what Python puts around it."""
    from featstore.errors import FeatstoreError

    if isinstance(error, OSError) and not isinstance(error, FeatstoreError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _advice(own: Settings) -> str:
    return "; run the same command again with --resume to go on from here" if own.resumable() else ""


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        import featstore

        click.echo(f"featstore {featstore.__version__}")
        ctx.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
@shared_options
def cli() -> None:
    """A storage engine for graph features on SSD.

    Pack features once, then read rows at the speed of the device in a fixed amount of memory.
    """
    for stream in (sys.stdout, sys.stderr):  # names of files may be no text: they are shown with backslashes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(message: Any, category: Any, *where: Any, **options: Any) -> None:
    """featstore's own warnings as it tells all else, without a line of Python; others as ever."""
    from featstore.errors import FeatstoreWarning

    if issubclass(category, FeatstoreWarning):
        click.echo(f"featstore: warning: {message}", err=True)
    else:
        _shown(message, category, *where, **options)


def main() -> None:
    """What the ``featstore`` script calls."""
    warnings.showwarning = _show_warning
    cli(prog_name="featstore")
