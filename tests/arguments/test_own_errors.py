"""No built-in error is raised on purpose where it could leave the package."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import featstore

#: Where a built-in is right: it is caught on the way out and told in the package's words, or a protocol of
#: Python asks for it.
RIGHT = {
    ("featstore/__init__.py", "AttributeError"): "module attributes",
    ("featstore/order/__init__.py", "AttributeError"): "module attributes",
    ("featstore/compile/row_lists.py", "IndexError"): "iterating by index ends so",
    ("featstore/storage/manifest_reading.py", "ValueError"): "becomes FormatError",
    ("featstore/packing/sources/files.py", "ValueError"): "becomes SourceError",
    ("featstore/packing/sources/text.py", "ValueError"): "becomes SourceError",
    ("featstore/engine/liburing.py", "OSError"): "becomes EngineError, or why another engine serves",
    ("featstore/order/permutation.py", "AssertionError"): "cannot be: what is looked for was found before",
}  # fmt: skip


def test_what_is_raised_is_our_own() -> None:
    root = Path(featstore.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and isinstance(node.exc.func, ast.Name)
            ):
                kind = getattr(builtins, node.exc.func.id, None)
                if isinstance(kind, type) and issubclass(kind, Exception) and kind is not MemoryError:
                    found.add((f"featstore/{path.relative_to(root)}", kind.__name__))
    assert found <= set(RIGHT), sorted(found - set(RIGHT))
