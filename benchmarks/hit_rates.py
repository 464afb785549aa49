"""How often is a row in memory already? Policies, orders of the training nodes and sizes of the buffer, on
real graphs and a generated one.

    python benchmarks/hit_rates.py --data FOLDER --dir /a/directory/on/the/ssd

The folder holds ``ogbn_arxiv_tape40.npz`` and ``coauthor_physics.npz``: ``indptr`` and ``indices``, the CSC
of incoming edges, ``labels`` and ``train_idx``. No features are read: mini-batches are sampled, and their
rows pass through the slot map of a feature buffer, one mini-batch after the other. The first epoch warms the
buffer up, the others are counted. Every figure but the time of the choice is the same each time.

``auto`` tries the policies on a sample of the first epoch (:mod:`featstore.tiers.slots.choose`); its figure
is that of the chosen policy in the epochs after that. MIN knows the future: no policy hits more often.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import Claim, Report, Settings, note, shared_options
from hit_traces import EPOCHS, FANOUTS, ORDERS, PLANS, Graph, Plan, Trace, load, next_uses, record
from numpy.typing import NDArray

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)  # of the nodes, slots
POLICIES = ("fifo", "clock", "sieve", "lru", "s3-fifo", "score")
STATIC = ("static, degree", "static, seen")
WITHIN_POINTS = 3.0
GENERATED_NODES = 2_000_000
QUICK_NODES = 100_000


@dataclass
class Cell:
    """One graph, order and size: hit rates in per cent by policy (none where a mini-batch does not fit), and
    what auto chose."""

    order: str
    share: float
    rows: int  # of the epochs that count
    rates: dict[str, float] = field(default_factory=dict)
    choice: str = ""
    auto: float = 0.0

    @property
    def best(self) -> float:
        return max(rate for name, rate in self.rates.items() if name != "min")

    def reads(self, name: str) -> float:
        """Rows read in an epoch, in thousands."""
        return self.rows * (1 - self.rates[name] / 100) / (EPOCHS - 1) / 1000


@dataclass
class Cost:
    """What the choice took: seconds, and rows that it saw."""

    seconds: float = 0.0
    rows: int = 0
    memory_bytes: int = 0


def hit_rate(
    trace: Trace, slots: int, name: str, uses: NDArray[np.int32] | None = None, kept: Any = None
) -> float:
    """Per cent of the rows of all epochs but the first that were in the buffer."""
    from featstore.tiers.slots.choose import hold, replay
    from featstore.tiers.slots.layout import HITS, MIN, MISSES, STATIC, make_slot_map
    from featstore.tiers.slots.layout import POLICIES as NUMBERS
    from featstore.tiers.slots.slots import NO_NEXT_USE

    batches = len(trace.offsets) - 1
    m = make_slot_map(slots, NUMBERS[name], batches=batches if NUMBERS[name] == MIN else 0)
    if NUMBERS[name] == STATIC:
        hold(m, np.ascontiguousarray(kept, np.int64))
    given = NO_NEXT_USE if uses is None else uses
    replay(m, trace.rows, trace.part(0, 1), given, False)
    m.counts[[HITS, MISSES]] = 0
    replay(m, trace.rows, trace.part(1, EPOCHS), given, False)
    return 100 * float(m.counts[HITS]) / float(m.counts[HITS] + m.counts[MISSES])


def measure_cell(
    graph: Graph, trace: Trace, order: str, share: float, uses: NDArray[np.int32], cost: Cost
) -> Cell:
    from featstore.tiers.slots.choose import STATIC_SPARE, PolicyChoice

    slots = round(share * graph.nodes)
    counted = trace.part(1, EPOCHS)
    cell = Cell(order, share, int(counted[-1] - counted[0]))
    if slots < trace.largest_rows:
        return cell
    cell.rates = {name: hit_rate(trace, slots, name) for name in POLICIES}
    wanted = slots - STATIC_SPARE * trace.largest_rows
    if wanted > 0:
        degree = np.diff(graph.indptr)
        seen = np.bincount(trace.rows[: trace.offsets[trace.epochs[1]]], minlength=graph.nodes)
        for name, ranks in zip(STATIC, ((degree,), (degree, seen)), strict=True):
            cell.rates[name] = hit_rate(trace, slots, "static", kept=np.lexsort(ranks)[::-1][:wanted])
    cell.rates["min"] = hit_rate(trace, slots, "min", uses)
    choice = PolicyChoice(slots, graph.nodes)
    begin = time.perf_counter()
    for rows in trace.batches(0):
        choice.observe(rows)
    cell.choice = choice.decide()
    cost.seconds += time.perf_counter() - begin
    cost.rows += int(trace.offsets[trace.epochs[1]])
    cost.memory_bytes = max(cost.memory_bytes, choice.memory_bytes)
    if cell.choice == "static":
        cell.auto = hit_rate(trace, slots, "static", kept=np.concatenate(list(choice.static_ids())))
    else:
        cell.auto = cell.rates[cell.choice]
    note(
        f"  {order}, {100 * share:g} %: {cell.choice} {cell.auto:.1f}, best {cell.best:.1f}; "
        f"{choice.hit_rates}"
    )
    return cell


def fill(report: Report, plan: Plan, graph: Graph, cells: list[Cell], facts: list[list[Any]]) -> None:
    """A graph's table and claims."""
    names = [*POLICIES, *STATIC]
    rows = []
    for cell in cells:
        shown = [cell.rates.get(name) for name in (*names, "min")]
        auto = [f"{cell.auto:.2f} ({cell.choice})", cell.best - cell.auto] if cell.rates else [None, None]
        rows.append([cell.order, f"{100 * cell.share:g} %", *shown, *auto])
    columns = ["order", "slots, of the nodes", *names, "MIN", "auto", "best minus auto, points"]
    report.table(f"{plan.title}: hit rate, %", columns, rows)
    report.table(
        f"{plan.title}: {graph.nodes:,} nodes, {len(graph.indices):,} stored edges, "
        f"{len(graph.train):,} training nodes, {plan.batch_size} a mini-batch; {plan.partitions} "
        f"partitions by {plan.method}",
        ["order", "sequences", "rows an epoch", "rows of the largest mini-batch", "of the nodes, %"],
        facts,
    )
    done = [cell for cell in cells if cell.rates]
    if done:
        worst = max(cell.best - cell.auto for cell in done)
        report.claims.append(
            Claim(
                f"{plan.title}: best policy minus auto, largest of {len(done)} cells",
                worst,
                WITHIN_POINTS,
                "<=",
                "points",
            )
        )


#: What FIFO in proximity order is held against: a cache, and the order it is used in.
_RIVALS = tuple((name, order) for order in ("random", "proximity") for name in STATIC)


def compare_static(report: Report, cells: dict[str, list[Cell]]) -> None:
    """BGL's claim: FIFO in proximity order hits more often than a static cache."""
    rows = []
    for title, some in cells.items():
        by = {(cell.order, cell.share): cell for cell in some if STATIC[0] in cell.rates}
        shares = [share for share in SHARES if all((order, share) in by for order in ORDERS)]
        wins = dict.fromkeys(_RIVALS, 0)
        for share in shares:
            fifo = by["proximity", share].rates["fifo"]
            rivals = {(name, order): by[order, share].rates[name] for name, order in _RIVALS}
            for key, rate in rivals.items():
                wins[key] += fifo > rate
            shown = [f"{rate:.2f} ({'holds' if fifo > rate else 'does not'})" for rate in rivals.values()]
            reads = [by[order, share].reads(name) for name, order in (("fifo", "proximity"), *_RIVALS[::2])]
            rows.append([title, f"{100 * share:g} %", fifo, *shown, *reads])
        for (name, order), count in wins.items():
            text = (
                f"{title}: sizes, of {len(shares)}, at which FIFO, proximity order, beats a cache that is "
                f"{name}, {order} order"
            )
            report.claims.append(Claim(text, count))
    title = (
        "Does BGL's claim hold? FIFO in proximity order against static caches: hit rates, %, and rows read "
        "in an epoch, thousands"
    )
    report.table(title, [
        "graph", "slots, of the nodes", "FIFO, proximity", *(f"{name}, {order}" for name, order in _RIVALS),
        "reads: FIFO, proximity", *(f"reads: {name}, {order}" for name, order in _RIVALS[::2]),
    ], rows)  # fmt: skip


@click.command()
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder of the real graphs.",
)
@click.option("--sets", "names", multiple=True, type=click.Choice(list(PLANS)),
              help="[default: all of them; without --data the generated one]")  # fmt: skip
@shared_options(size="1", quick_size="1", rounds=1)
def main(settings: Settings, folder: Path | None, names: tuple[str, ...]) -> None:
    """Hit rates by policy, order and size. --size and --rounds mean nothing here."""
    names = names or (tuple(PLANS) if folder is not None else ("generated",))
    nodes = QUICK_NODES if settings.quick else GENERATED_NODES
    report = Report("hit_rates", "Hit rates of feature buffers", {
        "fanouts": list(FANOUTS), "epochs": EPOCHS, "shares": list(SHARES), "graphs": list(names),
        "generated_nodes": nodes,
    }, settings.workspace)  # fmt: skip
    cost, cells = Cost(), {}
    for name in names:
        plan = PLANS[name]
        graph = load(plan, folder, settings.workspace, nodes)
        found, facts = [], []
        for order in ORDERS:
            trace = record(graph, plan, order)
            uses = next_uses(trace, graph.nodes)
            found += [measure_cell(graph, trace, order, share, uses, cost) for share in SHARES]
            facts.append([
                order, trace.sequences or None, len(trace.rows) // EPOCHS, trace.largest_rows,
                100 * trace.largest_rows / graph.nodes
            ])  # fmt: skip
            del trace, uses
        cells[plan.title] = found
        fill(report, plan, graph, found, facts)
    compare_static(report, cells)
    report.claims += [
        Claim(
            "auto: time of the choice for each row of a mini-batch",
            1e9 * cost.seconds / max(1, cost.rows),
            unit="ns",
        ),
        Claim("auto: memory of the choice at most", cost.memory_bytes / 2**20, unit="MiB"),
    ]
    report.notes = [
        f"Fan-outs {list(FANOUTS)}; {EPOCHS} epochs, the first is not counted. One mini-batch is in "
        "use at a time; all are small, so that 1 % of the nodes holds some. A cell is empty where the "
        "largest mini-batch has more rows than there are slots.",
        "Static caches keep the rows of the highest degree, or those used most in the first epoch, in "
        "all slots but those of two of the largest mini-batches (where more is left than that); "
        "through these the other rows pass, first in, first out.",
        "MIN knows the whole trace; no policy hits more often. Auto was chosen from a sample of the "
        "first epoch, and is judged by the others; its figure is that of the chosen policy, used from "
        "the start.",
        "BGL's claim is about a static cache by degree in random order. In proximity order that cache "
        "gains as well, by the rows that pass through it. Mini-batches in proximity order have fewer "
        "rows, too, so rows read say more than hit rates.",
    ]
    report.save(settings.out, settings.quick)


if __name__ == "__main__":
    main()
