"""The command itself: help, versions, exit codes, start-up, errors as one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Call
from click.testing import CliRunner
from featstore_cli.main import _COMMANDS, cli

import featstore
from featstore.errors import BudgetError, CorruptionError, DeviceError

START_SECONDS_MAX = 1.0  # it takes a tenth; the rest is for a busy machine


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "featstore_cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)


def test_help_is_quick_and_loads_nothing() -> None:
    best = 100.0
    for _ in range(3):
        begin = time.perf_counter()
        done = command("--help")
        best = min(best, time.perf_counter() - begin)
    assert done.returncode == 0
    for name in _COMMANDS:
        assert f"  {name} " in done.stdout
    assert best < START_SECONDS_MAX
    look = (
        "import sys, featstore_cli.main; print(*(m for m in ('numpy', 'numba', 'rich', 'featstore', "
        "'msgspec') if m in sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )


def test_a_store_from_the_shell(inputs: Path, tmp_path: Path) -> None:
    done = command("pack", tmp_path / "s", "--features", inputs / "rows.npy", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "edges.csv").write_text("0,1,5\n1,0,6\n")
    np.save(tmp_path / "two.npy", np.zeros((2, 3)))
    done = command(
        "pack", tmp_path / "t", "--features", tmp_path / "two.npy", "--graph", tmp_path / "edges.csv", "-q"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"featstore: warning: {tmp_path / 'edges.csv'}: not stored: column 3. "), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1, "no line of Python"
    done = command("inspect", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"featstore: error: there is no store at {tmp_path / 'nowhere'}; check")
    assert len(done.stderr.splitlines()) == 1
    done = command("inspect", tmp_path / "s")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout, "no colours where stdout is no terminal"
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_a_reader_of_the_output_that_leaves(store: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "featstore_cli", "inspect", str(store), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_help(call: Call, name: str) -> None:
    text = call(name, "--help").stdout
    assert f"Usage: featstore {name}" in text
    for option in ("--json", "--quiet", "--debug"):
        assert option in text or (name, option) == ("completion", "--json")  # its text is for a shell
    call(name, "--no-such-option", code=2)


def test_version_and_names(call: Call) -> None:
    assert call("--version").stdout == f"featstore {featstore.__version__}\n"
    assert "Usage" in call("-h").stdout
    assert "did you mean 'inspect'?" in call("inspct", code=2).stderr
    assert "there are pack, split, inspect" in call("zzz", code=2).stderr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CorruptionError("f", 4096, "a", "b"), 3, "corrupt data in f at byte 4096"),
        (BudgetError(2, 1, "read"), 1, "the smallest that works is 2 bytes"),
        (DeviceError(errno.EIO, "f", 0), 1, "cannot read f at byte 0"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
        (ImportError("needs torch: pip install 'featstore[torch]'"), 1, "pip install"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_message(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(featstore, "open", fail)
    result = CliRunner().invoke(cli, ["inspect", "s"])
    assert result.exit_code == code
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    if code != 130:
        for arguments in (["--debug", "inspect", "s"], ["inspect", "s", "--debug"]):
            shown = CliRunner().invoke(cli, arguments)
            assert shown.exit_code == code
            assert "Traceback" in shown.stderr
            assert "featstore: error: " in shown.stderr


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(featstore, "open", fail)
    assert isinstance(CliRunner().invoke(cli, ["inspect", "s"]).exception, ZeroDivisionError)


def test_progress_needs_a_terminal(inputs: Path, tmp_path: Path) -> None:
    """On a pseudo-terminal stderr shows a bar; with -q it stays empty."""
    for quiet in (False, True):
        ours, theirs = os.openpty()
        line = [
            sys.executable,
            "-m",
            "featstore_cli",
            "pack",
            str(tmp_path / f"s{quiet}"),
            "--features",
            str(inputs / "rows.npy"),
        ]
        done = subprocess.run(
            line + ["-q"] * quiet,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=100,
            check=True,
            env=os.environ | {"TERM": "xterm"},
        )
        os.write(theirs, b"end\n")
        os.close(theirs)
        seen = b""
        while b"end" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
        assert (b"\x1b[" in seen) is not quiet
        assert (done.stdout == b"") is quiet
        assert b"\x1b" not in done.stdout
