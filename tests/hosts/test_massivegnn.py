"""MassiveGNN's buffer, held against the paper's text as plain loops: what is kept, what is scored, what is
fetched, and that every row is the source's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import ArgumentError, BudgetError, PeerError
from featstore.hosts.halo import Halo
from featstore.hosts.massivegnn import HaloScores, MassiveGNNTier
from featstore.testing import ArraySource
from featstore.tiers import saved

NODES = 400


class Plain:
    """The algorithm, node by node; ``alpha`` is compared with what multiplying gives. Of several of one score
    the one in the first slot goes, which is nobody's rule, but ours."""

    def __init__(self, halo: Halo, share: float, gamma: float, delta: int, alpha: float | None) -> None:
        ids = [int(one) for one in halo.ids]
        self.degree = dict(zip(ids, halo.degrees.tolist(), strict=True))
        ranked = sorted(ids, key=lambda node: (-self.degree[node], node))
        self.gamma, self.delta, self.step = np.float32(gamma), delta, 0
        self.alpha = np.float32(1) if alpha is None else np.float32(alpha)
        if alpha is None:
            for _ in range(delta):
                self.alpha = np.float32(self.alpha * self.gamma)
        self.slots = ranked[: int(share * len(ids))]
        self.stay = {node: np.float32(1) for node in self.slots}  # S_E
        self.access = {node: np.float32(0) for node in ids if node not in self.stay}  # S_A

    def batch(self, wanted: set[int]) -> tuple[set[int], set[int]]:
        """What is missed, and what comes into the buffer."""
        self.step += 1
        misses = wanted - set(self.stay)
        for node in set(self.stay) - wanted:
            self.stay[node] = np.float32(self.stay[node] * self.gamma)
        if self.step % self.delta:
            for node in misses & set(self.access):
                self.access[node] += np.float32(1)
            return misses, set()
        leaving = [node for node in self.slots if self.stay[node] < self.alpha]
        coming = [node for node, score in self.access.items() if score > 0]
        coming.sort(key=lambda node: (-self.access[node], -self.degree[node], node))
        coming = coming[: len(leaving)]
        # where fewer come than could go, those of the lowest score go
        leaving.sort(key=lambda node: self.stay[node])
        for gone, come in zip(leaving, coming, strict=False):
            self.slots[self.slots.index(gone)] = come
            self.access[gone], self.stay[come] = self.stay.pop(gone), self.access.pop(come)
        return misses, set(coming)


def halos(rng: np.random.Generator, size: int) -> Halo:
    ids = np.sort(rng.permutation(NODES)[:size]).astype(np.int64)
    return Halo(ids, rng.integers(0, 9, size))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**30), size=st.integers(0, 60), share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    gamma=st.sampled_from([0.5, 0.95, 0.995]), delta=st.sampled_from([1, 2, 5]),
    alpha=st.sampled_from([None, 0.3, 0.9]),
)  # fmt: skip
def test_scores_against_the_paper(
    seed: int, size: int, share: float, gamma: float, delta: int, alpha: float | None
) -> None:
    rng = np.random.default_rng(seed)
    halo = halos(rng, size)
    scores, plain = (
        HaloScores(halo, NODES, share, gamma, delta, alpha),
        Plain(halo, share, gamma, delta, alpha),
    )
    for _ in range(40):
        wanted = np.unique(rng.zipf(1.3, 12) % NODES).astype(np.int64)
        in_halo, found = scores.look(wanted)
        np.testing.assert_array_equal(in_halo >= 0, np.isin(wanted, halo.ids))
        misses, coming = plain.batch(set(wanted.tolist()))
        assert set(wanted[found < 0].tolist()) == misses
        _, places = scores.score(in_halo, found)
        assert set(halo.ids[places].tolist()) == coming
        assert halo.ids[scores.node_in].tolist() == plain.slots
        assert {int(n): s for n, s in zip(halo.ids[scores.node_in], scores.stay, strict=True)} == plain.stay
        there = scores.access >= 0
        assert dict(zip(halo.ids[there].tolist(), scores.access[there], strict=True)) == plain.access


def test_a_row_of_the_first_buffer_goes_when_it_was_not_used_more_than_delta_times_in_all() -> None:
    """Whatever gamma is: the paper's alpha says so."""
    halo = Halo(np.arange(10, dtype=np.int64), np.arange(10)[::-1].copy())
    for gamma in (0.5, 0.95, 0.9995):
        scores = HaloScores(halo, 10, 0.2, gamma, 4)  # nodes 0 and 1
        for step in range(1, 13):
            # node 0 is used in every third mini-batch, 5 is missed in each
            wanted = np.array([0, 5] if step % 3 == 0 else [5], np.int64)
            scores.score(*scores.look(wanted))
            held = set(scores.node_in.tolist())
            # in step 8 both have gone unused for too long, and one comes; who went is above 0, and comes back
            assert held == ({0, 1} if step < 8 else {0, 5} if step < 12 else {1, 5}), (gamma, step)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**30), share=st.sampled_from([0.0, 0.3, 1.0]), delta=st.sampled_from([1, 3, None])
)
def test_every_row_is_the_sources_and_none_is_asked_for_twice(
    tmp_path_factory: pytest.TempPathFactory, small: Any, seed: int, share: float, delta: int | None
) -> None:
    store, rows = small
    rng = np.random.default_rng(seed)
    below = ArraySource(store, {"features": rows})
    tier = tier_over(below, halos(rng, 80), share, delta)
    plain = Plain(
        tier._tables["features"][0].halo, share, 0.95, delta or 10**6, 0.0 if delta is None else None
    )
    first = int(share * 80)
    asked = 0
    for step in range(30):
        wanted = np.unique(rng.zipf(1.2, 40) % NODES).astype(np.int64)
        place = rng.permutation(len(wanted) + 3)[: len(wanted)].astype(np.int32)
        out = np.zeros((len(wanted) + 3, 9), np.float32)
        tier.submit({"features": wanted}, out={"features": out}, at={"features": place}).result(10)
        np.testing.assert_array_equal(out[place], rows[wanted])
        misses, coming = plain.batch(set(wanted.tolist()))
        if step == 0:
            asked += first
        asked += len(misses | coming)
        assert below.asked == asked
        held = tier.holds("features", np.arange(NODES))
        assert set(np.flatnonzero(held).tolist()) == set(plain.stay)


@pytest.mark.parametrize("how", ["cancel", "fail", "refuse", "put"])
def test_rows_that_did_not_come_are_fetched_again(
    small: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where a request was cancelled or failed that was to bring rows for the buffer: those after it go on,
    and get no row that lay in a slot before."""
    store, rows = small
    below = ArraySource(store, {"features": rows})
    tier = tier_over(below, Halo(np.arange(80, dtype=np.int64), np.arange(80)[::-1].copy()), 0.3, 2)
    misses = np.arange(40, 80)

    def read(ids: np.ndarray) -> np.ndarray:
        return tier.submit({"features": ids}, out=None).result(10)["features"]

    for _ in range(3):  # the fourth brings others into the buffer
        np.testing.assert_array_equal(read(misses), rows[misses])
    held = tier.holds("features", np.arange(NODES))
    if how == "cancel":
        below.held = True
        request = tier.submit({"features": misses}, out=None)
        assert request.cancel()
        below.held = False
        below.let_go()
        request.exception(10)
    elif how == "fail":
        below.error = PeerError(1, 1, "is gone")
        with pytest.raises(PeerError):
            read(misses)
        below.error = None
    elif how == "put":
        with monkeypatch.context() as patched:
            patched.setattr(tier, "_put", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                read(misses)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(below, "submit", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tier.submit({"features": misses}, out=None)
    assert not (tier.holds("features", np.arange(NODES)) == held).all()
    everything = np.arange(NODES)
    np.testing.assert_array_equal(read(everything), rows)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Any:
    rows = np.random.default_rng(0).standard_normal((NODES, 9), np.float32)
    with pack(tmp_path_factory.mktemp("halo") / "s", rows) as store:
        yield store, rows


def tier_over(below: ArraySource, halo: Halo, share: float, delta: int | None) -> MassiveGNNTier:
    """A tier whose halo is given, of a store that is not split."""
    import featstore.hosts.massivegnn as module

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "halo_of", lambda table: halo)
    try:
        return MassiveGNNTier(below, featstore.MassiveGNN(share, 0.95, delta))
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 1.5}, "share"),
        ({"gamma": -1}, "gamma"),
        ({"delta": 0}, "delta"),
        ({"alpha": "x"}, "alpha"),
        ({"delta": None, "alpha": 0.5}, "alpha= says which rows are replaced, and delta=None"),
    ],
)
def test_wrong_parameters(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        featstore.MassiveGNN(**options)


def test_it_is_of_split_stores(small: Any) -> None:
    store, _ = small
    with pytest.raises(ArgumentError, match="split by hosts"):
        featstore.MassiveGNN().host_bytes([store.table("features")])
    with pytest.raises((ArgumentError, BudgetError), match="split by hosts"):
        store.loader([np.arange(3)], halo=featstore.MassiveGNN())


def test_rows_of_the_buffer_are_named_and_had_again(small: Any) -> None:
    """Those of the least S_E first; in their place come those that were saved, by the next request."""
    store, rows = small
    ids = np.arange(0, NODES, 2)
    halo, below = Halo(ids, np.arange(len(ids))), ArraySource(store, {"features": rows})
    tier = tier_over(below, halo, 0.25, 3)
    for step in range(4):
        wanted = ids[5 + step : 60]
        got = tier.submit({"features": wanted}, out=None).result()["features"]
        np.testing.assert_array_equal(got, rows[wanted])
    held = np.concatenate([*tier.held("features")])
    assert tier.holds("features", held).all()
    assert len(held) == len(np.unique(held)) == len(ids) // 4
    held = ids[: len(held)]  # those of the lowest degree
    saved.save(store, "scores", {"features": lambda: iter([held])})
    other = tier_over(below, halo, 0.25, 3)
    assert not other.holds("features", held).all()
    with saved.SavedCache(store, "scores") as cache:
        other.load(cache, "features")
    assert other.holds("features", held).all()
    asked = below.asked
    got = other.submit({"features": held}, out=None).result()["features"]
    np.testing.assert_array_equal(got, rows[held])
    assert below.asked == asked + len(held), "each once, for the buffer"
