"""What is counted of the sources, so that it cannot grow.

``python tools/house.py`` prints the numbers, and with names of measures what is behind them. Each measure
takes sources (text by path) and gives findings in words; the number is how many there are. ``goal`` is where
it should be; ``ceiling`` is what ``tests/test_house.py`` allows, and only ever falls. Nothing is imported:
the sources are read by ``ast`` alone.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
Sources = dict[str, str]

#: From top to bottom. A folder may import those in the lines below its own, and nothing else.
LAYERS = (
    {"adapters", "front", "measure", "testing", "tune"},
    {"split_store"},
    {"store"},
    {"loaders"},
    {"compile", "exporting", "scrub"},
    {"hosts", "trace"},
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

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
COLUMNS_MAX = 110

#: Where a built-in error is right: it is caught on the way out and told in the package's words, or a protocol
#: of Python asks for it.
BUILTIN_ERRORS = {
    ("featstore/__init__.py", "AttributeError"): "module attributes",
    ("featstore/order/__init__.py", "AttributeError"): "module attributes",
    ("featstore/loaders/batch.py", "AttributeError"): "what a mini-batch lacks, as hasattr asks",
    ("featstore/compile/row_lists.py", "IndexError"): "iterating by index ends so",
    ("featstore/storage/manifest_reading.py", "ValueError"): "becomes FormatError",
    ("featstore/engine/liburing.py", "OSError"): "becomes EngineError, or why another engine serves",
    ("featstore/order/permutation.py", "AssertionError"): "cannot be: what is looked for was found before",
}  # fmt: skip

#: The numbers of SplitMix64, which stand in one module.
HASH_NUMBERS = {0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB}
HASH_MODULE = "featstore/base/hashing.py"

#: Who opens and reads files by itself, and the calls by which one does; everybody else comes through these.
DOORS = ("featstore/base/", "featstore/engine/", "featstore/storage/disk.py", "featstore/storage/locks.py")
READS = ("open", "os.open", "os.pread", "os.preadv", "np.fromfile", "np.load", "np.memmap")

parsed = cache(ast.parse)  # measures look at trees, and change nothing
walked = cache(lambda tree: list(ast.walk(tree)))


def sources(root: Path = ROOT) -> Sources:
    """Every Python file of the repository by its path from the root."""
    folders = ("featstore", "tools", "tests", "benchmarks", "docs", "formats")
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def library(files: Sources) -> Sources:
    """The package alone."""
    return {path: text for path, text in files.items() if path.startswith("featstore/")}


def shipped(files: Sources) -> Sources:
    """The package and its tools."""
    return {path: text for path, text in files.items() if path.startswith(("featstore/", "tools/"))}


def module_of(path: str) -> str:
    """The dotted name of a module of the package."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The folder, or the single module, that a module belongs to."""
    return module.split(".")[1]


def imported(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, int]]:
    """(module, line) of what a module imports from the package; inside functions and for types as well."""
    for node in walked(tree):
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


def climbs(files: Sources) -> list[str]:
    """Imports that do not go downwards."""
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    modules = {module_of(path): text for path, text in library(files).items()}
    found = []
    for module, text in modules.items():
        if module == "featstore":
            continue
        for name, line in imported(parsed(text), set(modules)):
            if name == "featstore":
                found.append(f"{module}:{line} imports the package itself")
            elif folder_of(name) != folder_of(module) and level[folder_of(name)] <= level[folder_of(module)]:
                found.append(f"{module}:{line} imports {name}, which does not lie below it")
    return found


def circles(files: Sources) -> list[str]:
    """Modules that import themselves through others."""
    modules = {module_of(path): text for path, text in library(files).items()}
    reach = {
        module: {name for name, _ in imported(parsed(text), set(modules))} for module, text in modules.items()
    }
    reach.pop("featstore", None)
    found = []
    for start in reach:
        seen: set[str] = set()
        todo = list(reach[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(reach.get(name, ()))
        if start in seen:
            found.append(start)
    return found


def long_modules(files: Sources) -> list[str]:
    """Modules of more lines than a reader keeps in mind."""
    lengths = {path: len(text.splitlines()) for path, text in shipped(files).items()}
    return [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MODULE_LINES_MAX]


def long_functions(files: Sources) -> list[str]:
    """Functions of more lines of code; the signature and the docstring are not counted."""
    found = []
    for path, text in shipped(files).items():
        for node in walked(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                if lines > FUNCTION_LINES_MAX:
                    found.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    return found


def classes_named(ending: str, folder: str) -> Callable[[Sources], list[str]]:
    """A measure: public classes of a folder whose name ends so."""

    def measure(files: Sources) -> list[str]:
        return [
            f"{path}:{node.lineno} {node.name}"
            for path, text in files.items() if path.startswith(folder)
            for node in parsed(text).body
            if isinstance(node, ast.ClassDef) and node.name.endswith(ending) and node.name[0] != "_"
        ]  # fmt: skip

    return measure


def loader_bases(files: Sources) -> list[str]:
    """Classes of loaders that derive from no class of the package: each begins anew."""
    classes = [
        (path, node)
        for path, text in library(files).items()
        for node in parsed(text).body
        if isinstance(node, ast.ClassDef)
    ]
    known = {node.name for _, node in classes}
    found = []
    for path, node in classes:
        bases = {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
        if path.startswith("featstore/loaders/") and node.name.endswith(("Loader", "Batches")):
            found += [f"{path}:{node.lineno} {node.name}"] * (not known & bases)
    return found


def state_shapes(files: Sources) -> list[str]:
    """Sets of keys that methods ``state_dict`` spell out."""
    shapes = defaultdict(list)
    for path, text in library(files).items():
        for node in walked(parsed(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "state_dict":
                keys = {
                    key.value
                    for literal in ast.walk(node) if isinstance(literal, ast.Dict)
                    for key in literal.keys if isinstance(key, ast.Constant)
                }  # fmt: skip
                if keys:
                    shapes[tuple(sorted(map(str, keys)))].append(path)
    return [f"{', '.join(keys)}: {', '.join(paths)}" for keys, paths in shapes.items()]


def is_private(name: str) -> bool:
    """Whether a name is a module's or a class's own business."""
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether an expression is the object, or the class, that the code around it belongs to."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a module binds: of its own, of its classes, or of their objects."""
    found = set()
    for node in walked(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def foreign_privates(files: Sources) -> list[str]:
    """Private names of one module that another touches.

    ``from m import _x`` always counts. ``a._x`` counts where ``a`` is neither ``self`` nor ``cls``, some
    module of ours binds ``_x`` (so that most of what is NumPy's, torch's or Python's own is left out), and
    this module does not. ``ast`` knows no types, so this is an estimate: a name that two modules bind is
    taken for each one's own, and one that a library binds as well for ours. On ``self``, what a class
    inherits is its own business.
    """
    trees = {path: parsed(text) for path, text in shipped(files).items()}
    bound = {path: own_names(tree) for path, tree in trees.items()}
    ours = set().union(*bound.values())
    found = []
    for path, tree in trees.items():
        for node in walked(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("featstore"):
                names = [a.name for a in node.names if is_private(a.name) and a.name != "_version"]
            elif isinstance(node, ast.Attribute) and node.attr in ours and node.attr not in bound[path]:
                names = [] if is_own(node.value) else [node.attr]
            else:
                continue
            found += [f"{path}:{node.lineno} {name}" for name in names]
    return found


def top_level(tree: ast.Module) -> Iterator[str]:
    """Public names that a module binds by a definition or an assignment."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def double_names(files: Sources) -> list[str]:
    """Public names that two or more modules of the package bind, each with a meaning of its own."""
    where = defaultdict(list)
    for path, text in library(files).items():
        for name in set(top_level(parsed(text))):
            where[name].append(path.removeprefix("featstore/"))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1]


def builtin_errors(files: Sources) -> list[str]:
    """Built-in errors raised where they could leave the package."""
    found = []
    for path, text in library(files).items():
        for node in walked(parsed(text)):
            called = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name):
                continue
            name = called.func.id
            kind = getattr(builtins, name, None)
            if not isinstance(kind, type) or not issubclass(kind, Exception) or kind is MemoryError:
                continue
            if (path, name) not in BUILTIN_ERRORS:
                found.append(f"{path}:{node.lineno} {name}")  # type: ignore[attr-defined]
    return found


def hashes(files: Sources) -> list[str]:
    """Numbers of SplitMix64 outside the module of the hash."""
    return [
        f"{path}:{node.lineno} {node.value:#x}"
        for path, text in library(files).items() if path != HASH_MODULE
        for node in walked(parsed(text))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in HASH_NUMBERS
    ]  # fmt: skip


def reads(files: Sources) -> list[str]:
    """Calls by which a module opens or reads a file past the doors."""
    found = []
    for path, text in library(files).items():
        if path.startswith(DOORS):
            continue
        for node in walked(parsed(text)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in READS or name.endswith((".read_bytes", ".read_text")):
                found.append(f"{path}:{node.lineno} {name}")  # type: ignore[attr-defined]
    return found


def long_lines(files: Sources) -> list[str]:
    """Lines that do not fit; a remark to the checkers at the end does not count."""
    return [
        f"{path}:{number}"
        for path, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(re.sub(r"\s+# (type: ignore|noqa|fmt: ).*", "", line)) > COLUMNS_MAX
    ]


@dataclass(frozen=True)
class Measure:
    """What is counted, where it should be, and what is allowed until then."""

    what: str
    findings: Callable[[Sources], list[str]]
    goal: int
    ceiling: int


#: By the name that the command takes. A ceiling only ever falls.
MEASURES = {
    "circles": Measure("modules in circles of imports", circles, 0, 0),
    "climbs": Measure("imports that do not go downwards", climbs, 0, 0),
    "modules": Measure(f"modules over {MODULE_LINES_MAX} lines", long_modules, 0, 0),
    "functions": Measure(f"functions over {FUNCTION_LINES_MAX} lines of code", long_functions, 0, 0),
    "batches": Measure("batch classes", classes_named("Batch", "featstore/"), 1, 1),
    "loaders": Measure("loader bases", loader_bases, 1, 1),
    "reports": Measure("report classes of loaders", classes_named("Report", "featstore/loaders/"), 1, 1),
    "states": Measure("shapes of state_dict", state_shapes, 1, 1),
    "privates": Measure("private names touched from another module", foreign_privates, 10, 10),
    "doubles": Measure("public names that stand in two or more modules", double_names, 30, 10),
    "hashes": Measure("numbers of the hash outside its module", hashes, 0, 0),
    "reads": Measure("reads of files past their doors", reads, 0, 0),
    "errors": Measure("built-in errors raised on purpose", builtin_errors, 0, 0),
    "lines": Measure(f"lines over {COLUMNS_MAX} columns", long_lines, 0, 0),
}
MEDIAN_LINES_MAX = 180


def median_lines(files: Sources) -> float:
    """Lines of the module in the middle."""
    return median(len(text.splitlines()) for text in shipped(files).values())


def notes(files: Sources) -> tuple[int, int]:
    """Lines of comment, and assertions, in the package: for those who read, so nothing is asked of them."""
    texts = library(files).values()
    comments = sum(line.lstrip().startswith("#") for text in texts for line in text.splitlines())
    asserts = sum(isinstance(node, ast.Assert) for text in texts for node in walked(parsed(text)))
    return comments, asserts


def main(arguments: list[str]) -> None:
    files = sources()
    for name in arguments:
        print("\n".join(MEASURES[name].findings(files)))
    if arguments:
        return
    print(f"{'counted':<72}{'today':>5}{'allowed':>9}{'goal':>7}")
    for name, measure in MEASURES.items():
        today = len(measure.findings(files))
        lower = "  lower what is allowed" if max(today, measure.goal) < measure.ceiling else ""
        what = f"{measure.what} [{name}]"
        print(f"{what:<72}{today:>5}{measure.ceiling:>9}{measure.goal:>7}{lower}")
    print(f"{'lines of the median module':<72}{median_lines(files):>5g}{'':>9}{MEDIAN_LINES_MAX:>7}")
    comments, asserts = notes(files)
    print(f"{'lines of comment':<72}{comments:>5}")
    print(f"{'assertions':<72}{asserts:>5}")


if __name__ == "__main__":
    main(sys.argv[1:])
