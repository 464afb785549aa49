"""The samplers with all options in plain Python, over graphs with types or without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GOLDEN, MIX_A, MIX_B, WORD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64


def mix_twin(word: int) -> int:
    word %= WORD
    word = (word ^ (word >> 30)) * MIX_A % WORD
    word = (word ^ (word >> 27)) * MIX_B % WORD
    return word ^ (word >> 31)


def word_twin(key: int, number: int) -> int:
    return mix_twin(key + (number + 1) * GOLDEN)


def batch_key_twin(seed: int, epoch: int, batch_index: int) -> int:
    key = 0
    for word in (seed, epoch, batch_index):
        key = mix_twin(key + GOLDEN + word)
    return key


def relation_key_twin(key: int, name: str) -> int:
    mark = GOLDEN
    for byte in name.encode():
        mark = (mix_twin(mark ^ byte) + GOLDEN) % WORD
    return mix_twin(key ^ (mix_twin(mark) >> 1))


def exponential_twin(word: int) -> float:
    fraction, exponent = math.frexp(float((word >> 11) + 1))
    if fraction < math.sqrt(0.5):
        fraction, exponent = 2 * fraction, exponent - 1
    part = (fraction - 1) / (fraction + 1)
    series = 0.0
    for odd in range(23, 0, -2):
        series = series * (part * part) + 1 / odd
    return (53 - exponent) * math.log(2) - 2 * part * series


def floyd_twin(key: int, degree: int, fanout: int) -> list[int]:
    taken: list[int] = []
    for draw in range(fanout):
        top = degree - fanout + draw
        pick = word_twin(key, draw) * (top + 1) >> 64
        taken.append(top if pick in taken else pick)
    return taken


@dataclass
class Graph:
    """A relation: lists of sources, and of each edge a weight and a time, where there are any."""

    source: str
    target: str
    indptr: Sequence[int]
    indices: Sequence[int]
    fanouts: Sequence[int]
    name: str | None = None
    weights: Sequence[float] | None = None
    times: Sequence[int] | None = None


@dataclass
class Twin:
    """What came out. ``node`` and ``tree`` by type; of each relation ``row``, ``col`` and ``edge``."""

    node: dict[str, list[int]]
    tree: dict[str, list[int]]
    found: dict[str, list[int]]
    edges: list[list[tuple[int, int, int]]]
    per_hop: list[list[int]] = field(default_factory=list)


def choose(
    graph: Graph, key: int, node: int, fanout: int, replace: bool, last: bool, span: tuple[int, int] | None
) -> list[int]:
    """The edges that a node draws."""
    first = int(graph.indptr[node])
    edges = list(range(first, int(graph.indptr[node + 1])))
    if graph.times is not None and span is not None:
        times = graph.times
        edges = [edge for edge in edges if span[0] <= times[edge] <= span[1]]
        edges.sort(key=lambda edge: times[edge])
        if last and fanout >= 0:
            edges = edges[max(0, len(edges) - fanout) :]
    if graph.weights is None:
        if fanout < 0 or (len(edges) <= fanout and not replace):
            return edges
        if replace:
            return [edges[word_twin(key, j) * len(edges) >> 64] for j in range(fanout)] if edges else []
        return [edges[pick] for pick in floyd_twin(key, len(edges), fanout)]
    weights = graph.weights
    if replace and fanout >= 0:
        sums, total = [], 0.0
        for edge in edges:
            total += float(weights[edge])
            sums.append(total)
        if not total > 0:
            return []
        limits = [(word_twin(key, j) >> 11) * 2.0**-53 * total for j in range(fanout)]
        return [edges[next(k for k, one in enumerate(sums) if one > limit)] for limit in limits]
    some = [edge for edge in edges if weights[edge] > 0]
    if fanout < 0 or len(edges) <= fanout:
        return some
    drawn = {edge: exponential_twin(word_twin(key, edge - first)) / float(weights[edge]) for edge in some}
    return sorted(some, key=lambda edge: (drawn[edge], edge))[:fanout]


def sample_twin(
    types: Sequence[str], graphs: Sequence[Graph], seeds: Mapping[str, Sequence[int]], key: int, *,
    replace: bool = False, trees: bool = False, last: bool = False, induced: bool = False,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Twin:  # fmt: skip
    """``spans``: of each tree the first and the last time that it allows."""
    made = Twin({name: [] for name in types}, {name: [] for name in types}, {}, [[] for _ in graphs])
    tree = 0
    for name, given in seeds.items():
        for seed in given:
            made.node[name].append(int(seed))
            made.tree[name].append(tree if trees else 0)
            tree += 1
    made.found = {name: [len(made.node[name])] for name in types}
    made.per_hop = [[] for _ in graphs]
    local = {
        name: {pair: k for k, pair in enumerate(zip(made.node[name], made.tree[name]))} for name in types
    }
    begins = dict.fromkeys(types, 0)
    for hop in range(len(graphs[0].fanouts)):
        ends = {name: len(made.node[name]) for name in types}
        for number, graph in enumerate(graphs):
            own = key if graph.name is None else relation_key_twin(key, graph.name)
            hop_key = mix_twin(own + hop)
            before = len(made.edges[number])
            for position in range(begins[graph.target], ends[graph.target]):
                if graph.fanouts[hop] == 0:
                    continue
                node, tree = made.node[graph.target][position], made.tree[graph.target][position]
                node_key = mix_twin((word_twin(hop_key, tree) if trees else hop_key) ^ mix_twin(node))
                span = None if spans is None else spans[tree]
                for edge in choose(graph, node_key, node, graph.fanouts[hop], replace, last, span):
                    pair = (int(graph.indices[edge]), tree)
                    if pair not in local[graph.source]:
                        local[graph.source][pair] = len(made.node[graph.source])
                        made.node[graph.source].append(pair[0])
                        made.tree[graph.source].append(tree)
                    made.edges[number].append((local[graph.source][pair], position, edge))
            made.per_hop[number].append(len(made.edges[number]) - before)
        begins = ends
        for name in types:
            made.found[name].append(len(made.node[name]) - ends[name])
    if induced:
        for number, graph in enumerate(graphs):
            made.edges[number] = []
            for position, (node, tree) in enumerate(zip(made.node[graph.target], made.tree[graph.target])):
                span = None if spans is None else spans[tree]
                unweighted = Graph(
                    graph.source, graph.target, graph.indptr, graph.indices, (-1,), times=graph.times
                )
                for edge in choose(unweighted, 0, node, -1, False, False, span):
                    at = local[graph.source].get((int(graph.indices[edge]), tree))
                    if at is not None:
                        made.edges[number].append((at, position, edge))
    return made


def reverse_twin(
    edges: Sequence[tuple[int, int, int]], other: Sequence[tuple[int, int, int]] | None = None
) -> list[tuple[int, int, int]]:
    """Edges and their reverse, or that of other ones."""
    found: dict[tuple[int, int], int] = {}
    back = [(col, row, edge) for row, col, edge in edges]
    if other is not None:
        back = [(col, row, -1) for row, col, _ in other]
    for row, col, edge in [*edges, *back]:
        found.setdefault((col, row), edge)
    return [(row, col, edge) for (col, row), edge in sorted(found.items())]
