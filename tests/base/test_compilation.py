"""Compiled kernels that are kept on disk: never those of other sources; where they can't be kept, a
warning."""

from __future__ import annotations

import ast
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

import featstore
import featstore.base.compilation as compilation

PACKAGE = Path(featstore.__file__).parent

INNER = "from featstore.base.compilation import njit\n\n@njit(nogil=True)\ndef inner(x):\n    return x + {}\n"
OUTER = """
from featstore.base.compilation import njit
from featstore.inner import inner

@njit(cache=True, nogil=True)
def outer(x):
    return inner(x)
"""
RUN = "from featstore.outer import outer; print(outer(0), sum(outer.stats.cache_hits.values()))"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a package of that name which has two kernels, one called by the other."""
    package = tmp_path / "featstore"
    package.mkdir()
    (package / "base").mkdir()
    for name in ("base/compilation.py", "base/turns.py", "base/warning.py", "errors.py"):
        shutil.copy(PACKAGE / name, package / name)
    (package / "base/__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(INNER.format(1))
    (package / "outer.py").write_text(OUTER)
    return tmp_path


def run(folder: Path, code: str = RUN, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    return subprocess.run(  # bytecode that is kept knows a change by second and size: -B, none is
        [sys.executable, "-B", "-W", "default", "-c", code],
        cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


def test_a_change_in_a_called_module_is_compiled(small: Path) -> None:
    assert run(small).stdout == "1 0\n"
    assert run(small).stdout == "1 1\n"
    (small / "featstore/inner.py").write_text(INNER.format(2))
    assert run(small).stdout == "2 0\n"
    assert run(small).stdout == "2 1\n"
    kept = [path.name for path in (small / "featstore/__pycache__").glob("*.nb?")]
    assert len(kept) == 2, "files of other sources stayed"


def test_what_is_kept_is_loaded_without_what_compiling_takes(small: Path) -> None:
    made = OUTER + "\n@njit(cache=True)\ndef many(x):\n    return np.full(3, x)[1]\n"
    (small / "featstore/outer.py").write_text(f"import numpy as np\n{made}")
    run(small, used := f"{RUN}; from featstore.outer import many; print(many(5))")
    then = (
        "import sys, numba; print('numba.np.arraymath' in sys.modules); "
        "own = numba.njit(lambda x: outer(x) + many(3)); print(own(4), 'numba.np.arraymath' in sys.modules)"
    )
    assert run(small, f"{used}; {then}").stdout.split() == ["1", "1", "5", "False", "8", "True"]


def test_code_of_sources_that_changed_meanwhile_is_not_kept(small: Path) -> None:
    meanwhile = (
        "from pathlib import Path; import featstore.inner; "
        f"Path('featstore/inner.py').write_text({INNER.format(2)!r}); {RUN}"
    )
    assert run(small, meanwhile).stdout == "1 0\n"
    assert not list((small / "featstore/__pycache__").glob("*.nb?"))
    assert run(small).stdout == "2 0\n"


def test_a_full_disk_is_a_warning_that_names_the_variable(small: Path) -> None:
    full = (
        "import errno, numba.core.caching as c\n"
        "def save(*a): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        f"c.IndexDataCacheFile.save = save\n{RUN}"
    )
    done = run(small, full)
    assert done.stdout == "1 0\n"
    assert "FeatstoreWarning" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr
    assert "No space left" in done.stderr


def begun_at_once(folder: Path, code: str, count: int) -> list[str]:
    """What processes print that begin together, in order of what they print."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    printed = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count
    return sorted(printed)


#: Numba has compiled before, and all do so at the same moment.
TOGETHER = (
    "import time, numba; numba.njit(lambda x: x)(1); import featstore.outer; time.sleep(-time.time() % 3)"
)


def test_of_processes_that_begin_at_once_one_compiles(small: Path) -> None:
    run(small)
    (small / "featstore/inner.py").write_text(INNER.format(2))
    assert begun_at_once(small, f"{TOGETHER}; {RUN}", 3) == ["2 0\n", "2 1\n", "2 1\n"]


def test_who_compiles_too_long_is_not_waited_for(small: Path) -> None:
    """Nor who was stopped: each then compiles for itself."""
    wait = "import featstore.base.turns as t, featstore.outer, time"
    hold = f"{wait}; t.take_turn(featstore.outer.outer._cache.cache_path, 'featstore.outer.outer')"
    code = f"{hold}; print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=small, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            short = f"{wait}; t.TURN_SECONDS = 0.3; begin = time.monotonic(); {RUN}"
            done = run(small, f"{short}; print(time.monotonic() - begin >= 0.3)")
            assert done.stdout == "1 0\nTrue\n"
        finally:
            holder.kill()
    assert run(small).stdout == "1 1\n", "and its turn is gone with it"


def test_an_error_while_compiling_ends_the_turn(small: Path) -> None:
    (small / "featstore/inner.py").write_text(INNER.format("'x'"))  # a number and a text: a type error
    attempt = (
        "from featstore.outer import outer\ntry:\n    outer(0)\nexcept Exception as e:\n    kind = type(e)\n"
        "import subprocess, sys\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, '-c', open('again.py').read(), 'x'], timeout=20, check=True)\n"
        "print(kind.__name__, flush=True)"
    )
    (small / "again.py").write_text(attempt)
    assert run(small, attempt).stdout == "TypingError\nTypingError\n"


def test_without_locks_kernels_are_compiled(small: Path) -> None:
    none = "import fcntl\ndef lockf(*a): raise OSError(37, 'No locks available')\nfcntl.lockf = lockf\n"
    done = run(small, none + RUN)
    assert (done.stdout, done.stderr) == ("1 0\n", "")
    assert run(small).stdout == "1 1\n"


@pytest.mark.parametrize("kept", [b"", b"\x80\x05 cut off"])
def test_kernels_that_were_cut_off_are_compiled_anew(small: Path, kept: bytes) -> None:
    run(small)
    for path in (small / "featstore/__pycache__").glob("*.nbc"):
        path.write_bytes(kept)
    done = run(small)
    assert done.stdout == "1 0\n"
    assert "NUMBA_CACHE_DIR" in done.stderr
    assert run(small).stdout == "1 1\n"


def test_nowhere_to_keep_kernels_is_one_warning_that_names_the_variable(small: Path) -> None:
    nowhere = f"import numba.core.caching as c\nc.CompileResultCacheImpl._locator_classes = []\n{RUN}"
    done = run(small, nowhere)
    assert done.stdout == "1 0\n"
    assert done.stderr.count("FeatstoreWarning") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_all_kernels_are_compiled_by_this_means() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "numba":
                names = {name.name for name in node.names}
                assert not names & {"njit", "jit", "vectorize", "guvectorize"}, (
                    f"{path} takes numba's own {names}"
                )


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_go_on_as_they_were_however_compiling_ends(enabled: bool) -> None:
    looked: list[bool] = []

    class Cache(compilation._Cache):
        def load_overload(self, sig: Any, target_context: Any) -> None:
            looked.append(gc.isenabled())

        def save_overload(self, sig: Any, data: Any) -> None:
            looked.append(gc.isenabled())

    def add(x: Any, y: Any) -> Any:
        return x + y

    kernel = numba.njit(add)
    compilation._keep(kernel, Cache(add))
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        assert kernel(2, 3) == 5
        with pytest.raises(numba.TypingError):
            kernel((), 3)
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was else gc.disable()
    assert looked == [False, False, False]  # of the failed one nothing is kept
