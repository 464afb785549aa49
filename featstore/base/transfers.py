"""From host memory to a device, beside what the training loop does there.

Rows are gathered into *pinned* memory, which the device can read by itself and which is used again
(:class:`featstore.base.buffers.Outputs`). All that is asked of the device for a mini-batch, copies and
kernels, is in a stream of its own: neither the loop nor its kernels wait for that, but only who uses the
mini-batch. Whoever takes it says so in a stream of theirs (:meth:`Transfer.hand`). On the processor tests put
another in the accelerator's place, whose copies are late.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer, private_buffer
from featstore.base.native import address_of
from featstore.errors import DeviceError


class Done(Protocol):
    """What tells that copies have been made: an event of torch's."""

    def synchronize(self) -> None: ...


class Copies:
    """An accelerator, and a stream of our own on it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def pinned(self, byte_count: int) -> NDArray[np.uint8]:
        """Memory that the device reads by itself, uint8 [byte_count]. Raises DeviceError."""
        if self._device.type != "cuda":
            memory: NDArray[np.uint8] = torch.empty(byte_count, dtype=torch.uint8, pin_memory=True).numpy()
            return memory
        return _registered(byte_count)  # torch would take up to twice as much, and keep it

    def within(self) -> AbstractContextManager[Any]:
        """What this thread asks of the device in here is in our own stream, the current one meanwhile."""
        stream: AbstractContextManager[Any] = self._module.stream(self._stream)
        return stream

    def now(self) -> Done:
        """All that the current stream has been asked for so far."""
        done = self._module.Event()
        done.record(self._module.current_stream(self._device))
        return done  # type: ignore[no-any-return]

    def after(self, done: Done) -> None:
        """What is asked of the current stream from now on comes after that."""
        self._module.current_stream(self._device).wait_event(done)

    def keep(self, made: Iterable[Any]) -> None:
        """The memory of tensors made in another stream stays theirs until the current one is done with
        them."""
        current = self._module.current_stream(self._device)
        for one in made:
            one.record_stream(current)

    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Done]:
        """Begin to copy; what is asked of the current stream from now on waits for it."""
        pinned = [one if one.is_pinned() else one.pin_memory() for one in tensors]
        with self.within():
            made = [one.to(self._device, non_blocking=True) for one in pinned]
            done = self.now()
        self.after(done)
        self.keep(made)  # or their memory would be given to the next copy too early
        return made, done


def _registered(byte_count: int) -> NDArray[np.uint8]:
    """Memory that is pinned for CUDA while somebody has it."""
    memory, runtime = private_buffer(byte_count), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = address_of(memory)
    if not byte_count:
        return memory
    error = int(runtime.cudaHostRegister(address, byte_count, 0))
    if error:
        raise DeviceError(errno.ENOMEM, f"{byte_count:,} bytes for CUDA (its error {error})", doing="pin")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


class Transfer:
    """Brings tensors to ``device``, as torch takes it; where that is the host's memory they are there.

    ``copies``: what copies, by default the accelerator. Used by one thread, which may be one beside the
    training loop, :meth:`within` it; what it made is handed over by :meth:`mark` and, in the loop's thread,
    :meth:`hand`.
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

    def within(self) -> AbstractContextManager[Any]:
        """All that this thread asks of the device in here goes on beside what others ask of it."""
        return nullcontext() if self._copies is None else self._copies.within()

    def mark(self) -> Done | None:
        """What the current stream was asked for so far; nothing where there are no streams."""
        return None if self._copies is None else self._copies.now()

    def hand(self, mark: Done | None, made: Iterable[Any] = ()) -> None:
        """What is asked of the current stream from now on comes after ``mark``, and may use ``made``: tensors
        on the device, and what else of torch's has a ``record_stream``."""
        if self._copies is not None and mark is not None:
            self._copies.after(mark)
            self._copies.keep(made)

    def keep(self, made: Iterable[Any]) -> None:
        """The memory of what was made :meth:`within` stays its own until the current stream is done with
        it."""
        if self._copies is not None:
            self._copies.keep(made)

    def close(self) -> None:
        """Wait for what is under way. May be called more than once."""
        if self._under_way is not None:
            self._under_way[0].synchronize()
            self._under_way = None
