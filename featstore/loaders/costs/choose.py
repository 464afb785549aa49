"""Which mode ``mode="auto"`` takes. What is learned stays as it is, and nothing is written that nobody asked
for:

- ``online``, unless one of the others can be had and is sure to be faster;
- ``rolling`` where ``disk=`` says how much disk may be taken, and an epoch of it, preparing the next one
  included, takes less than ``FASTER`` of an epoch online;
- ``compiled`` in its place where mini-batches are the same in every epoch, which the user says
  (``repeat=True``) or a list of them shows: then nothing is learned otherwise;
- ``partitions`` never: neighbours are left out, so it is for the user to ask for.

``FASTER`` is what forecasts may be off by.
"""

from __future__ import annotations

from collections.abc import Mapping

from featstore.loaders.costs.result import ModeCost, seconds_text
from featstore.units import format_bytes

FASTER = 0.8


def choice(
    modes: Mapping[str, ModeCost], *, disk: bool, repeats: bool, epochs: int
) -> tuple[str, str]:  # fmt: skip
    """(mode, why in one sentence). ``disk``: some was offered; ``repeats``: mini-batches are the same in
    every epoch; ``epochs``: over which preparing is spread."""
    online, other = modes["online"], modes["compiled" if repeats else "rolling"]
    why_other = "mini-batches repeat" if repeats else "mini-batches are fresh in every epoch"
    if online.possible and online.bytes_read == 0:
        return "online", "all rows fit the memory, and are read once"
    if not disk:
        more = (
            f"; with {format_bytes(other.disk_bytes)} of it {_pace(other, epochs)}" if other.possible else ""
        )
        return "online", f"nothing is written without disk=, and {_pace(online, epochs)}{more}"
    if not other.possible:
        return "online", f"mode {other.mode} {other.reason}"
    if not online.possible:
        return other.mode, f"mode online {online.reason}; {why_other}"
    now, then = online.total_seconds(epochs) / epochs, other.total_seconds(epochs) / epochs
    if then >= FASTER * now:
        return "online", (
            f"{_pace(online, epochs)}, and {_pace(other, epochs)}, which is not sure to be faster"
        )
    return other.mode, (
        f"{why_other}, and {_pace(other, epochs)} on {format_bytes(other.disk_bytes)} of disk, where "
        f"{_pace(online, epochs)}"
    )


def _pace(one: ModeCost, epochs: int) -> str:
    """``an epoch of rolling takes ~12 s``, preparing included."""
    if not one.possible:
        return f"mode {one.mode} {one.reason}"
    about = "~" if one.extrapolated else ""
    spread = " with preparing spread over them" if one.mode == "compiled" else ""
    seconds = one.total_seconds(epochs) / epochs if spread else one.epoch_seconds
    return f"an epoch {one.mode}{spread} takes {seconds_text(seconds, about)}"
