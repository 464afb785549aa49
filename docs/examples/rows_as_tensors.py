"""Take rows of a table as tensors: by index, as a data set of torch with workers, by DLPack. Runs in
seconds."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import featstore

NODES, WIDTH = 20_000, 32


def main(folder: Path) -> None:
    # Each row says whose it is.
    features = np.repeat(np.arange(NODES, dtype=np.float32)[:, None], WIDTH, axis=1)
    # The array has a reader with this budget, and holds nothing else. Rows are yours, and come on top.
    store = featstore.pack(folder / "nodes.fs", features, memory="256MiB")
    with store, store.table("features", memory="1MiB") as array:
        print(array.shape, array.dtype, f"{sum(array.memory().values()):,} bytes")

        # Tensors for tensors, of the shape of the ids; NumPy for NumPy, lists, slices and numbers.
        ids = torch.randint(NODES, (4, 10))
        x = array[ids]
        assert x.shape == (4, 10, WIDTH)
        assert torch.equal(x[..., 0], ids.float())
        assert (array[-5:][:, 0] == np.arange(NODES - 5, NODES)).all()
        train_mask = torch.zeros(NODES, dtype=torch.bool)
        train_mask[::1000] = True
        assert len(array[train_mask]) == 20

        # What was read is handed on without a copy: to torch here, to JAX by
        # jax.dlpack.from_dlpack(rows).
        rows = array[[7, 8, 9]]
        assert torch.from_dlpack(rows).data_ptr() == rows.ctypes.data

        # All rows at once come only where the memory that was given would hold them.
        try:
            np.asarray(array)
        except featstore.errors.NotInMemoryError as error:
            print(error)

        # A data set of torch. With batches from the sampler a mini-batch is one read, and nothing is
        # collated; a worker opens a reader of its own, within the same budget.
        sampler = BatchSampler(RandomSampler(array), batch_size=1024, drop_last=False)
        loader = DataLoader(array, batch_size=None, sampler=sampler, num_workers=1)
        seen = torch.cat([batch[:, 0] for batch in loader])
        assert torch.equal(seen.sort().values, torch.arange(NODES).float())
        print(f"{len(loader)} mini-batches, every row once")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
