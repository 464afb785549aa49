"""Buffers whose policy is chosen while they are used, ``policy="auto"``: what that takes of their memory, and
the way from what :mod:`featstore.tiers.slots.choose` finds to another policy.

It begins with :data:`FIRST_POLICY`. Where the shadows that try the policies would take more than a small part
of the memory, there are none, and that is the policy throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from featstore.storage.store import Table
from featstore.tiers import PolicyNow
from featstore.tiers.slots import layout
from featstore.tiers.slots.choose import CANDIDATES, PolicyChoice
from featstore.tiers.slots.rows import KEPT_BYTES, SWITCH_BYTES, SlotCost

if TYPE_CHECKING:
    from featstore.tiers.buffer import FeatureBuffer

FIRST_POLICY = "s3-fifo"  # until it is known better; and in small budgets
CHOOSING_BYTES = 6 << 20  # of what tries policies for one table
_CHOOSING_SHARE = 12  # of the memory that all of these may take


def slot_cost(policy: str) -> SlotCost:
    """What slots take under this policy, or under any that ``"auto"`` may choose."""
    names = CANDIDATES if policy == "auto" else (policy,)
    beside = {"auto": SWITCH_BYTES, "static": KEPT_BYTES}.get(policy, 0)
    return SlotCost([layout.POLICIES[name] for name in names], beside)


def choosing_bytes(tables: Sequence[Table], memory_bytes: int) -> dict[str, int]:
    """What choosing takes of so much memory, by table; empty where that is too little for it."""
    if CHOOSING_BYTES * len(tables) > memory_bytes // _CHOOSING_SHARE:
        return {}
    return {table.name: CHOOSING_BYTES + _uses_bytes(table, memory_bytes) for table in tables}


def _uses_bytes(table: Table, memory_bytes: int) -> int:
    """Memory in which the uses of each row are counted, where that is a small part: a static set needs it."""
    return 2 * table.rows if 2 * table.rows <= memory_bytes // _CHOOSING_SHARE else 0


class Choices:
    """The policies of some tables' buffers. Not for several threads at once."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[FeatureBuffer, PolicyChoice]] = {}
        self._decided = False

    def add(self, table: str, buffer: FeatureBuffer, memory_bytes: int, batch_rows: int = 0) -> None:
        """Choose for a buffer, which has a first policy, in so much memory beside its own. ``batch_rows``: of
        the largest mini-batch, where that is known. Nothing where all rows have slots: none ever leaves."""
        rows = buffer.table.rows
        if buffer.slots < rows:
            choice = PolicyChoice(
                buffer.slots, rows, policy=buffer.policy_name, memory_bytes=memory_bytes,
                batch_rows=batch_rows,
            )  # fmt: skip
            self._of[table] = buffer, choice

    def get(self, table: str) -> PolicyChoice | None:
        """That of a table, if there is one."""
        return self._of[table][1] if table in self._of else None

    def observe(self, table: str, ids: NDArray[Any]) -> None:
        """Note what a buffer is asked for."""
        if table in self._of:
            self._of[table][1].observe(ids)

    @property
    def undecided(self) -> bool:
        """Enough has been seen for the first time."""
        return not self._decided and any(choice.full for _, choice in self._of.values())

    @property
    def due(self) -> bool:
        """Enough has been seen since the last time."""
        return any(choice.full and not choice.decided for _, choice in self._of.values())

    def decide(self, *, wait: bool = False) -> None:
        """Go on with the policies that hit most on what was seen since the last time. Raises ArgumentError
        while tickets hold slots, unless it is to ``wait`` for them; what reading raises, where rows are to be
        kept for good."""
        for buffer, choice in self._of.values():
            policy = choice.decide()
            # Whoever was interrupted while rows were loaded to be kept has none.
            if policy != buffer.policy_name or (policy == "static" and buffer.slots_unkept == buffer.slots):
                buffer.switch(policy, choice.static_ids() if policy == "static" else None, wait=wait)
            self._decided = self._decided or bool(choice.hit_rates)

    def policies(self) -> Iterator[tuple[str, PolicyNow]]:
        """The policy of each table's buffer now, and the hit rates that made it so."""
        for table, (buffer, choice) in list(self._of.items()):
            ranked = sorted(choice.hit_rates.items(), key=lambda one: -one[1])
            tried = ", ".join(f"{name} {rate:.1%}" for name, rate in ranked)
            because = (
                f"of the last rows seen these would have hit: {tried}" if tried else "too little is seen"
            )
            yield table, PolicyNow(buffer.policy_name, because)
