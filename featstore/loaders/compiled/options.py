"""What may be said to the loader of a compiled trace, asked before a trace is recorded and compiled for
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from featstore.arguments import as_device, as_flag, check_options, need_torch, options_of, shown
from featstore.base.ids import as_integers
from featstore.errors import ArgumentError
from featstore.reader.options import READING, check_reading
from featstore.tiers.buffer_tier import Buffer
from featstore.units import parse_bytes


def check_loader_options(loader: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for what are no options of the class ``loader``, whatever the compiled trace."""
    check_options(options, (*options_of(loader), *READING), "the loader of a compiled trace")
    check_reading(**{name: options[name] for name in READING if name in options})
    if options.get("memory") is not None:
        parse_bytes(options["memory"], "memory")
    if options.get("order") is not None and not callable(options["order"]):
        as_integers(options["order"], "order must be numbers of mini-batches", ArgumentError)
    if options.get("device") is not None:
        as_device(options["device"], "device")
    if options.get("tensors") is not None and as_flag(options["tensors"], "tensors"):
        need_torch("tensors=True")
    if not isinstance(options.get("buffer"), Buffer | None):
        raise ArgumentError(f"buffer must be a featstore.Buffer, not {shown(options['buffer'])}")
