"""Memory: how much of it this process may ever have, by the machine and by the control groups that it is
in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from featstore.errors import BudgetError


@cache
def memory_bytes() -> int:
    """What the machine has, or less where a control group allows less (a container, a batch job). Looked at
    once a process."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def group_limits(groups: Path, mounted: Path) -> list[int]:
    """Limits in bytes of the memory groups of a process, and of those above them, versions 1 and 2.
    ``groups``: the list of its groups (``/proc/PID/cgroup``), ``mounted``: where their file systems are. What
    cannot be read limits nothing."""
    limits: list[int] = []
    for line in _text(groups).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            trees, name = [mounted, mounted / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            trees, name = [mounted / "memory", mounted / controllers], "memory.limit_in_bytes"
        else:
            continue
        steps = [step for step in path.split("/") if step not in ("", ".", "..")]
        for tree in dict.fromkeys(trees):
            # A container sees its own group as the root of the mount, whatever the path says.
            for depth in range(len(steps) + 1):
                text = _text(tree.joinpath(*steps[:depth], name)).strip()
                if text.isascii() and text.isdigit():  # "max" is no limit
                    limits.append(int(text))
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def check_machine(needed_bytes: int, what: str) -> None:
    """Raise BudgetError where this needs more memory than the machine has, or this process may take: a sparse
    file may claim any size."""
    if needed_bytes > memory_bytes():
        raise BudgetError(needed_bytes, memory_bytes(), what)


def busy_core_seconds() -> float:
    """Seconds of all cores that any program had, since the system started."""
    text = Path("/proc/stat").read_text("utf-8", "replace")
    user, nice, system, _idle, _waiting, irq, soft = (int(one) for one in text.split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
