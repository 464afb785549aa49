"""What of a budget a step is given, and what it takes of the whole where that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from featstore.errors import BudgetError

#: What of the budget stays free, for the allocator and for what has no size known beforehand: an eighth, or
#: this if it is more.
_SLACK_BYTES = 24 * 2**20


def without_slack(memory_bytes: int) -> int:
    """What of the budget is handed out: never less than half of it."""
    return memory_bytes - max(memory_bytes // 8, min(_SLACK_BYTES, memory_bytes // 2))


def with_slack(used_bytes: int) -> int:
    """The budget of which :func:`without_slack` leaves at least so much."""
    return min(2 * used_bytes, max(used_bytes + _SLACK_BYTES, -(-used_bytes * 8 // 7))) + 1


@contextmanager
def of_share(given: int, whole: int, parts: int = 1, more: int = 0) -> Iterator[None]:
    """A BudgetError for what was ``given``, one of so many parts of what was left of the ``whole``, is one
    for the whole, of which a larger one would keep so much ``more``."""
    try:
        yield
    except BudgetError as error:
        if error.given_bytes != given:
            raise
        needed = parts * (error.needed_bytes - given) + whole + more
        raise BudgetError(needed, whole, error.what) from None
