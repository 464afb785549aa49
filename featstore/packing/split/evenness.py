"""Hosts that have too much of something give partitions to others, or exchange them: those that cost the
fewest cut edges for the evenness that they bring."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.order.coarsen import CoarseGraph

#: The most of rows, or of training nodes, that a host may have over the mean.
BALANCE = 1.05
_SWAPS_MAX = 64
_PAIRS_MAX = 1 << 31  # that are looked at for swaps, all of them for each


@njit(cache=True, nogil=True)
def best_move(
    xadj: NDArray[np.int64], adjacency: NDArray[np.int64], edge_weights: NDArray[np.int64],
    weights: NDArray[np.float64], part: NDArray[np.int32], loads: NDArray[np.float64],
    most: NDArray[np.float64], crowded: int, counts: NDArray[np.int64], hard: int,
) -> tuple[int, int]:  # fmt: skip
    """The vertex of host ``crowded`` and the host to which it should go: of all moves that lower what hosts
    have beyond ``most`` float64 [kinds], the one of the fewest further cut edges for that; (-1, -1) where
    none does. ``weights`` float64 [vertices, kinds], ``loads`` float64 [hosts, kinds]; ``counts`` int64
    [hosts], zeros."""
    found, target, least = -1, -1, np.inf
    for v in range(part.size):
        if part[v] != crowded:
            continue
        for i in range(xadj[v], xadj[v + 1]):
            counts[part[adjacency[i]]] += edge_weights[i]
        for host in range(loads.shape[0]):
            if host == crowded:
                continue
            relief, allowed = 0.0, True
            for kind in range(most.size):
                here, there, weight = loads[crowded, kind], loads[host, kind], weights[v, kind]
                allowed = allowed and (kind >= hard or weight == 0 or there + weight <= most[kind] + 1e-9)
                relief += max(0.0, here - most[kind]) - max(0.0, here - weight - most[kind])
                relief += max(0.0, there - most[kind]) - max(0.0, there + weight - most[kind])
            if allowed and relief > 1e-9:
                price = (counts[crowded] - counts[host]) / relief
                if price < least:
                    found, target, least = v, host, price
        for i in range(xadj[v], xadj[v + 1]):
            counts[part[adjacency[i]]] = 0
    return found, target


@njit(cache=True, nogil=True)
def best_swap(
    xadj: NDArray[np.int64], adjacency: NDArray[np.int64], edge_weights: NDArray[np.int64],
    weights: NDArray[np.float64], part: NDArray[np.int32], loads: NDArray[np.float64],
    most: NDArray[np.float64], crowded: int, hard: int,
) -> tuple[int, int]:  # fmt: skip
    """The same of changing places: the vertex of host ``crowded``, and that of another host. Where edges are
    not cut any more, more relief is better, too."""
    found, other, least, most_relief = -1, -1, np.inf, 0.0
    # Edges of each vertex to its own host, and to the crowded one; of the one that is looked at to each other
    # vertex, and to each host.
    inside, toward = np.zeros(part.size, np.int64), np.zeros(part.size, np.int64)
    near, reach = np.zeros(part.size, np.int64), np.zeros(loads.shape[0], np.int64)
    for v in range(part.size):
        for i in range(xadj[v], xadj[v + 1]):
            inside[v] += edge_weights[i] * (part[adjacency[i]] == part[v])
            toward[v] += edge_weights[i] * (part[adjacency[i]] == crowded)
    for u in range(part.size):
        if part[u] != crowded:
            continue
        for i in range(xadj[u], xadj[u + 1]):
            near[adjacency[i]] += edge_weights[i]
            reach[part[adjacency[i]]] += edge_weights[i]
        for v in range(part.size):
            host = part[v]
            if host == crowded:
                continue
            relief, allowed = 0.0, True
            for kind in range(most.size):
                here, there = loads[crowded, kind], loads[host, kind]
                more = weights[v, kind] - weights[u, kind]
                worst = max(here + more - max(here, most[kind]), there - more - max(there, most[kind]))
                allowed = allowed and (kind >= hard or worst <= 1e-9)
                relief += max(0.0, here - most[kind]) - max(0.0, here + more - most[kind])
                relief += max(0.0, there - most[kind]) - max(0.0, there - more - most[kind])
            if allowed and relief > 1e-9:
                cut = inside[u] - reach[host] + inside[v] - toward[v] + 2 * near[v]
                price = cut / relief if cut > 0 else cut * relief
                if price < least or (price == least and relief > most_relief):
                    found, other, least, most_relief = u, v, price, relief
        for i in range(xadj[u], xadj[u + 1]):
            near[adjacency[i]] = 0
            reach[part[adjacency[i]]] = 0
    return found, other


def mend(
    coarse: CoarseGraph, amounts: list[NDArray[np.int64]], part: NDArray[np.int32], hosts: int, hard: int = 0
) -> bool:
    """Move vertices in ``part``, in place, or have two change places, until no host has more than it may of
    any kind of ``amounts`` int64 [vertices] each (:func:`most_of`), none of which makes one of the first
    ``hard`` kinds uneven; whether that could be done."""
    means = [max(1, int(amount.sum())) / hosts for amount in amounts]
    weights = np.stack([amount / mean for amount, mean in zip(amounts, means, strict=True)], axis=1)
    most = np.array([most_of(int(a.sum()), hosts) / mean for a, mean in zip(amounts, means, strict=True)])
    loads = np.zeros((hosts, len(amounts)))
    np.add.at(loads, part, weights)
    counts, swaps = np.zeros(hosts, np.int64), min(_SWAPS_MAX, _PAIRS_MAX // max(1, part.size) ** 2)
    arrays = (coarse.xadj, coarse.adjacency, coarse.edge_weights, weights, part, loads, most)

    def move(vertex: int, target: int) -> None:
        loads[part[vertex]] -= weights[vertex]
        loads[target] += weights[vertex]
        part[vertex] = target

    for _ in range(4 * part.size):
        beyond = np.maximum(loads - most, 0.0).sum(axis=1)
        crowded = [int(host) for host in np.argsort(-beyond, kind="stable") if beyond[host] > 1e-9]
        if not crowded:
            return True
        moves = (best_move(*arrays, host, counts, hard) for host in crowded)
        vertex, target = next((found for found in moves if found[0] >= 0), (-1, -1))
        if vertex >= 0:
            move(vertex, target)
            continue
        pairs = (best_swap(*arrays, host, hard) for host in crowded if swaps > 0)
        vertex, other = next((found for found in pairs if found[0] >= 0), (-1, -1))
        if vertex < 0:
            return False
        swaps, here, there = swaps - 1, int(part[vertex]), int(part[other])
        move(vertex, there)
        move(other, here)
    return bool((loads <= most + 1e-9).all())


def most_of(total: int, hosts: int) -> float:
    """What a host may have of so many: :data:`BALANCE` of the mean, or the next number above it."""
    return max(BALANCE * total / hosts, total // hosts + 1)
