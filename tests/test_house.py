"""The layers: who may import whom. Imports inside functions and for types alone count like any other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import featstore

#: From top to bottom. A room may import those in the lines below its own, and nothing else.
LAYERS = (
    {"adapters", "front", "measure", "tune"},
    {"store"},
    {"compiled"},
    {"loaders"},
    {"compile", "scrub"},
    {"trace"},
    {"packing", "sampling", "shared"},
    {"reader"},
    {"tiers"},
    {"engine", "order", "plan"},
    {"storage"},
    {"base", "layout"},
    {"units"},
    {"arguments"},
    {"_version", "errors"},
)

ROOT = Path(featstore.__file__).parent


def modules() -> dict[str, str]:
    """Source of each module by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["featstore", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported(source: str, known: set[str]) -> Iterator[tuple[str, int]]:
    """(module, line) of what a module imports from the package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "featstore":
                yield name, node.lineno


def room_of(module: str) -> str:
    return module.split(".")[1]


def climbs(sources: dict[str, str]) -> list[str]:
    """Imports that do not go downwards, in words."""
    level = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    wrong = []
    for module, source in sources.items():
        if module == "featstore":
            continue
        for name, line in imported(source, set(sources)):
            if name == "featstore":
                wrong.append(f"{module}:{line} imports the package itself")
            elif room_of(name) != room_of(module) and level[room_of(name)] <= level[room_of(module)]:
                wrong.append(f"{module}:{line} imports {name}, which does not lie below it")
    return wrong


def circles(sources: dict[str, str]) -> list[str]:
    """Modules that import themselves through others."""
    reach = {
        module: {name for name, _ in imported(source, set(sources))} for module, source in sources.items()
    }
    reach.pop("featstore", None)
    wrong = []
    for start in reach:
        seen: set[str] = set()
        todo = list(reach[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(reach.get(name, ()))
        if start in seen:
            wrong.append(start)
    return wrong


def test_every_room_has_its_layer() -> None:
    assert {room_of(module) for module in modules() if module != "featstore"} == set().union(*LAYERS)


def test_imports_go_downwards() -> None:
    assert climbs(modules()) == []


def test_there_are_no_circles() -> None:
    assert circles(modules()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from featstore.loaders.walk import Stages\n",
        "def later():\n    from featstore.loaders import walk\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from featstore.tiers.static import "
        "StaticTier\n",
        "import featstore\n",
    ],
)
def test_an_import_upwards_is_found(planted: str) -> None:
    sources = modules()
    sources["featstore.plan.cost"] += planted
    assert len(climbs(sources)) == 1


def test_a_circle_is_found() -> None:
    sources = modules()
    sources["featstore.compile.placement"] += (
        "def later():\n    from featstore.compile.search import Search\n"
    )
    assert "featstore.compile.placement" in circles(sources)


#: What a concept that has one place is known by, and that place.
HASH_NUMBERS = {0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB}


def hashes(sources: dict[str, str]) -> list[str]:
    """Modules with numbers of SplitMix64, which stand in base.hashing."""
    return [
        f"{module}:{node.lineno}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in HASH_NUMBERS
    ]


def test_there_is_one_hash() -> None:
    sources = modules()
    del sources["featstore.base.hashing"]
    assert hashes(sources) == []
    sources["featstore.order.metis"] += "GOLDEN = 0x9E3779B97F4A7C15\n"
    assert len(hashes(sources)) == 1


#: Who opens and reads files by itself; everybody else comes through these.
DOORS = ("base", "engine", "storage.disk", "storage.locks")
READS = ("open", "os.open", "os.pread", "os.preadv", "np.fromfile")


def reads(sources: dict[str, str]) -> list[str]:
    """Calls by which a module opens or reads a file past the doors."""
    found = []
    for module, source in sources.items():
        inner = module.removeprefix("featstore.")
        if any(inner == door or inner.startswith(f"{door}.") for door in DOORS):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in READS or name.endswith((".read_bytes", ".read_text")):
                    found.append(f"{module}:{node.lineno} {name}")
    return found


def test_files_are_read_through_their_doors() -> None:
    assert reads(modules()) == []


@pytest.mark.parametrize(
    "planted",
    ["os.open(p, 0)", "os.preadv(d, [b], 0)", "open(p, 'rb')", "np.fromfile(p)", "path.read_bytes()"],
)
def test_a_read_past_the_doors_is_found(planted: str) -> None:
    sources = modules()
    before = len(reads(sources))
    sources["featstore.plan.cost"] += f"def later():\n    {planted}\n"
    assert len(reads(sources)) == before + 1


#: Modules that raise one and catch it themselves.
CAUGHT_BESIDE = {
    "engine.uring OSError",  # of opening a ring; caught by whoever asked for it
    "storage.manifest ValueError",  # in the middle of json.loads, and caught around it
}
BUILT_IN = {"Exception", "KeyError", "OSError", "RuntimeError", "TypeError", "ValueError"}


def built_in_errors(sources: dict[str, str]) -> set[str]:
    """Built-in errors that are raised where featstore.errors promises its own."""
    return {
        f"{module.removeprefix('featstore.')} {node.exc.func.id}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in BUILT_IN
    }


def test_errors_are_our_own() -> None:
    assert built_in_errors(modules()) == CAUGHT_BESIDE
    assert built_in_errors({"featstore.x": "raise KeyError(name)\n"}) == {"x KeyError"}
