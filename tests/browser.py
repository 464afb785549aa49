"""Pages in a headless browser, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "headless_shell")


def seen(page: Path, folder: Path) -> tuple[str, set[str]]:
    """The page's elements as the browser has them, and what it asked of any network in its name. Names of
    hosts lead nowhere, so that the browser's own questions, if it has any, do not either."""
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser is here, none of {', '.join(_NAMES)}")
    log, shot = folder / "net.json", folder / "shot.png"
    # As root it has no sandbox.
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--timeout=20000",
    ]  # fmt: skip
    command = [browser, *flags, f"--screenshot={shot}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shot.stat().st_size > 5000
    assert log.stat().st_size
    text = log.read_text()
    asked = set()
    for event in json.loads(text)["events"]:
        url = event.get("params", {}).get("url", "")
        if url.startswith(("http:", "https:", "ws:", "wss:", "ftp:")):
            asked.add(url)
    return done.stdout, asked
