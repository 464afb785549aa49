"""What a loader keeps of other hosts' rows stays where its readers change, and can be written down and had
again: a reader of one store stands for other hosts here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import SourceError
from featstore.hosts.ahead import Ahead
from featstore.hosts.halo import Halo
from featstore.hosts.kept_halo import KeptHalo
from featstore.hosts.massivegnn import HaloScores
from featstore.testing import ArraySource
from featstore.tiers import saved

NODES = 900
FEATURES = np.random.default_rng(0).standard_normal((NODES, 6)).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[featstore.Store]:
    with featstore.pack(tmp_path / "s", FEATURES) as made:
        yield made


def read(tier: Any, ids: Any) -> None:
    rows = tier.submit({"features": ids}, out=None).result()["features"]
    np.testing.assert_array_equal(rows, FEATURES[ids])


def test_another_source_takes_the_place_of_one_and_rows_stay(store: featstore.Store) -> None:
    kept, sources = KeptHalo(featstore.Buffer("s3-fifo", "256KiB"), store), []
    ids = np.arange(0, NODES, 3)
    for _ in range(3):
        sources.append(ArraySource(store, {"features": FEATURES}))
        tier = kept.over(sources[-1])
        read(tier, ids)
    assert [one.asked for one in sources] == [len(ids), 0, 0]
    kept.close()
    kept.close()


def test_rows_are_written_down_and_had_again(store: featstore.Store) -> None:
    ids, spec = np.arange(0, NODES, 3), featstore.Buffer("s3-fifo", "256KiB")
    first = KeptHalo(spec, store)
    read(first.over(ArraySource(store, {"features": FEATURES})), ids)
    first.save("mine")
    with saved.SavedCache(store, "mine.halo") as cache:
        assert sorted(np.concatenate([*cache.ids("features")])) == ids.tolist()
    second, source = KeptHalo(spec, store), ArraySource(store, {"features": FEATURES})
    tier = second.over(source)
    second.load("another")
    assert source.asked == 0
    second.load("mine")
    read(tier, ids)
    assert source.asked == len(ids), "each once, to load it"
    first.close()
    second.close()


def test_scores_begin_with_the_rows_that_were_saved() -> None:
    """The last ones as far as there are slots, others than the halo's passed over, and what is left of them
    are those of the highest degree; a node stands once."""
    ids = np.arange(5, 800, 5)
    halo = Halo(ids, np.arange(len(ids))[::-1].copy())
    scores = HaloScores(halo, NODES, 0.1, 0.9, 4)
    assert scores.slots == 15
    for given in (ids[40:50], ids[60:100], np.array([3, 7, *ids[40:44], *ids[40:44]])):
        scores.begin_with(given)
        own = given[np.isin(given, ids)]
        last = list(dict.fromkeys(own[::-1].tolist()))[:15]
        expected = [*last, *(one for one in ids.tolist() if one not in last)][:15]
        assert sorted(halo.ids[scores.node_in]) == sorted(expected)
        _, found = scores.look(ids)
        np.testing.assert_array_equal(np.flatnonzero(found >= 0), np.sort(scores.node_in))
        assert (scores.access[scores.node_in] == -1).all()
        assert (scores.access == -1).sum() == 15


def test_what_cannot_be_saved_or_had_is_known_beforehand(store: featstore.Store) -> None:
    """But for what looks ahead, of which nothing is saved."""
    kept = KeptHalo(featstore.Buffer("s3-fifo", "256KiB"), store)
    ahead = KeptHalo(Ahead([store.tables["features"]], 1 << 20), store)
    with pytest.raises(SourceError, match="is not allowed"):
        kept.check_name("n" * 124)
    ahead.check_name("n" * 124)
    kept.check("nothing")
    saved.save(store, "damaged.halo", {"features": lambda: iter([np.arange(5)])})
    kept.check("damaged")
    path = saved.cache_path(store, "damaged.halo")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="is damaged"):
        kept.check("damaged")
    ahead.check("damaged")
