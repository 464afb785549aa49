"""The house rules as numbers: none may grow, and each measure finds what is planted for it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import house

FILES = house.sources()


@cache
def findings_now(name: str) -> list[str]:
    return house.MEASURES[name].findings(FILES)


@pytest.mark.parametrize("name", house.MEASURES)
def test_no_number_grows(name: str) -> None:
    findings = findings_now(name)
    assert len(findings) <= house.MEASURES[name].ceiling, "\n".join(findings)


def test_the_median_module_is_short() -> None:
    assert house.median_lines(FILES) <= house.MEDIAN_LINES_MAX


def test_every_folder_has_its_layer() -> None:
    modules = map(house.module_of, house.library(FILES))
    folders = {house.folder_of(module) for module in modules if module != "featstore"}
    assert folders == set().union(*house.LAYERS)


def test_the_top_level_holds_what_is_known() -> None:
    if not (house.ROOT / ".git").exists():
        pytest.skip("not a checkout")
    known = {
        "featstore", "formats", "tools", "tests", "benchmarks", "docs", "pyproject.toml", "README.md",
        "CHANGELOG.md", "LICENSE", "constraints.txt", "justfile",
    }  # fmt: skip
    listed = subprocess.run(["git", "ls-files"], cwd=house.ROOT, check=True, capture_output=True, text=True)
    names = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in names if name[0] != "."} <= known


def test_recipes_are_plain_commands_that_are_told() -> None:
    told = (house.ROOT / "docs/CONTRIBUTING.md").read_text()
    recipes = (house.ROOT / "justfile").read_text()
    commands = [line.strip() for line in recipes.splitlines() if line.startswith("    ")]
    assert len(commands) > 8
    for command in commands:
        begin = command.replace("{{bin}}", ".venv/bin").split("{{")[0].strip()
        assert begin in told, command


COST = "featstore/plan/cost.py"
TALL = "\n".join(["x = 1"] * 500)
PLANTED = [
    ("climbs", COST, "from featstore.loaders.prefetch import Stages"),
    ("climbs", COST, "def later():\n    from featstore.loaders import prefetch"),
    (
        "climbs",
        COST,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from featstore.tiers.static import Static",
    ),
    ("climbs", COST, "import featstore"),
    ("modules", COST, TALL),
    ("functions", COST, "def long():\n" + "    x = 1\n" * 61),
    ("functions", "tools/featstore_cli/tune.py", "def long():\n" + "    x = 1\n" * 61),
    ("batches", COST, "class TenthBatch:\n    pass"),
    ("loaders", "featstore/loaders/prefetch.py", "class TenthLoader:\n    pass"),
    ("reports", "featstore/loaders/prefetch.py", "class TenthReport:\n    pass"),
    (
        "states",
        COST,
        "class Tenth:\n    def state_dict(self):\n        return {'tenth': 10}",
    ),
    ("privates", COST, "from featstore.base.checksum import _hidden"),
    ("privates", COST, "def touch(reader):\n    return reader._feeder"),
    ("doubles", COST, "class Request:\n    pass"),
    ("doubles", COST, "PAGE_BYTES: int = 1"),
    ("hashes", "featstore/order/metis.py", "STEP = 0x9E3779B97F4A7C15"),
    ("reads", COST, "def later():\n    os.open(p, 0)"),
    ("reads", COST, "def later():\n    os.preadv(d, [b], 0)"),
    ("reads", COST, "def later():\n    open(p, 'rb')"),
    ("reads", COST, "def later():\n    np.fromfile(p)"),
    ("reads", COST, "def later():\n    np.load(p)"),
    ("reads", COST, "def later():\n    np.memmap(p, mode='r')"),
    ("reads", COST, "def later():\n    path.read_bytes()"),
    ("errors", COST, "def fail():\n    raise ValueError('no')"),
    ("lines", "benchmarks/run.py", "x = '" + "x" * 110 + "'"),
    ("lines", COST, "x = '" + "x" * 110 + "'  # fmt: skip"),
]


@pytest.mark.parametrize(("name", "path", "planted"), PLANTED)
def test_what_is_planted_is_found(name: str, path: str, planted: str) -> None:
    count = house.MEASURES[name].findings
    files = FILES | {path: f"{FILES[path]}\n\n{planted}\n"}
    assert len(count(files)) == len(findings_now(name)) + 1


def test_a_circle_is_found() -> None:
    path = "featstore/compile/placement.py"
    planted = "def later():\n    from featstore.compile.search import Search\n"
    assert "featstore.compile.placement" in house.circles(FILES | {path: FILES[path] + planted})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("functions", "def long():\n    '''" + "Text.\n" * 70 + "'''\n    return 1"),
        ("privates", "class C:\n    def set(self):\n        self._own = 1\n\ndef f(c):\n    return c._own"),
        ("errors", "def fail():\n    raise MemoryError('no')"),
        ("lines", "x = 1  # type: ignore[attr-defined] " + "x" * 110),
    ],
)  # fmt: skip
def test_what_is_allowed_is_not_found(name: str, allowed: str) -> None:
    count = house.MEASURES[name].findings
    assert len(count(FILES | {COST: f"{FILES[COST]}\n\n{allowed}\n"})) == len(findings_now(name))


def test_long_tests_are_there() -> None:
    """Those that are divided among hours, by their names."""
    tests = Path(__file__).parent
    names = (tests / "long_tests.txt").read_text().split()
    assert len(set(names)) == len(names)
    for name in names:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (tests / file).read_text(), name
