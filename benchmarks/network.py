"""Hosts of a network that one machine emulates."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_BURST_BYTES = 128 << 10  # at least: segments of 64 KiB are sent whole
_TICKS = 250  # a second, of the kernel's clock, at least
INTERFACE = "eth0"


@contextmanager
def namespaces(hosts: int, bytes_per_second: float) -> Iterator[list[list[str]]]:
    """A network namespace for each host, behind one bridge, out of which so many bytes a second go (``tbf``);
    the words to put before a command. The interface in each is :data:`INTERFACE`. Takes root."""
    name, bits = f"fs{os.getpid()}", round(8 * bytes_per_second)
    burst = max(_BURST_BYTES, round(bytes_per_second / _TICKS))
    with ExitStack() as stack:
        _ip("link", "add", f"{name}b", "type", "bridge")
        stack.callback(_ip, "link", "del", f"{name}b")
        _ip("link", "set", f"{name}b", "up")
        inside = []
        for host in range(hosts):
            space, here = f"{name}-{host}", f"{name}v{host}"
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
            _ip("link", "add", here, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            stack.callback(_ip, "link", "del", here)  # at once: a namespace's goes some time later
            _ip("link", "set", here, "master", f"{name}b", "up")
            _ip("-n", space, "address", "add", f"10.77.0.{host + 1}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", space, "link", "set", interface, "up")
            shaped = f"tc qdisc add dev {INTERFACE} root tbf rate {bits}bit burst {burst} latency 400ms"
            _ip("netns", "exec", space, *shaped.split())
            inside.append(["ip", "netns", "exec", space])
        yield inside


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
