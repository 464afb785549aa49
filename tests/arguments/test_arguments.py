"""Every public function, every argument, every kind of wrong value: an error of the package's own that names
what is wrong, and nothing left behind."""

from __future__ import annotations

import gc
import inspect
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arguments_buffers import BUFFERS
from arguments_calls import CALLS as OTHERS
from arguments_calls import Call, State
from arguments_loader import LOADER
from arguments_tiers import TIERS
from arguments_world import World
from arguments_wrong import Anything, Rule

import featstore
from featstore.base.threads import closed_later
from featstore.errors import FeatstoreError
from featstore.loaders.options import LoaderOptions

CALLS = OTHERS | BUFFERS | TIERS | LOADER

#: What objects of the package are, that are made by its functions. Classes of ``featstore.__all__`` are
#: public anyhow.
MADE = [
    "featstore.storage.store:StoredGraph", "featstore.reader.keys:NodeKeys",
    "featstore.shared.client:BufferClient",
    "featstore.loaders.compiled.trace:CompiledTrace", "featstore.loaders.compiled.loader:CompiledLoader",
    "featstore.loaders.online.loader:OnlineLoader", "featstore.loaders.rolling:RollingLoader",
    "featstore.sampling.neighbors:NeighborSampler",
    "featstore.sampling.stored:StoredSampler", "featstore.adapters.pyg:FeatstoreSampler",
    "featstore.adapters.pyg:FeatstoreFeatures", "featstore.adapters.pyg:FeatstoreGraph",
    "featstore.tune.tuning:tune", "featstore.measure.calibrate:calibrate",
    "featstore.measure.calibrate:measure", "featstore.tiers.buffer:FeatureBuffer",
    "featstore.tiers.tickets:Ticket", "featstore.tiers.device:DeviceBuffer",
    "featstore.tiers.device:DeviceTicket", "featstore.tiers.slots.simulation:simulate",
    "featstore.loaders.costs.costs:loader_costs",
]  # fmt: skip
#: Threads of the world's own pools, which grow while the others are busy; they end with them.
GROWING = {"featstore-buffer"}
#: What is public by name alone: records that functions return, and what the package calls itself.
NOT_CALLED = {
    "Batch": "a record, made by loaders",
    "Plan": "a record, made by Reader.plan",
    "ReaderStats": "a record, made by Reader.stats",
    "Request": "made by Reader.submit",
    "Table": "made by a store",
    "StoredGraph": "made by a store",
    "Request.abandon": "called by the reader",
    "NodeKeys.pieces": "called by exports",
    "Request.open_piece": "called by the reader",
    "Request.close_piece": "called by the reader",
    "Request.answer": "called by the reader",
    "Reader.read_pages": "called by samplers",
    "StoredSampler.with_memory": "called by loaders",
    "OnlineLoader.beginning": "called by its own thread",
    "OnlineLoader.finished": "called by its own thread",
    "CompiledTrace.open_readers": "called by its loader",
    "RollingLoader.seek": "called by Loader",
    "Ticket": "made by FeatureBuffer.begin",
    "DeviceTicket": "made by DeviceBuffer.begin",
    "FeatureBuffer.forget": "called by tickets",
    "FeatureBuffer.arrived": "called by tickets",
    "FeatureBuffer.wait_for": "called by tickets",
    "FeatureBuffer.load_last": "called where a saved cache is loaded",
    "Buffer.host_bytes": "called by the reader",
    "Buffer.least_bytes": "called by the reader",
    "Buffer.over": "called by the reader",
    "Static.host_bytes": "called by the reader",
    "Static.least_bytes": "called by the reader",
    "Static.over": "called by the reader",
    "Shared.tables_of": "called by the reader",
    "Shared.as_source": "called by the reader",
    "Shared.host_bytes": "called by the reader",
    "Shared.least_bytes": "called by the reader",
    "Shared.over": "called by the reader",
    "Device.host_bytes": "called by the reader",
    "Device.least_bytes": "called by the reader",
    "Device.over": "called by the reader",
    "Hosts.tables_of": "called by the reader",
    "Hosts.as_source": "called by the reader",
    "Hosts.host_bytes": "called by the reader",
    "Hosts.least_bytes": "called by the reader",
    "Hosts.over": "called by the reader",
    "MassiveGNN.host_bytes": "called by the reader",
    "MassiveGNN.least_bytes": "called by the reader",
    "MassiveGNN.over": "called by the reader",
}


def public() -> dict[str, Any]:
    """Every public function, class and method with parameters, by the name that it has in the table."""
    import importlib

    found: dict[str, Any] = {
        name: getattr(featstore, name) for name in featstore.__all__ if name not in ("__version__", "open")
    }
    for where in MADE:
        module, _, name = where.partition(":")
        found[name] = getattr(importlib.import_module(module), name)
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            for method, what in inspect.getmembers_static(thing):
                function = getattr(what, "__func__", what)
                ours = inspect.isfunction(function) and function.__module__.startswith("featstore.")
                if ours and not method.startswith("_") and len(inspect.signature(function).parameters) > 1:
                    found[f"{name}.{method}"] = getattr(thing, method)
    return found


def names_of(function: Any, method: bool) -> set[str]:
    """The names of its arguments; those of a loader's options one by one."""
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    found = {name for name in (names[1:] if method and names[0] == "self" else names) if name.strip("_")}
    options = parameters.get("options")
    if options is not None and options.annotation == "Unpack[LoaderOptions]":
        found |= set(LoaderOptions.__annotations__)
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    gc.collect()
    gc.freeze()  # what was made of it is not looked through after each case
    yield made
    made.close()


def test_the_table_is_complete() -> None:
    """A new function, or a new argument, needs its row."""
    there = public()
    assert not [name for name in there if name not in CALLS and name not in NOT_CALLED]
    for name, thing in there.items():
        if name not in NOT_CALLED:
            rows = {
                p for other, call in CALLS.items() if other.split(" ")[0] == name for p in call.parameters
            }
            missing = names_of(thing, "." in name) - rows
            assert not missing, f"{name}: {missing}"


def test_options_of_a_loader_are_seen() -> None:
    for function in (featstore.Loader, featstore.Store.loader, featstore.Loader.validation):
        assert {"options", "seeds", "attach", "buffer"} <= names_of(function, True)


def left(root: Path) -> tuple[Any, ...]:
    """What could be left behind: threads, descriptors, files."""
    files = sorted(
        os.path.join(folder, name)
        for folder, folders, names in os.walk(root)
        for name in (*folders, *names)
        if os.path.basename(folder) != "fresh" and name != "lock"
    )
    names = sorted(t.name for t in threading.enumerate() if t.name not in GROWING)
    return names, len(os.listdir("/proc/self/fd")), files


CASES = [
    pytest.param(name, parameter, id=f"{name}-{parameter}")
    for name, call in CALLS.items()
    for parameter, rule in call.parameters.items()
    if not isinstance(rule, Anything)
]


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.valid])
def test_the_arguments_are_right(world: World, name: str) -> None:
    """Without the wrong one among them, they are taken: what is refused below is refused for the wrong one
    alone."""
    function, arguments = CALLS[name].make(world)
    done = function(**arguments)
    for close in (getattr(done, "close", None),):
        if close is not None and name not in ("Request.result",):
            close()


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_wrong_arguments_are_refused(world: World, name: str, parameter: str) -> None:
    call: Call = CALLS[name]
    rule = call.parameters[parameter]
    assert isinstance(rule, Rule | State)
    wrong = rule.of(world) if isinstance(rule, State) else rule.wrong
    call.make(world)
    before = left(world.root)
    failures = []
    for label, value in wrong.items():
        function, arguments = call.make(world)
        given = value if rule.says.startswith("no option") else {parameter: value}
        try:
            done = function(**{**arguments, **given})
        except FeatstoreError as error:
            said = str(error)
            if not re.search(rule.says or parameter.replace("_", "[_ ]"), said):
                failures.append(f"{label}: does not name it: {said}")
            elif "<unprintable>" in said:
                failures.append(f"{label}: says what nobody can read: {said}")
        except BaseException as error:
            failures.append(f"{label}: {type(error).__name__}: {error}")
        else:
            failures.append(f"{label}: was taken: {done!r:.80}")
            if hasattr(done, "close"):
                done.close()
        done = function = arguments = None
    assert not failures, "\n".join(failures)
    if left(world.root) != before:
        gc.collect()  # what an error's frames hold: only where there is something, as it takes long
        closed_later()
        now, after = left(world.root), "what an earlier test had left may be gone by now"
        assert not Counter(now[0]) - Counter(before[0]), after
        assert now[1] <= before[1], after
        assert now[2] == before[2]
