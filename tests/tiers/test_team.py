"""A team that copies the rows of small requests: against plain NumPy, from several threads, closed meanwhile,
after a fork, and asleep where nobody asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child

import featstore
from featstore.tiers.static import StaticRows
from featstore.tiers.team import Team

ROWS = 5000


@pytest.fixture(scope="module", params=[0, 1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(request.param)
    made.load_kernels()
    yield made
    made.close()


def made_tier(rng: np.random.Generator, row_bytes: int, members: int) -> StaticRows:
    tier = StaticRows(np.sort(rng.permutation(ROWS)[:members]), ROWS, row_bytes)
    tier.data[:] = rng.integers(0, 256, tier.data.shape, np.uint8)
    return tier


@given(
    st.integers(0, 2**32), st.sampled_from([0, 1, 7, 300, 4000]), st.sampled_from([1, 31, 64, 512, 3001]),
    st.sampled_from([None, np.int32, np.int64]), st.sampled_from(["all", "some", "-1", "too many"]),
)  # fmt: skip
@settings(max_examples=35)
def test_rows_are_those_of_the_ids(
    team: Team, seed: int, count: int, row_bytes: int, map_dtype: type | None, what: str
) -> None:
    """All that are asked for, where all are members; else that one is not."""
    rng = np.random.default_rng(seed)
    tier = made_tier(rng, row_bytes, 1 + int(rng.integers(ROWS)))
    row_of_node = np.empty(0, np.int32) if map_dtype is None else rng.permutation(ROWS).astype(map_dtype)
    node_of_row = np.arange(ROWS) if map_dtype is None else np.argsort(row_of_node)
    members = np.flatnonzero(np.unpackbits(tier._bits.view(np.uint8), bitorder="little"))
    wanted = rng.choice(members, count)
    ids = node_of_row[wanted]
    others = np.setdiff1d(node_of_row, node_of_row[members])
    spoilt = count and what != "all" and (what != "some" or len(others))
    if spoilt:
        ids[rng.integers(count)] = {"some": rng.choice(others) if len(others) else 0, "-1": -1}.get(
            what, ROWS
        )
    out = np.zeros(count * row_bytes + 5, np.uint8)
    given = out[: count * row_bytes]
    assert tier.serve_ids(ids, row_of_node, ROWS, given, team) == (not spoilt)
    assert not out[count * row_bytes :].any()
    if not spoilt:
        rows = tier.data[np.searchsorted(members, wanted)]
        np.testing.assert_array_equal(given.reshape(count, row_bytes), rows)


def test_several_callers_at_once(team: Team) -> None:
    """One has the team, the others serve alone: each gets its own rows."""
    tier = made_tier(np.random.default_rng(0), 512, ROWS)
    failures: list[int] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in range(300):
            ids = rng.integers(0, ROWS, 1500)
            out = np.zeros((1500, 512), np.uint8)
            tier.serve_ids(ids, np.empty(0, np.int32), ROWS, out.reshape(-1), team)
            if not np.array_equal(out, tier.data[ids]):
                failures.append(number)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def test_closing_meanwhile() -> None:
    tier = made_tier(np.random.default_rng(0), 512, ROWS)
    for _ in range(20):
        team, wrong, begun = Team(2), [], threading.Event()

        def ask(team: Team = team, wrong: list[int] = wrong, begun: threading.Event = begun) -> None:
            rng = np.random.default_rng(0)
            for number in range(60):
                ids, out = rng.integers(0, ROWS, 2000), np.zeros((2000, 512), np.uint8)
                tier.serve_ids(ids, np.empty(0, np.int32), ROWS, out.reshape(-1), team)
                begun.set()
                if not np.array_equal(out, tier.data[ids]):
                    wrong.append(number)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        begun.wait(20)
        team.close()
        team.close()
        thread.join(20)
        assert not thread.is_alive()
        assert not wrong


def own_threads() -> int:
    return sum(t.name.startswith("featstore-team") for t in threading.enumerate())


def test_helpers_come_when_needed_and_go_with_the_reader(
    pack: object, tmp_path: Path, features: np.ndarray
) -> None:
    pack(tmp_path / "s", features).close()  # type: ignore[operator]
    others = own_threads()
    with featstore.open(tmp_path / "s") as store:
        reader = store.reader(memory="64MiB", static=np.arange(1000))
        reader.read([1, 2, 3])
        assert own_threads() == others
        ids = np.arange(1000)
        np.testing.assert_array_equal(reader.read(ids), features)
        several = len(os.sched_getaffinity(0)) > 1
        assert (own_threads() > others) == several
        assert in_child(lambda: np.array_equal(reader.read(ids), features)) == 0, (
            "a fork has helpers of its own"
        )
        reader.close()
        assert own_threads() == others
        with store.reader(memory="64MiB", static=np.arange(1000), threads=1) as alone:
            np.testing.assert_array_equal(alone.read(ids), features)
            assert own_threads() == others, "threads= bounds them"


def test_helpers_sleep_where_nobody_asks() -> None:
    """Awake after what came quickly, and not for long."""
    team, tier = Team(3), made_tier(np.random.default_rng(0), 512, ROWS)
    ids, out = np.arange(4000), np.zeros(4000 * 512, np.uint8)
    for _ in range(50):
        assert tier.serve_ids(ids, np.empty(0, np.int32), ROWS, out, team)
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1
    assert tier.serve_ids(ids, np.empty(0, np.int32), ROWS, out, team), "and wake up again"
    np.testing.assert_array_equal(out.reshape(4000, 512), tier.data[ids])
    team.close()
