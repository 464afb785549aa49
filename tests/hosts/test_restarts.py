"""Training as users start and restart it: torchrun begins all workers again where one was killed, and what is
learned is what it would have been; each host has its own part on its own disk, and nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from test_split_training import graph_and_rows

import featstore

SECONDS = 90.0
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
#: Else torch's own groups may be told addresses of before (issue 135712 of pytorch).
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

TRAIN = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import featstore

def save(folder, number, **state):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "new")
    os.replace(folder / "new", folder / f"{number}.pt")
    for old in sorted(folder.glob("*.pt"), key=lambda one: int(one.stem))[:-2]:
        old.unlink()

def newest(folder):
    mine = max((int(one.stem) for one in folder.glob("*.pt")), default=-1)
    step = torch.tensor(mine)
    dist.all_reduce(step, dist.ReduceOp.MIN)
    return None if step < 0 else torch.load(folder / f"{int(step)}.pt")

name, killed_at, halo = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
folder, step = Path(name) / f"rank-{rank}", 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(17, 5))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
with featstore.open_split("parts2", memory="16MiB", timeout_seconds=10) as store, store.loader(
    seeds="train", fanouts=(4, 3), batch_size=10, memory="48MiB", attach="label", tensors=True, halo=halo
) as loader:
    state = newest(folder)
    if state is not None:
        step = state["step"]
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        loader.load_state_dict(state["loader"])
    begun = step
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            seeds = slice(0, batch.batch_size)
            loss = torch.nn.functional.cross_entropy(model(batch.x)[seeds], batch.label[seeds])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            step += 1
            if step == killed_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 3 == 0:
                save(folder, step, step=step, model=model.state_dict(), optimiser=optimiser.state_dict(),
                     loader=loader.state_dict())
weights = [one.tolist() for one in model.module.parameters()]
told = {"step": step, "begun": begun, "weights": weights}
Path(f"{name}.told.{rank}").write_text(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pack: Any) -> Path:
    made = tmp_path_factory.mktemp("restarts")
    graph_and_rows(made, pack, 2)
    (made / "train.py").write_text(TRAIN)
    return made


def trained(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", "--monitor-interval=0.1", "train.py", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | NEW_STORE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-60000:]
    return [json.loads((folder / f"{arguments[0]}.told.{rank}").read_text()) for rank in range(2)]


HALOS = "None", "'8KiB'", "featstore.MassiveGNN(0.25, delta=2)"


@pytest.mark.parametrize(
    "which", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_workers_that_begin_again_learn_what_they_would_have(folder: Path, which: int) -> None:
    """From the newest state that all of them have."""
    turn = int(os.environ["TEST_TURN"])
    halo = HALOS[(turn + which) % 3]
    whole = trained(folder, f"whole-{which}", "-1", halo)
    steps = whole[0]["step"]
    assert steps > 2 * 12
    at = random.Random(f"{halo} {turn}").randrange(4, steps)
    again = trained(folder, f"killed-{which}", str(at), halo)
    for before, after in zip(whole, again, strict=True):
        assert (before["begun"], after["begun"]) == (0, (at - 1) // 3 * 3), at
        assert after["step"] == steps
        assert after["weights"] == before["weights"], at


PART = """
import sys
import numpy as np
import torch.distributed as dist
import featstore
rank, place, topology = int(sys.argv[1]), sys.argv[2], sys.argv[3] or None
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=2)
features = np.load("features.npy")
try:
    with featstore.open_split(place, topology=topology, memory="16MiB", timeout_seconds=15) as store:
        with store.reader(memory="16MiB") as reader:
            assert (reader.read(np.arange(1200)) == features).all()
        with store.loader(seeds="train", fanouts=(4, 3), batch_size=30, memory="48MiB") as loader:
            for batch in loader:
                assert (batch.x == features[batch.n_id]).all()
        print("host", store.place.host)
except featstore.errors.FeatstoreError as error:
    print(type(error).__name__, error)
"""


def on_two_hosts(folder: Path, name: str, *of_hosts: tuple[Path, str]) -> list[str]:
    """What the processes of two hosts say, each of whom has a place, and a topology elsewhere if any."""
    (folder / "part.py").write_text(PART)
    made = [
        subprocess.Popen(
            [sys.executable, "part.py", str(rank), str(place), topology, str(folder / f"{name}.meeting")],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, (place, topology) in enumerate(of_hosts)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=SECONDS) for one in made]
    finally:
        for one in made:
            one.kill()
    assert [one.returncode for one in made] == [0, 0], said
    return [out.strip() for out, _ in said]


@pytest.fixture(scope="module")
def places(folder: Path) -> Path:
    """Each host's disk, with what was copied to it one by one: topology and its own part."""
    for host in range(2):
        for name in ("topology", f"host-{host}"):
            shutil.copytree(folder / "parts2" / name, folder / f"disk{host}" / name)
    return folder


def test_each_host_has_its_part_alone(places: Path) -> None:
    assert on_two_hosts(places, "alone", (places / "disk0", ""), (places / "disk1", "")) == [
        "host 0",
        "host 1",
    ]


def test_a_part_and_a_topology_that_lie_apart(places: Path) -> None:
    """And the machines may have each other's part."""
    apart = places / "apart"
    (places / "disk0" / "host-0").rename(apart)
    try:
        disks = (places / "disk1" / "host-1", ""), (apart, str(places / "disk0" / "topology"))
        assert on_two_hosts(places, "apart", *disks) == ["host 1", "host 0"]
    finally:
        apart.rename(places / "disk0" / "host-0")


def test_parts_that_do_not_belong_together_refuse_at_the_start(places: Path) -> None:
    with featstore.open(places / "s") as store:
        featstore.split(store, 2, places / "others", train="train", seed=5)
    disk = places / "disk2"
    shutil.copytree(places / "others" / "topology", disk / "topology")
    shutil.copytree(places / "others" / "host-1", disk / "host-1")
    for said in on_two_hosts(places, "families", (places / "disk0", ""), (disk, "")):
        assert said.startswith("SourceError"), said
        assert "same split" in said
    for said in on_two_hosts(places, "same", (places / "disk0", ""), (places / "disk0", "")):
        assert said.startswith("SourceError"), said
        assert "the 2 machines of this run have the parts [0, 0]" in said


NODES_OF_SLURM = """#!/bin/bash
# Two nodes of Slurm, which are this machine.
for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


@pytest.mark.parametrize(
    "name", ["train_hosts_torch.py", pytest.param("train_hosts_pyg.py", marks=pytest.mark.thorough)]
)
def test_examples_are_started_by_torchrun_and_slurm(folder: Path, pack: Any, name: str) -> None:
    """As their texts say, over parts that were made before."""
    made, rng = folder / f"slurm-{name[:-3]}", np.random.default_rng(0)
    made.mkdir()
    labels, graph = rng.integers(0, 4, 1200), rng.integers(0, 1200, (2, 6000))
    arrays = {
        "label": labels,
        "y": labels,
        "train": np.arange(0, 1200, 2),
        "train_mask": np.arange(1200) % 2 == 0,
    }
    rows = rng.standard_normal((1200, 32)).astype(np.float32)
    with pack(made / "s", rows, graph=graph, arrays=arrays, order="ldg", partitions=16) as store:
        featstore.split(store, 2, made / "parts", train="train")
    for command, text in (("srun", NODES_OF_SLURM), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (made / command).write_text(text)
        (made / command).chmod(0o755)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    path = os.pathsep.join([str(made), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(EXAMPLES / "train_hosts.slurm"), str(EXAMPLES / name), str(made / "parts")],
        capture_output=True, text=True, timeout=SECONDS, check=False, cwd=made,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SLURM_JOB_NODELIST": "a[0-1]", "PATH": path,
           "PORT": str(port), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    assert subprocess.run(["bash", str(EXAMPLES / "train_hosts.slurm")], check=False).returncode == 2
