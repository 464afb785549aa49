"""Online reading, in a memory cgroup of the bare process and a tenth of the features: an epoch of GraphSAGE
whose mini-batches come one after the other, nothing known beforehand, through a feature buffer; beside
np.memmap, with the same mini-batches and the same model.

    python benchmarks/online.py --dir /a/directory/on/the/ssd

The mini-batches' graphs come from a recorded trace in all of them, as from a sampler that costs nothing, so
that memory is the features' alone. Epochs longer than ``--seconds`` are extrapolated from what was measured.
*Warm start*: the buffer's rows are saved and loaded by another process, whose first epoch is held against its
second.
"""

from __future__ import annotations

from typing import Any

import click
from compiled_data import EDGES_A_NODE, FANOUTS, NARROW, Data
from compiled_training import ADVISED, MAIN_SHARE, MEMMAP, EndToEnd, epoch_seconds
from harness import Claim, Report, Settings, note, shared_options
from system import free_memory_bytes, touch_memory

from featstore.units import format_bytes

PEER_BAR, STAGE_BAR, WARM_BAR = 5.0, 1.15, 1.1
WARM_SHARE = 0.5  # of the features, of which a warm start is shown, too
BUSY = ("sample", "read", "gather", "hand over", "train")


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Time limit of an epoch.")
@shared_options(size="1GiB", quick_size="64MiB", rounds=1)
def main(settings: Settings, seconds: float) -> None:
    """An epoch through a feature buffer in a tenth of the memory, against np.memmap; and a warm start."""
    data = Data(settings.workspace, settings.size_bytes // 512, settings.quick)
    touch_memory(min(free_memory_bytes() // 2, 4 << 30))
    report = Report("online", "Online reading", {
        "nodes": data.nodes, "edges_a_node": EDGES_A_NODE, "row_bytes": data.row_bytes,
        "fanouts": list(FANOUTS), "seeds": data.nodes // NARROW, "memory_share": MAIN_SHARE,
        "seconds": seconds,
    }, settings.workspace)  # fmt: skip
    end = EndToEnd(data, settings, {}, 5.0 if settings.quick else seconds, lambda: None)
    given: dict[str, Any] = {
        "mode": "online",
        "memory_bytes": end.budget(MAIN_SHARE),
        "policy": "auto",
        "seconds_max": end.seconds_max,
    }
    half = given | {"memory_bytes": end.budget(WARM_SHARE), "seconds_max": end.seconds_max / 2}
    # Outside of a cgroup: kernels that are compiled for the first time take memory that no epoch takes.
    end.child(**given | {"seconds_max": min(10.0, end.seconds_max)}, epochs=["load", "first"], save="bench")
    runs = {
        "online": end._run(MAIN_SHARE, **given, epochs=["load", "train"], save="bench"),
        "warm": end._run(MAIN_SHARE, **given, epochs=["first", "second"], warm="bench"),
        "half": end._run(WARM_SHARE, **half, epochs=["first", "second"], save="half"),
        "half, warm": end._run(WARM_SHARE, **half, epochs=["first", "second"], warm="half"),
        ADVISED: end._run(MAIN_SHARE, mode="advised", seconds_max=end.seconds_max / 2),
        MEMMAP: end._run(MAIN_SHARE, mode="memmap", seconds_max=end.seconds_max / 2),
    }
    for name, run in runs.items():
        note(f"{name}: {run}")
    tell(report, runs, len(data.batches(NARROW)), end)
    data.close()
    report.save(settings.out, settings.quick)


def over_second(run: dict[str, Any]) -> float:
    """The time of a mini-batch of the first epoch over that of the second."""
    first, second = (run[which]["seconds"] / run[which]["batches"] for which in ("first", "second"))
    return first / second


def tell(report: Report, runs: dict[str, dict[str, Any]], batches: int, end: EndToEnd) -> None:
    """Claims and tables."""
    online, warm = runs["online"], runs["warm"]
    train = online["train"]
    epoch = epoch_seconds(online, "train", batches) or 0.0
    slowest = max(BUSY, key=lambda stage: train["stages"].get(stage, 0.0))
    for peer in (ADVISED, MEMMAP):
        other = epoch_seconds(runs[peer], "train", batches)
        if other is not None:
            report.claims.append(Claim(f"epoch over {peer} over ours", other / epoch, PEER_BAR))
        else:
            report.notes.append(f"{peer}: {runs[peer]['failed']}")
    halves = {name: runs[name] for name in ("half", "half, warm")}
    hit_rates = [
        [name, one["hits"] / (one["hits"] + one["misses"]), one["seconds"] / one["batches"] * 1000]
        for name, one in (
            ("a tenth of the memory, cold, first epoch", online["load"]),
            ("warm, first epoch", warm["first"]), ("warm, second epoch", warm["second"]),
            ("half of the memory, cold, first epoch", halves["half"]["first"]),
            ("second", halves["half"]["second"]), ("warm, first epoch", halves["half, warm"]["first"]),
            ("warm, second epoch", halves["half, warm"]["second"]),
        )
    ]  # fmt: skip
    report.claims += [
        Claim(
            f"time of an epoch over its slowest stage ({slowest})",
            train["seconds"] / train["stages"][slowest],
            STAGE_BAR,
            "<=",
        ),
        Claim("warm start, first epoch over second, nobody trains", over_second(warm), WARM_BAR, "<="),
        Claim("the same in half of the memory", over_second(halves["half, warm"]), WARM_BAR, "<="),
        Claim("cold start there, first epoch over second", over_second(halves["half"])),
        Claim("the disk's share of the time of an epoch", train["stages"]["read"] / train["seconds"]),
        Claim(
            "peak charged to the cgroup over what is allowed",
            online["charged_bytes"] / online["limit_bytes"],
            1.0,
            "<=",
        ),
    ]
    columns = [
        "rows from",
        "s, extrapolated",
        "mini-batches measured",
        "s, model",
        "peak RSS",
        "peak charged",
    ]
    report.table("An epoch of GraphSAGE", columns, [
        [name, epoch_seconds(runs[key], "train", batches),
         f"{runs[key]['train']['batches']:.1f} of {batches}",
         runs[key]["train"]["model_seconds"] / runs[key]["train"]["batches"] * batches,
         format_bytes(runs[key]["peak_bytes"]), format_bytes(runs[key]["charged_bytes"])]
        for name, key in (("featstore, online", "online"), (ADVISED, ADVISED), (MEMMAP, MEMMAP))
        if "failed" not in runs[key]
    ])  # fmt: skip
    report.table("Stages of the measured part, seconds", ["stage", "s"], sorted(
        ([k, v] for k, v in train["stages"].items()), key=lambda row: -float(row[1])))  # fmt: skip
    report.table(
        "Warm start, nobody trains", ["epoch", "rows found in the buffer", "ms a mini-batch"], hit_rates
    )
    report.notes.append(
        f"Policy: auto, which chose {', '.join(online['policy'].values())}. Budget of the loader "
        f"{format_bytes(end.budget(MAIN_SHARE))}. Of the cold process's epochs in a tenth of the "
        "memory the first is not trained on, and the tables are of the second; of the others neither "
        "is. A first epoch that is warm includes reading the rows that were saved."
    )


if __name__ == "__main__":
    main()
