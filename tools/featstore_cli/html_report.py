"""``featstore inspect STORE --html``: one page that needs nothing else, of what a store is and how it would
be read here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from featstore.base.sheets import STYLE, Grid, safe
from featstore.errors import BudgetError
from featstore.units import format_bytes
from featstore_cli.charts import columns, curves, heat, stacks
from featstore_cli.graph_facts import GraphFacts, look_at_graph

#: Tables, graphs and compiled traces that have charts of their own; bars of a chart of partitions.
CHARTED_MAX, BARS_MAX = 8, 200
_BUDGETS, _POINTS = 7, 200
_REQUEST_SIZES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
#: What is warned of: the largest partition over the median, the edge cut, bytes read over bytes asked for.
_UNEVEN, _CUT, _AMPLIFIED = 4, 0.5, 4
_COMPARE = "compare orders: featstore inspect STORE --orders"
_SOURCES = ("device", "memory", "packed", "shared", "base")

_PAGE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:1.5em auto;padding:0 1em}
:root{color-scheme:light dark}h1{font-size:1.4em;overflow-wrap:anywhere}h2{font-size:1.15em;margin-top:2em}
svg.chart{width:100%;max-width:44rem;height:auto;font-size:11px}
svg.mark{width:.7em;height:.7em}.legend span{margin-right:1em}.why{opacity:.8;font-style:italic}"""

_ONE_PARTITION = '<p class="why">Not shown: there is one partition; order by a graph makes more</p>'
_NO_EDGES = '<p class="why">Not shown: the graph has no edges</p>'

Tell = Callable[[str, float, float | None], None]


class NotThere(Exception):
    """A section has nothing to show; the text says why."""


def page(store: Any, data: dict[str, Any], run: Any, memory_bytes: int, tell: Tell) -> str:
    """The report of an open store as HTML. ``data``: as ``inspect --json`` has it; ``run``: the LoaderReport
    or ReaderStats of a run, or None."""
    facts: dict[str, GraphFacts | str] = {}
    for name, graph in list(store.graphs.items())[:CHARTED_MAX]:
        try:
            facts[name] = look_at_graph(graph, memory_bytes, tell)
        except BudgetError as error:
            facts[name] = str(error)
    sections: list[tuple[str, Callable[[], str]]] = [
        ("What to do", lambda: _warnings(data, facts, run)),
        ("The store", lambda: _tables(data)),
        ("Memory of a reader by use, over budgets", lambda: _budgets(store)),
        ("Worth of a static tier", lambda: _each(store, facts, lambda name, one: _covered(store, name, one))),
        ("Sizes of partitions", lambda: _partitions(store)),
        ("Edges between partitions", lambda: _each(store, facts, lambda n, one: _between(store, n, one))),
        ("Degrees and hubs", lambda: _each(store, facts, _degrees)),
        ("Forecast of rates over sizes of requests", lambda: _rates(store, data, memory_bytes)),
        ("Compiled traces: where rows come from", lambda: _compiled(data)),
        ("The run", lambda: _run(run)),
    ]
    body = []
    for title, draw in sections:
        try:
            drawn = draw()
        except (NotThere, BudgetError) as why:
            drawn = f'<p class="why">Not shown: {safe(why)}</p>'
        body.append(f"<section><h2>{title}</h2>{drawn}</section>")
    return document(store.path.name, str(store.path), "".join(body))


def document(title: str, heading: str, body: str) -> str:
    """A page that needs nothing else. ``body`` is HTML, the others are texts."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>featstore: {safe(title)}</title><style>{STYLE}{_PAGE}</style></head>"
        f'<body class="fs"><h1>{safe(heading)}</h1>{body}</body></html>\n'
    )


def _each(store: Any, facts: dict[str, GraphFacts | str], draw: Callable[[str, GraphFacts], str]) -> str:
    """Something of each graph that was looked at."""
    if not facts:
        raise NotThere("the store has no graph; pack it with one (--graph)")
    drawn = "".join(
        f"<h4>graph {safe(name)}</h4>"
        + (f'<p class="why">Not shown: {safe(one)}</p>' if isinstance(one, str) else draw(name, one))
        for name, one in facts.items()
    )
    return drawn + _left_out(store.graphs, "graphs")


def _left_out(things: Any, what: str) -> str:
    """That there are more of something than are drawn."""
    more = len(things) - CHARTED_MAX
    return f"<p>and {more:,} more {what}, not drawn: inspect --json has them</p>" if more > 0 else ""


def _tables(data: dict[str, Any]) -> str:
    rows = [
        [n, "x".join(map(str, t["row_shape"])) + f" {t['dtype']}", t["order"]["method"], f"{t['rows']:,}",
         format_bytes(t["bytes"])]
        for n, t in data["tables"].items()
    ]  # fmt: skip
    identity = (
        f"{sum(t['rows'] for t in data['tables'].values()):,} rows; {data['files']['count']:,} files, "
        f"{format_bytes(data['files']['bytes'])}; format {data['format_version']}, {data['uuid']}, "
        f"generation {data['generation']}"
    )
    graphs = [
        [n, f"{g['nodes']:,}", f"{g['edges']:,}", format_bytes(g["bytes"])] for n, g in data["graphs"].items()
    ]
    drawn = Grid(("table", "row", "order", "rows", "bytes"), rows, left=3).html()
    if graphs:
        drawn += Grid(("graph", "nodes", "edges", "bytes"), graphs).html()
    return f"<p>{safe(identity)}</p>{drawn}"


def _charted(store: Any) -> list[Any]:
    """The largest tables that have rows of bytes."""
    tables = [t for t in store.tables.values() if t.rows and t.name not in store.featureless]
    if not tables:
        raise NotThere("no table has features")
    return sorted(tables, key=lambda t: -t.data_bytes)


def _budgets(store: Any) -> str:
    from featstore.plan.budget import Budget
    from featstore.reader.lookup import table_need

    tables = _charted(store)
    needs, whole = [table_need(t, True) for t in tables], sum(t.data_bytes for t in tables)
    low, high = Budget.smallest(needs, 0), Budget.smallest(needs, whole)
    uses = ("row maps", "checksums", "staging", "scratch", "static rows", "unused")
    rows = {}
    for k in range(_BUDGETS):
        budget = int(low * (high / low) ** (k / (_BUDGETS - 1)))
        b = Budget.split(max(low, budget), needs)
        held = min(whole, b.tier_bytes)
        rows[format_bytes(b.memory_bytes)] = (
            b.row_map_bytes, b.checksum_bytes, b.staging_bytes, b.scratch_bytes, held, b.tier_bytes - held,
        )  # fmt: skip
    said = f"The smallest budget is {format_bytes(low)}; from {format_bytes(high)} on all rows fit in memory."
    table = Grid(("budget", *uses), [[name, *map(format_bytes, parts)] for name, parts in rows.items()])
    return f"<p>{said}</p>{stacks(rows, uses, 'memory by use', format_bytes)}{table.html()}"


def _spread(count: int) -> list[int]:
    """Numbers from 1 to ``count``, as evenly by their logarithms as there are."""
    return sorted({max(1, round(count ** (k / _POINTS))) for k in range(_POINTS + 1)})


def _covered(store: Any, name: str, one: GraphFacts) -> str:
    covered, graph = one.covered(), store.graphs[name]
    if not len(covered) or not covered[-1]:
        return _NO_EDGES
    nodes, row_bytes = len(covered), graph.table.row_bytes

    def held(count: int) -> str:
        return format_bytes(count * row_bytes) if graph.source_table is graph.table else "of two tables"

    # The knee: where the curve is furthest above the straight line, and as steep as that.
    knee = max(1, int((one.degrees > one.degrees.mean()).sum()))
    drawn = curves(
        {"ends of edges": [(k / nodes * 100, float(covered[k - 1]) * 100) for k in _spread(nodes)]},
        "% of the nodes, highest degrees first, in memory", "% of ends of edges", log_x=True,
        marked=(knee / nodes * 100, f"{knee / nodes:.1%} of the nodes: {covered[knee - 1]:.1%}"),
    )  # fmt: skip
    said = (
        f"The first {knee:,} nodes ({held(knee)}) have {covered[knee - 1]:.1%} of the ends of edges; each "
        "further one has the mean of all at most."
    )
    rows = []
    for share in (0.001, 0.01, 0.05, 0.1, 0.2, 0.5):
        k = max(1, round(share * nodes))
        rows.append([f"{share:.1%}", f"{k:,}", held(k), f"{covered[k - 1]:.1%}"])
    table = Grid(("of the nodes", "nodes", "their rows", "ends of edges"), rows, left=0)
    return f"<p>{said}</p>{drawn}{table.html()}"


def _partitions(store: Any) -> str:
    import numpy as np

    drawn = []
    for table in _charted(store)[:CHARTED_MAX]:
        sizes = np.diff(table.partition_offsets)
        heading = f"<h4>table {safe(table.name)}: {len(sizes):,} partition{'s' * (len(sizes) != 1)}</h4>"
        if len(sizes) < 2:
            drawn.append(heading + _ONE_PARTITION)
            continue
        said = f"rows: smallest {sizes.min():,}, median {int(np.median(sizes)):,}, largest {sizes.max():,}"
        bars = [float(part.mean()) for part in np.array_split(sizes, min(BARS_MAX, len(sizes)))]
        grouped = "" if len(bars) == len(sizes) else "; a bar is the mean of some in a row"
        drawn.append(f"{heading}<p>{said}{grouped}</p>{columns(bars, 'partitions, as on disk', 'rows')}")
    return "".join(drawn) + _left_out(_charted(store), "tables")


def _between(store: Any, name: str, one: GraphFacts) -> str:
    if one.between.size < 2:
        return _ONE_PARTITION
    cut = "" if one.cut is None else f"{one.cut:.1%} of the edges join two partitions. "
    groups, graph = " x ".join(map(str, one.between.shape)), store.graphs[name]
    said = f"{cut}{groups} groups of partitions, numbered by their first; fuller squares have more edges."
    parts = [len(table.partition_offsets) - 1 for table in (graph.source_table, graph.table)]
    drawn = heat(
        one.between.tolist(), f"edges between partitions of graph {name}", "partitions of sources",
        "partitions of targets", (parts[0], parts[1]),
    )  # fmt: skip
    return f"<p>{said}</p>{drawn}"


def _degrees(name: str, one: GraphFacts) -> str:
    import numpy as np

    some = one.degrees[one.degrees > 0]
    if not len(some):
        return _NO_EDGES
    counts = np.bincount(np.log2(some).astype(np.int64))
    points = [(float(1 << k), float(count)) for k, count in enumerate(counts) if count]
    said = (
        f"edges in and out of a node: highest {some[0]:,}, median {int(np.median(one.degrees)):,}, "
        f"mean {one.degrees.mean():,.1f}; {len(one.degrees) - len(some):,} nodes without edges"
    )
    total = int(one.degrees.sum())
    rows = [[t, str(node), f"{degree:,}", f"{degree / total:.2%}"] for t, node, degree in one.hubs]
    drawn = curves(
        {"nodes": points}, "degree (in and out), to twice as much", "nodes", log_x=True, log_y=True,
        joined=False,
    )  # fmt: skip
    hubs = Grid(("table", "hub (node id)", "in and out", "of all ends of edges"), rows, left=2)
    return f"<p>{said}</p>{drawn}{hubs.html()}"


def _rates(store: Any, data: dict[str, Any], memory_bytes: int) -> str:
    import numpy as np

    from featstore.reader.reader import Reader

    series: dict[str, list[tuple[float, float]]] = {}
    random = np.random.default_rng(0)
    tables = _charted(store)
    for table in tables[:CHARTED_MAX]:
        sizes = sorted({min(size, table.rows) for size in _REQUEST_SIZES})
        with Reader(store, tables=[table.name], memory=memory_bytes, static=None, by_row=True) as reader:
            for size in sizes:
                ids = random.choice(table.rows, size, replace=False)
                seconds = reader.plan({table.name: ids}).forecast_seconds
                series.setdefault(table.name, []).append((float(size), size / seconds))
    model = data["reading"]["model"]
    said = "the device's own prices" if model["calibrated"] else "prices that were assumed, not measured"
    rows = [[name, f"{int(n):,}", f"{rate:,.0f}"] for name, points in series.items() for n, rate in points]
    drawn = curves(series, "random rows of a request", "rows a second", log_x=True, log_y=True)
    table_of = Grid(("table", "rows of a request", "rows a second"), rows)
    return f"<p>One request at a time, no row in memory, by {said}.</p>{drawn}{table_of.html()}" + _left_out(
        tables, "tables"
    )


def _compiled(data: dict[str, Any]) -> str:
    if not data["compiled"]:
        raise NotThere("the store has no compiled trace; featstore pack STORE --trace makes one")
    rows: dict[str, tuple[float, ...]] = {}
    remarks = []
    for one in data["compiled"]:
        tables = one.get("forecast", {}).get("tables", {})
        if not tables:
            because = one.get("because", "its writer says nothing of what it expects")
            remarks.append(f"{one['name']}: {because}")
        for name, t in tables.items():
            device = t["asked_rows"] - t["hit_rows"] - t["missed_rows"]
            parts = device, t["hit_rows"], t["packed_rows"], t["shared_reads_rows"], t["base_rows"]
            rows[f"{one['name']}: {name}"] = parts
    drawn = dict(list(rows.items())[:CHARTED_MAX])
    chart = stacks(drawn, _SOURCES, "rows by source", lambda n: f"{n:,.0f} rows") if drawn else ""
    table = Grid(("trace: table", *_SOURCES), [[n, *(f"{x:,}" for x in p)] for n, p in rows.items()])
    said = "".join(f"<p>{safe(text)}</p>" for text in remarks)
    return chart + (table.html() if rows else "") + said + _left_out(rows, "tables of traces")


def _run(run: Any) -> str:
    from featstore.loaders.report import report_sheet
    from featstore.reader.report import ReaderStats
    from featstore.reader.sheets import stats_sheet

    if run is None:
        raise NotThere(
            "no run was given: save one with loader.report().save('run.json') or reader.stats().save(...), "
            "and give it as --stats run.json"
        )
    return (stats_sheet(run) if isinstance(run, ReaderStats) else report_sheet(run)).html()


def _warnings(data: dict[str, Any], facts: dict[str, GraphFacts | str], run: Any) -> str:
    rows = [*_of_store(data), *_of_graphs(facts), *_of_run(run)]
    if not rows:
        return "<p>Nothing was found.</p>"
    items = "".join(f"<li>{safe(what)}: <strong>{safe(remedy)}</strong></li>" for what, remedy in rows)
    return f"<ul>{items}</ul>"


def _of_store(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with a store or how it is read, and what to do."""
    reading, found = data["reading"], []
    if not reading["model"]["calibrated"]:
        found.append(("forecasts go by assumed prices of reads", "run featstore calibrate STORE"))
    if reading["access"] != "direct":
        what = f"reads go through the page cache ({reading['access_because']})"
        found.append((what, "move the store to a file system with direct I/O"))
    if data["read_only_because"]:
        what = f"the store is read-only: {data['read_only_because']}"
        found.append((what, "use a newer featstore to write to it"))
    for name, t in data["tables"].items():
        for key, kind in (("nan", "NaN"), ("inf", "infinite"), ("overflowed", "made infinite by a cast")):
            count = t["statistics"].get(key)
            if isinstance(count, int) and count:
                what = f"of the values of table {name} {count:,} are {kind}"
                found.append((what, "look at the source, and pack again"))
        rows = t["partitions"]["rows"]
        if t["partitions"]["count"] > 1 and rows["max"] > _UNEVEN * max(1, rows["median"]):
            times = rows["max"] / max(1, rows["median"])
            what = f"the largest partition of table {name} is {times:.1f} times the median"
            found.append((what, _COMPARE))
    for one in data["compiled"]:
        if "because" in one:
            what = f"compiled trace {one['name']} cannot be used: {one['because']}"
            found.append((what, "compile it again, or remove it with featstore gc STORE --stale"))
    return found


def _of_graphs(facts: dict[str, GraphFacts | str]) -> list[tuple[str, str]]:
    found = []
    for name, one in facts.items():
        if isinstance(one, str):
            found.append((f"graph {name} was not looked at: {one}", "give more --memory"))
        elif one.cut is not None and one.between.size > 1 and one.cut > _CUT:
            what = f"{one.cut:.0%} of the edges of graph {name} join two partitions, so that mini-batches"
            found.append((f"{what} are spread over the disk", _COMPARE))
    return found


def _of_run(run: Any) -> list[tuple[str, str]]:
    from featstore.reader.report import ReaderStats

    if run is None:
        return []
    if isinstance(run, ReaderStats):
        if run.amplification <= _AMPLIFIED:
            return []
        what = f"{run.amplification:.1f} bytes were read for each byte asked for"
        return [(what, "ask for more rows at once, or order the store by its graph")]
    waited, trained = run.seconds.get("wait", 0.0), run.seconds.get("train", 0.0)
    if waited <= trained or trained < 0.05:  # a loop that did nothing was no training
        return []
    what = f"the loop waited {waited:,.1f} s and trained {trained:,.1f} s; {run.slowest} was busy longest"
    return [(what, "give more memory, or take another mode: featstore loader-costs STORE")]
