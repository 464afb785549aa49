"""What messages tell of an error that another library has raised."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What it says first, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def name_and_line(error: BaseException) -> str:
    """Its name, and what it says first."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
