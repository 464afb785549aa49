"""The public functions of tiers; see arguments_calls."""

from __future__ import annotations

from arguments_calls import POLICY_NAME, Call, bad_at, bad_out
from arguments_wrong import DEVICE, IDS, MEMORY, NONSENSE, OPTION, PATH, STORE, Rule, count, number

import featstore

SPEC = Rule(
    {**NONSENSE, "None": None, "a text": "lru", "a number": 3, "texts": ["lru"], "nothings": [None]}, "tiers"
)
OF_A_POLICY = Rule({"a typo": {"smal": 0.1}, "of another": {"gamma": 0.5}}, "no option")

TIERS: dict[str, Call] = {
    "Buffer": Call(
        lambda w: (featstore.Buffer, {"policy": "s3-fifo", "memory": "1MiB"}),
        {"policy": POLICY_NAME, "memory": MEMORY.optional, "options": OF_A_POLICY},
    ),
    "Static": Call(
        lambda w: (featstore.Static, {"rows": [1, 2], "memory": "1MiB"}),
        {"rows": IDS.but("negative", "too large").saying("rows|id"), "memory": MEMORY.optional},
    ),
    "Device": Call(
        lambda w: (featstore.Device, {"device": "cpu", "memory": "1MiB"}),
        {
            "device": DEVICE.and_also(none=[]),
            "memory": MEMORY,
            "policy": POLICY_NAME,
        },
    ),
    "Shared": Call(
        lambda w: (featstore.Shared, {"client": w.client}),
        {"client": Rule({**NONSENSE, "None": None, "a text": "client", "a number": 3})},
    ),
    "Hosts": Call(
        lambda w: (featstore.Hosts, {"memory": "8MiB", "engine": "threads"}),
        {"memory": MEMORY.optional, "options": OPTION},
    ),
    "MassiveGNN": Call(
        lambda w: (featstore.MassiveGNN, {"share": 0.25}),
        {
            "share": number().and_also(too_much=1.1),
            "gamma": number().and_also(too_much=1.1),
            "delta": count(1, 2**20).optional,
            "alpha": number().optional.and_also(too_much=1.1),
        },
    ),
    "open_split": Call(
        lambda w: (featstore.open_split, {"path": w.parts, "memory": "64MiB"}),
        {
            "path": PATH,
            "memory": MEMORY,
            "timeout_seconds": number().and_also(none_at_all=0),
            "topology": PATH.optional,
            "reader": OPTION,
        },
    ),
    "TieredReader": Call(
        lambda w: (
            featstore.TieredReader,
            {"store": w.store, "tiers": [featstore.Buffer("lru")], "memory": "64MiB"},
        ),
        {"store": STORE, "tiers": SPEC, "memory": MEMORY, "reader": OPTION},
    ),
    "TieredReader.read": Call(lambda w: (w.tiered.read, {"ids": [1, 2, 3]}), {"ids": IDS, "out": bad_out(3)}),
    "TieredReader.submit": Call(
        lambda w: (
            lambda **given: w.tiered.submit(**given).result(),
            {"ids": [1, 2, 3], "out": w.out(3), "at": [2, 1, 0]},
        ),
        {"ids": IDS, "out": bad_out(3).but("another table"), "at": bad_at(3)},
    ),
    "TieredReader.plan": Call(lambda w: (w.tiered.plan, {"ids": [1, 2]}), {"ids": IDS}),
    "Store.reader tiers": Call(
        lambda w: (w.store.reader, {"memory": "64MiB", "engine": "threads"}),
        {
            "tiers": SPEC.but("None"),
            "policy": POLICY_NAME.but("None"),
            "device_memory": MEMORY.but("None").saying("device"),
            "device_policy": POLICY_NAME.but("None").saying("device"),
        },
    ),
    "Store.reader device": Call(
        lambda w: (
            w.store.reader,
            {"memory": "64MiB", "engine": "threads", "device": "cpu", "device_memory": "1MiB"},
        ),
        {
            "device": DEVICE,
            "device_memory": MEMORY.but("None"),
            "device_policy": POLICY_NAME.but("None").saying("policy"),
        },
    ),
}
