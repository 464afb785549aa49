"""The search for the best placement: one price for a byte of disk, and every class of rows where it is
cheapest under that price.

For one group size, each class c (rows missed by c mini-batches of their group) has three places, each with
its disk space and time: nothing and c reads of the base table; one row and c reads of a shared region; c rows
and nothing but their bytes. If every byte of disk has the same price, and each class goes where disk and time
together are cheapest, no other choice with as little disk takes less time (Lagrange); the right price is the
one that just uses the limit up. As the price falls, a class steps from place to place along the lower convex
hull of its points, each step saving so many seconds for a copy on disk. Taking the steps of all classes in
the order of that saving, until the limit is reached, finds price and choice exactly, without a bisection. The
step that no longer fits is taken by a part of its class.

What a row's read costs depends on which others are read the same way: the fewer rows are left in the base
table, the more each of them costs. So costs are measured for all rows in the base table and all rows shared,
then for what was chosen, which is what the time is taken from, and for the best group size again for what is
then chosen. Beside the best choice, the best one that leaves nothing in the base table is looked at: each
step out of the base table alone can look bad although all of them together are good.

**Group sizes.** Time falls with the size as long as that frees disk, then rises with the scatter in larger
regions. The search begins with the smallest group that leaves nothing in the base table and ones six times as
large and small, goes from the best of them to better ones nearby, and measures half a dozen sizes in all.
Sizes are chosen so that the last group is as large as the others.

DiskGNN's choice (c = 1 packed, all else shared, the smallest group that fits) and all rows in the base table
are candidates as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featstore.compile.allotment import Floats, allot, most_wanted, smallest_fit, split_class
from featstore.compile.groups import counts_apart
from featstore.compile.placement import (
    SPLIT_STEPS,
    Forecast,
    Location,
    Placement,
    Tally,
    class_rows,
    disk_rows,
    make_forecast,
)
from featstore.compile.probes import ClassCosts, Masks, Probe, base_costs, shared_costs
from featstore.compile.survey import Survey
from featstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from featstore.layout import TableLayout
    from featstore.plan.cost import DeviceModel

#: DiskGNN's choice: rows of one mini-batch are packed, all others shared.
PAPER = (int(Location.PACKED), int(Location.SHARED))

#: A shared row is written to a spill, read, and written in its region's order: so many times a packed one.
SHARED_WRITES = 2.5

_ROUNDS = 3
_VIEWS = 6  # group sizes of which what the probes see is held
_ROWS_MIN = 200  # sampled reads that a class's cost should rest on


@dataclass(frozen=True)
class Rates:
    """Reads and pages for each time that a row of class c is read one way: float64 [G + 1] each."""

    reads: Floats
    pages: Floats

    def seconds(self, model: DeviceModel) -> Floats:
        return self.reads * model.read_seconds + self.pages * (PAGE_BYTES * model.byte_seconds)


@dataclass(frozen=True)
class Costs:
    """Rates of the three places, by Location."""

    of: tuple[Rates, Rates, Rates]

    def seconds(self, model: DeviceModel) -> Floats:
        """float64 [3, G + 1]."""
        return np.stack([rates.seconds(model) for rates in self.of])


def smooth(costs: ClassCosts) -> Rates:
    """Rates of neighbouring classes together where a class alone has too few rows; the last ones hold
    beyond."""
    wanted = max(1.0, min(_ROWS_MIN, float(costs.rows.sum()) / 16))
    size = len(costs.rows)
    reads, pages = np.zeros(size), np.zeros(size)
    low, held, last = 0, 0.0, slice(0, 0)
    for high in range(1, size + 1):
        held += float(costs.rows[high - 1])
        if held < wanted:
            continue
        reads[low:high] = costs.reads[low:high].sum() / held
        pages[low:high] = costs.pages[low:high].sum() / held
        last = slice(low, high)
        low, held = high, 0.0
    if low:  # what is left at the end is like the last ones
        reads[last.start :], pages[last.start :] = reads[last.start], pages[last.start]
    return Rates(reads, pages)


def after(reference: Rates, costs: ClassCosts) -> Rates:
    """The rates measured for the rows that were chosen; other classes keep those of the reference, in
    proportion."""
    if not costs.rows.any():
        return reference
    measured, chosen = smooth(costs), costs.rows > 0

    def scaled(rates: Floats, sums: Floats) -> Floats:
        before = float(rates @ costs.rows)
        return rates * (float(sums.sum()) / before) if before else rates

    return Rates(
        np.where(chosen, measured.reads, scaled(reference.reads, costs.reads)),
        np.where(chosen, measured.pages, scaled(reference.pages, costs.pages)),
    )


def estimate(
    placement: Placement, tally: Tally, costs: Costs, row_bytes: int, model: DeviceModel
) -> Forecast:
    """What the costs say of a placement."""
    rows = class_rows(placement, tally)
    counts = np.arange(len(tally))
    wanted = rows * counts
    reads = sum(float(wanted[place] @ costs.of[place].reads) for place in Location)
    pages = sum(float(wanted[place] @ costs.of[place].pages) for place in Location)
    packed, shared, base = (
        int(wanted[place].sum()) for place in (Location.PACKED, Location.SHARED, Location.BASE)
    )
    return make_forecast(
        reads, pages, packed, int(rows[Location.SHARED].sum()), shared, base, row_bytes, model
    )


@dataclass(frozen=True)
class Candidate:
    """A placement, its time, and how it came about: from ``costs``, with some rows left in the base table or
    not, or ``given``."""

    seconds: float
    placement: Placement
    costs: Costs
    leave_base: bool
    given: bool = False


class Search:
    """Measures and compares candidates for one set of lists; see the module's text.

    ``size_max``: the largest group. ``batches``: how many mini-batches there are. ``written_row_seconds``:
    what writing a row takes, for each time that all mini-batches will be read.
    """

    def __init__(
        self, survey: Survey, batches: int, size_max: int, base_layout: TableLayout, model: DeviceModel,
        extent_bytes_max: int, disk_bytes: int, written_row_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._survey, self._layout, self._model = survey, base_layout, model
        self._batches, self._size_max = batches, size_max
        self._extent_bytes_max, self._disk_bytes = extent_bytes_max, disk_bytes
        self._written_row_seconds = written_row_seconds
        self._tallies: dict[int, Tally] = {}
        self._views: dict[int, tuple[list[Probe], Costs]] = {}
        self._found: dict[int, list[Candidate]] = {}
        self._rounds: dict[int, int] = {}

    def tally(self, size: int) -> Tally:
        """Rows by class, as if each split step had equally many."""
        if size not in self._tallies:
            rows = self._survey.counts(size)
            self._tallies[size] = np.broadcast_to(rows[:, None] / SPLIT_STEPS, (size + 1, SPLIT_STEPS))
        return self._tallies[size]

    def _packed(self, size: int) -> Rates:
        """A packed row costs its bytes and its part of the longest read."""
        row_bytes = self._layout.row_bytes
        return Rates(
            np.full(size + 1, row_bytes / self._extent_bytes_max), np.full(size + 1, row_bytes / PAGE_BYTES)
        )

    def _measure(
        self, looks: list[Probe], base: Masks, shared: Masks, shared_rows: Floats, reference: Costs | None
    ) -> Costs:  # fmt: skip
        """Costs with these rows in the base table and those shared; for other classes the reference's.
        ``shared_rows``: by class, in all groups."""
        size, row_bytes = looks[0].last - looks[0].first, self._layout.row_bytes
        groups = self._batches / size
        apart = counts_apart(
            size, float(shared_rows.sum()) / groups, float(shared_rows @ np.arange(size + 1)) / groups
        )
        in_base = base_costs(looks, base, self._layout, self._model, self._extent_bytes_max)
        in_shared = shared_costs(looks, shared, apart, row_bytes, self._model, self._extent_bytes_max)
        if reference is None:
            return Costs((smooth(in_base), self._packed(size), smooth(in_shared)))
        of = reference.of
        return Costs(
            (after(of[Location.BASE], in_base), of[Location.PACKED], after(of[Location.SHARED], in_shared))
        )

    def _prices(self, costs: Costs) -> Floats:
        """Seconds for each time that a row of a class is read, by Location, float64 [3, G + 1], with its part
        of what writing the row takes: of a shared one, all reads of its group have one."""
        seconds = costs.seconds(self._model)
        seconds[Location.PACKED] += self._written_row_seconds
        copies = np.maximum(1, np.arange(seconds.shape[1]))
        seconds[Location.SHARED] += self._written_row_seconds * SHARED_WRITES / copies
        return seconds

    def _seconds(self, placement: Placement, costs: Costs) -> float:
        rows = self._rows(placement)
        return float((rows * np.arange(rows.shape[1]) * self._prices(costs)).sum())

    def _rows(self, placement: Placement) -> Floats:
        return class_rows(placement, self.tally(placement.group_size)).astype(np.float64)

    def _view(self, size: int) -> tuple[list[Probe], Costs]:
        """The probes in groups of a size, and the reference: costs with all rows in the base table, and with
        all of c >= 2 shared."""
        if size not in self._views:
            while len(self._views) >= _VIEWS:
                del self._views[next(iter(self._views))]
            looks = self._survey.look(size)
            everything, several = [look.counts >= 1 for look in looks], [look.counts >= 2 for look in looks]
            rows = self._rows(Placement(size, PAPER))[Location.SHARED]
            self._views[size] = looks, self._measure(looks, everything, several, rows, None)
        return self._views[size]

    def measured(self, placement: Placement, leave_base: bool, given: bool = False) -> Candidate:
        """A placement as a candidate: its costs measured with the rows that it chooses."""
        looks, reference = self._view(placement.group_size)
        choices = [placement.choices(look.rows, look.counts) for look in looks]
        base, shared = [c == Location.BASE for c in choices], [c == Location.SHARED for c in choices]
        costs = self._measure(looks, base, shared, self._rows(placement)[Location.SHARED], reference)
        return Candidate(self._seconds(placement, costs), placement, costs, leave_base, given)

    def at(self, size: int, rounds: int = 1) -> list[Candidate]:
        """The candidates of a group size after so many rounds of choosing and measuring, or once the choice
        stays; best first."""
        if self._rounds.get(size, 0) < rounds:
            found: dict[Placement, Candidate] = {}
            for leave_base in (False, True):
                costs = self._view(size)[1]
                for _ in range(rounds):
                    placement = allot(
                        self.tally(size),
                        self._prices(costs),
                        self._layout.row_bytes,
                        self._disk_bytes,
                        leave_base,
                    )
                    if placement is None or placement in found:
                        break
                    found[placement] = self.measured(placement, leave_base)
                    costs = found[placement].costs
            self._found[size] = sorted(found.values(), key=lambda candidate: candidate.seconds)
            self._rounds[size] = rounds
        return self._found[size]

    def _near(self, size: int, factor: float) -> int:
        """A size about ``factor`` times as large, chosen so that the last group is about as large as the
        others; or the size itself."""
        groups = max(1, round(self._batches / (size * factor)))
        near = -(-self._batches // groups)
        while groups < self._batches and factor < 1 and near >= size:
            groups += 1
            near = -(-self._batches // groups)
        while groups > 1 and factor > 1 and near <= size:
            groups -= 1
            near = -(-self._batches // groups)
        return min(near, self._size_max) if factor > 1 or near < size else size

    def _climb(self, size: int) -> int:
        """From a size to better ones nearby, first in steps of half an octave, then of a quarter."""
        for step in (2**0.5, 2**0.25):
            better: int | None = size
            while better is not None:
                size, near = better, (self._near(better, step), self._near(better, 1 / step))
                better = min(
                    (s for s in near if self._best(s) < self._best(size)), key=self._best, default=None
                )
        return size

    def _best(self, size: int) -> float:
        return self.at(size)[0].seconds

    def run(self, sizes: Iterable[int] = ()) -> list[Candidate]:
        """The candidates, best first: all that were looked at. ``sizes``: group sizes to look at besides."""
        limit = self._disk_bytes // self._layout.row_bytes
        fit = smallest_fit(lambda size: float(self.tally(size)[1:].sum()), self._size_max, limit)
        start = fit or self._size_max
        far = {start, self._near(start, 1 / 6), self._near(start, 6)}
        best = self._climb(min(sorted(far), key=self._best))
        self.at(best, _ROUNDS)
        for size in sizes:
            self.at(size)
        found = [candidate for candidates in self._found.values() for candidate in candidates]
        found.append(self.measured(Placement(best, (int(Location.BASE),)), leave_base=True, given=True))
        paper = most_wanted(self.tally(start), limit)
        if fit:
            paper = Placement(fit, PAPER[:fit])
        found.append(self.measured(paper, leave_base=fit is None, given=True))
        return sorted(found, key=lambda candidate: candidate.seconds)

    def fitted(self, candidate: Candidate, tally: NDArray[np.int64]) -> Placement:
        """The candidate's placement, chosen again for exact counts, so that the limit holds."""
        row_bytes, limit, costs = self._layout.row_bytes, self._disk_bytes, candidate.costs
        given, rows = candidate.placement, limit // row_bytes
        bare = replace(given, split_count=0, split_fraction=0.0, split_choice=int(Location.BASE))
        if candidate.given and disk_rows(bare, tally) <= rows:
            return (
                split_class(bare, tally, rows, given.split_count, Location(given.split_choice))
                if given.split_count
                else bare
            )
        seconds = self._prices(costs)
        found = [
            allot(tally, seconds, row_bytes, limit, leave_base)
            for leave_base in {candidate.leave_base, False}
        ]
        if not any(found):
            found = [allot(tally, seconds, row_bytes, limit)]
        fits = [placement for placement in found if placement]
        return min(
            fits,
            key=lambda placement: self.worth(estimate(placement, tally, costs, row_bytes, self._model)),
        )

    def worth(self, forecast: Forecast) -> float:
        """Seconds of reading and writing, to compare placements by."""
        written = forecast.packed_rows + forecast.shared_rows * SHARED_WRITES
        return forecast.seconds + written * self._written_row_seconds
