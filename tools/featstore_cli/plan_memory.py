"""``featstore plan-memory``: where a memory budget goes, of a store or of numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from featstore_cli.options import SIZE, chosen_table, json_option, shared_options
from featstore_cli.output import print_json, show, table
from featstore_cli.sample import Fanouts

if TYPE_CHECKING:
    from featstore.loaders.memory_plan import PlannedSizes


@click.command("plan-memory", context_settings={"show_default": True})
@click.argument("store", required=False, type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(1), help="Instead of STORE: rows of the table.")
@click.option("--row-bytes", type=click.IntRange(1), help="Bytes of a row.")
@click.option("--edges", type=click.IntRange(0), help="Edges of the graph.  [default: no graph]")
@click.option("--as-given", is_flag=True, help="Rows lie in the order of their ids.")
@click.option("--table", "name", metavar="NAME", help="The table, where the store has several.")
@click.option(
    "--fanouts", metavar="N,N...", type=Fanouts(), default="10,5",
    help="Neighbours per node, hop by hop; -1 takes all.",
)  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=1024, help="Training nodes of a mini-batch.")
@click.option("--memory", type=SIZE, default="1GiB", help="The memory to divide.")
@json_option
@shared_options
def command(
    store: Path | None, nodes: int | None, row_bytes: int | None, edges: int | None, as_given: bool,
    name: str | None, fanouts: tuple[int, ...], batch_size: int, memory: int, as_json: bool,
) -> None:  # fmt: skip
    """Tell where the memory of a reader, and of a loader in mode online, goes: of STORE, or of numbers.

    \b
    featstore plan-memory store --memory 2GiB
    featstore plan-memory --nodes 111059956 --row-bytes 512 --edges 1615685872 --memory 16GiB
    """
    from featstore.loaders.memory_plan import plan_memory

    plan = plan_memory(_sizes(store, nodes, row_bytes, edges, as_given, name), memory, fanouts, batch_size)
    if as_json:
        print_json("featstore.memory-plan/1", plan.to_dict())
        return
    from featstore.units import format_bytes

    def lines(of: dict[str, int]) -> list[list[str]]:
        return [
            [use, format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}", f"{size / memory:.1%}"]
            for use, size in of.items()
        ]

    columns = ["use", "memory", "of it"]
    show(table(columns, lines(plan.reader), title=f"A reader of {format_bytes(memory)}"))
    show(f"The smallest reader has {format_bytes(plan.smallest_reader_bytes)}.\n")
    show(table(columns, lines(plan.loader), title=f"A loader of {format_bytes(memory)}, mode online"))
    show(
        f"The graph is {'read ' if plan.graph == 'from disk' else ''}{plan.graph}. A mini-batch has "
        f"{plan.batch_nodes_most:,} nodes at most, real ones fewer; {plan.kept_share:.1%} of all rows are "
        "kept."
    )
    if plan.loader["kept rows"] < 0:
        show(
            "Too little for two mini-batches of so many nodes: give more memory, or smaller mini-batches. "
            "store.loader_costs samples some, and knows what they really need."
        )


def _sizes(
    store: Path | None, nodes: int | None, row_bytes: int | None, edges: int | None, as_given: bool,
    name: str | None,
) -> PlannedSizes:  # fmt: skip
    from featstore.loaders.memory_plan import PlannedSizes

    numbers = {"--nodes": nodes, "--row-bytes": row_bytes, "--edges": edges, "--as-given": as_given or None}
    if store is None:
        if nodes is None or row_bytes is None:
            raise click.UsageError("give a STORE, or --nodes and --row-bytes")
        if name is not None:
            raise click.UsageError("--table is of a STORE")
        return PlannedSizes.of_numbers(nodes, row_bytes, edges or 0, as_given=as_given)
    given = [option for option, value in numbers.items() if value is not None]
    if given:
        raise click.UsageError(f"{given[0]} is of numbers instead of a STORE: leave one of both out")
    import featstore

    with featstore.open(store) as opened:
        chosen = chosen_table(opened, name)
        over = [
            graph for graph in opened.graphs.values()
            if chosen.name in (graph.table.name, graph.source_table.name)
        ]  # fmt: skip
        if len(over) > 1:
            raise click.UsageError(
                f"{len(over)} graphs are over table {chosen.name!r}, and the plan is for one: give --nodes, "
                f"--row-bytes and the --edges of all, {sum(graph.edges for graph in over)}"
            )
        return PlannedSizes.of_store(chosen, over[0] if over else None)
