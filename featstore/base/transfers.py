"""From host memory to a device, beside what the training loop does there.

Rows are gathered into *pinned* memory, which the device can read by itself and which is used again
(:class:`featstore.base.buffers.Outputs`), and copied from there on a stream of their own: neither the loop
nor the kernels under way on the device wait for a copy, but only who uses what was copied. Not yet run on an
accelerator; tests put another in its place, whose copies are late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer


class Done(Protocol):
    """What tells that copies have been made: an event of torch's."""

    def synchronize(self) -> None: ...


class Copies:
    """An accelerator, and a stream on it that only copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def pinned(self, byte_count: int) -> NDArray[np.uint8]:
        """Memory that the device reads by itself, uint8 [byte_count]."""
        memory: NDArray[np.uint8] = torch.empty(byte_count, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Done]:
        """Begin to copy; what is asked of the device in this thread from now on waits for it."""
        pinned = [one if one.is_pinned() else one.pin_memory() for one in tensors]
        with self._module.stream(self._stream):
            made = [one.to(self._device, non_blocking=True) for one in pinned]
            done = self._module.Event()
            done.record(self._stream)
        current = self._module.current_stream(self._device)
        current.wait_event(done)
        for one in made:
            one.record_stream(current)  # or its memory would be given to the next copy too early
        return made, done


class Transfer:
    """Brings tensors to ``device``, as torch takes it; where that is the host's memory they are there.

    ``copies``: what copies, by default the accelerator. Used by one thread, which may be one beside the
    training loop: what is asked of the device's default stream waits for the copies, and who uses another
    stream has that wait for the default one.
    """

    def __init__(self, device: Any, copies: Copies | None = None) -> None:
        self.device = torch.device(device)
        if copies is None and self.device.type != "cpu":
            copies = Copies(self.device)
        self._copies = copies
        self._under_way: tuple[Done, list[torch.Tensor]] | None = None  # what is copied from stays so long

    def memory(self, byte_count: int) -> NDArray[np.uint8]:
        """Memory to gather rows into, uint8 [byte_count]; for :class:`featstore.base.buffers.Outputs`."""
        return aligned_buffer(byte_count) if self._copies is None else self._copies.pinned(byte_count)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same on the device; those that are there stay as they are. Waits for the copies begun before
        these, so that no more than one mini-batch's memory is held for copies."""
        if self._copies is None:
            return dict(tensors)
        self.close()
        here = {name: one for name, one in tensors.items() if one.device.type == "cpu"}
        made, done = self._copies.copy(list(here.values()))
        self._under_way = done, list(here.values())
        return {**tensors, **dict(zip(here, made, strict=True))}

    def close(self) -> None:
        """Wait for what is under way. May be called more than once."""
        if self._under_way is not None:
            self._under_way[0].synchronize()
            self._under_way = None
