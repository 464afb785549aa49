"""The rows of the table for feature buffers, their tickets, levels on devices, and simulated buffers."""

from __future__ import annotations

from arguments_calls import BATCHES, POLICY_NAME, Call, bad_at, bad_out
from arguments_wrong import (
    DEVICE,
    FLAG,
    FUNCTION,
    HUGE,
    IDS,
    MEMORY,
    NAME,
    NONSENSE,
    OPTION,
    Anything,
    Rule,
    count,
    np,
    number,
    torch,
)

from featstore.tiers.buffer import FeatureBuffer
from featstore.tiers.device import DeviceBuffer
from featstore.tiers.slots.layout import NEVER
from featstore.tiers.slots.simulation import simulate

TIMEOUT = number().optional.but("infinity")
TICKET = Rule({**NONSENSE, "None": None, "ids": np.arange(3), "a number": 3})
READER = Rule({**NONSENSE, "None": None, "a path": "/x", "a number": 3, "a mapping": {}})
SLOTS = count(1, 2**29)


def kept() -> Rule:
    """Rows that a buffer keeps for good: ids, or an iterator of pieces of them, which is used up."""
    wrong = {k: v for k, v in IDS.wrong.items() if k not in ("None", "a generator")}
    return Rule(wrong, "static|id|keep").and_also(
        a_name="degree",
        pieces_of_floats=iter([np.zeros(3)]),
        pieces_that_are_none=iter(["a"]),
        more_than_fit=np.arange(60),
    )


MEMORY_OF_ROWS = Rule(
    {
        **NONSENSE,
        "None": None,
        "a number": 3,
        "bytes that cannot be written": np.frombuffer(bytes(1 << 20), np.uint8),
        "floats": np.zeros(1 << 17),
        "two dimensions": np.zeros((1 << 10, 1 << 10), np.uint8),
        "strides": np.zeros(1 << 21, np.uint8)[::2],
        "a tensor": torch.zeros(1 << 20, dtype=torch.uint8),
    }
)
SHARES = Rule(
    {
        "small of text": {"small": "0.1"},
        "small is True": {"small": True},
        "all small": {"small": 1.0},
        "small beyond": {"small": 10**400},
        "small of none": {"small": None},
    },
    "no option|small",
)
SCORES = Rule(
    {
        "resident of text": {"resident": "x"},
        "gamma of text": {"gamma": "0.9"},
        "gamma is nan": {"gamma": float("nan")},
        "a half period": {"delta": 2.5},
        "a huge period": {"delta": HUGE},
        "alpha of text": {"alpha": "x"},
        "alpha is nan": {"alpha": float("nan")},
        "alpha is nothing": {"alpha": 0},
    },
    "no option|resident|gamma|delta|alpha",
)
NEXT_USES = Rule(
    {
        **{k: v for k, v in IDS.wrong.items() if k not in ("None", "True", "negative", "too large")},
        "negative uses": [-1, 2, 2],
        "uses beyond int32": [2**40] * 3,
        "uses beyond the trace": [1000] * 3,
        "too few": [2, 2],
        "none": [],
    },
    "next[ _]use",
)

BUFFERS: dict[str, Call] = {
    "FeatureBuffer": Call(
        lambda w: (FeatureBuffer, {"reader": w.reader, "slots": 50}),
        {
            "reader": READER,
            "table": NAME.optional,
            "slots": SLOTS.but("None"),
            "policy": POLICY_NAME,
            "static": kept(),
            "batches": count(0),
            "policies": Rule(
                {"None": None, "a name": "lru", "a number": 3, "another": ["no-such"], "numbers": [1]}
            ),
            "block": MEMORY_OF_ROWS.optional.and_also(too_small=np.zeros(64, np.uint8)),
            "options": OPTION,
        },
    ),
    "FeatureBuffer of memory": Call(
        lambda w: (FeatureBuffer, {"reader": w.reader, "memory": "1MiB"}), {"memory": MEMORY.but("None")}
    ),
    "FeatureBuffer of two queues": Call(
        lambda w: (FeatureBuffer, {"reader": w.reader, "slots": 50, "policy": "s3-fifo"}), {"options": SHARES}
    ),
    "FeatureBuffer of scores": Call(
        lambda w: (FeatureBuffer, {"reader": w.reader, "slots": 50, "policy": "score"}), {"options": SCORES}
    ),
    "FeatureBuffer of a trace": Call(
        lambda w: (FeatureBuffer, {"reader": w.reader, "slots": 50, "policy": "min", "batches": 3}),
        {"batches": count(1, 2**31 - 2)},
    ),
    "FeatureBuffer.begin": Call(
        lambda w: (lambda **given: w.features.begin(**given).release(), {"ids": [1, 2, 3]}),
        {
            "ids": IDS,
            "next_use": Rule({"of another policy": [1, 2, 3]}, "next use"),
            "timeout": TIMEOUT,
            "reader": READER.optional,
        },
    ),
    "FeatureBuffer.begin of a trace": Call(
        lambda w: (
            lambda **given: w.by_next_use.begin(**given).release(), {"ids": [1, 2, 3], "next_use": [1, 2, 2]},
        ),
        {"next_use": NEXT_USES.and_also(not_told=None)},
    ),
    "FeatureBuffer.check_ids": Call(
        lambda w: (w.features.check_ids, {"ids": np.arange(3)}), {"ids": Anything("ids that were parsed")}
    ),
    "FeatureBuffer.gather": Call(
        lambda w: (w.features.gather, {"ticket": w.features.begin([1, 2, 3]), "out": w.out(3)}),
        {
            "ticket": TICKET, "out": bad_out(3).but("another table").and_also(a_mapping={"features": 3}),
            "at": bad_at(3),
        },
    ),
    "FeatureBuffer.release": Call(
        lambda w: (w.features.release, {"ticket": w.features.begin([1])}), {"ticket": TICKET}
    ),
    "FeatureBuffer.load": Call(
        lambda w: (w.features.load, {"ids": [1, 2]}), {"ids": IDS, "uses": count(1)}
    ),
    "FeatureBuffer.switch": Call(
        lambda w: (w.features.switch, {"policy": "fifo"}),
        {"policy": POLICY_NAME, "static": kept(), "wait": FLAG},
    ),
    "Ticket.result": Call(
        lambda w: (w.features.begin([1]).result, {"timeout": 10.0}), {"timeout": TIMEOUT}
    ),
    "DeviceBuffer": Call(
        lambda w: (DeviceBuffer, {"host": w.features, "devices": ["cpu"], "slots": 20, "policy": "lru"}),
        {
            "host": READER,
            "devices": Rule(
                {f"of {k}": [v] for k, v in DEVICE.wrong.items()}
                | {"a name": "cpu", "none": [], "None": None, "a number": 3, "a mapping": {"cpu": 1}},
                "device",
            ),
            "slots": SLOTS,
            "policy": POLICY_NAME.and_also(of_traces="min", static="static"),
        },
    ),
    "DeviceBuffer.begin": Call(
        lambda w: (lambda **given: w.on_device.begin(**given).release(), {"ids": [1, 2, 3]}), {"ids": IDS}
    ),
    "DeviceBuffer.gather": Call(
        lambda w: (
            w.on_device.gather, {"ticket": w.device_ticket([1, 2, 3]), "staging": w.staging},
        ),
        {
            "ticket": TICKET,
            "staging": MEMORY_OF_ROWS,
        },
    ),
    "DeviceBuffer.load": Call(
        lambda w: (w.on_device.load, {"ids": np.arange(3), "staging": w.staging}),
        {
            "ids": IDS,
            "staging": MEMORY_OF_ROWS.and_also(too_small=np.zeros(3, np.uint8)),
            "uses": count(1),
        },
    ),
    "FeatureBuffer.holds": Call(lambda w: (w.features.holds, {"ids": [1, 2]}), {"ids": IDS}),
    "DeviceBuffer.holds": Call(
        lambda w: (w.on_device.holds, {"ids": np.arange(3)}), {"ids": IDS}
    ),
    "DeviceBuffer.last_that_fit": Call(
        lambda w: (
            lambda **given: list(w.on_device.last_that_fit(**given)),
            {"ids": lambda: iter([np.arange(3)])},
        ),
        {"ids": FUNCTION},
    ),
    "simulate": Call(
        lambda w: (simulate, {"rows_by_batch": w.batches, "slots": 50, "policy": "lru"}),
        {
            "rows_by_batch": BATCHES.and_also(
                **{f"of_{k}": [v] for k, v in IDS.wrong.items() if k != "too large"}
            ).saying("rows|id"),
            "slots": SLOTS,
            "policy": count(0, 7).but("a text", "an empty text").and_also(another_name="no-such"),
            "static": Rule({"for another policy": np.arange(3)}),
            "next_uses": Rule({"for another policy": [[1] * 20] * 5}),
            "options": OPTION,
        },
    ),
    "simulate of a trace": Call(
        lambda w: (simulate, {"rows_by_batch": [[1, 2, 3]] * 3, "slots": 50, "policy": "min",
                              "next_uses": [[1] * 3, [2] * 3, [NEVER] * 3]}),
        {
            "next_uses": Rule(
                {f"of {k}": [v] * 3 for k, v in NEXT_USES.wrong.items()}
                | {"None": None, "a number": 3, "fewer mini-batches": [[1] * 3] * 2, "more": [[1] * 3] * 4},
                "next[ _]use",
            ),
        },
    ),
    "simulate of static rows": Call(
        lambda w: (
            simulate, {"rows_by_batch": w.batches, "slots": 50, "policy": "static", "static": [1, 2]}
        ),
        {
            "static": kept().but("too large", "pieces of floats", "pieces that are none")
            .and_also(none_at_all=None)
            .saying("static|id|hold"),
        },
    ),
}  # fmt: skip
