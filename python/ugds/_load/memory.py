# SPDX-License-Identifier: Apache-2.0
"""Memory that tensors are in: of PyTorch, on the host and on GPUs, and of NumPy. Everything else here knows bytes only.

An `Arena` is one allocation into which a file is read. A tensor of it has a storage of its own, of just its bytes,
which keeps the arena alive: what is saved or measured of a tensor is the tensor, and the memory is free with the last
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy

import ugds
from ugds._core import Device, Registration
from ugds._load.layout import PAGE

if TYPE_CHECKING:
    from ugds._load.transfer import Content


def torch_module() -> Any:
    """PyTorch. Raises ImportError that says what to install."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"this needs PyTorch ({error}); what to do: pip install torch", name="torch") from error
    return torch


class Arena(Protocol):
    """Memory from a page's beginning on."""

    def register(self, devices: Sequence[Device]) -> Registration:
        """For those devices, until it is closed."""
        ...

    def part(self, place: int, size: int) -> Any:
        """A tensor or array of bytes."""
        ...


class HostArray:
    """An arena of NumPy."""

    def __init__(self, size: int) -> None:
        memory = numpy.empty(size + PAGE, numpy.uint8)
        skip = -memory.ctypes.data % PAGE
        self._memory = memory[skip : skip + size]

    def register(self, devices: Sequence[Device]) -> Registration:
        return ugds.register(self._memory, devices=devices)

    def part(self, place: int, size: int) -> Any:
        return self._memory[place : place + size]


class TorchArena:
    """An arena of PyTorch, in the host's memory or a GPU's."""

    def __init__(self, size: int, device: Any) -> None:
        """Raises torch.OutOfMemoryError, and what PyTorch says of devices that are not there."""
        torch = torch_module()
        memory = torch.empty(size + PAGE, dtype=torch.uint8, device=device)
        skip = -memory.data_ptr() % PAGE
        self._memory = memory[skip : skip + size]
        if self._memory.is_cuda:
            # What was enqueued before may still use the memory, for whose next owner the stream alone waits.
            torch.cuda.current_stream(self._memory.device).synchronize()

    def register(self, devices: Sequence[Device]) -> Registration:
        memory = self._memory
        return ugds.register(memory if memory.is_cuda else memory.numpy(), devices=devices)

    def part(self, place: int, size: int) -> Any:
        return torch_module().from_dlpack(self._memory[place : place + size])


def torch_device(device: Any) -> Any:
    """A device of PyTorch, with its number. Raises ValueError for one that nothing is read into here."""
    torch = torch_module()
    if isinstance(device, int):
        device = f"cuda:{device}"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'"{device}" is no device of PyTorch: {str(error).splitlines()[0]}') from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f'"{found}": files are read into memory of "cpu" and "cuda"; load to "cpu", then tensor.to()')
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'"{found}": this PyTorch finds no GPU; what to do: load to "cpu", or see torch.cuda')
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return torch.device("cpu")


class Bytes:
    """What a tensor, an array or a `bytes` is in memory: read only, and in one piece."""

    def __init__(self, data: Any) -> None:
        """data: bytes, a one-dimensional array of bytes, or such a tensor."""
        self.gpu: Any = None  #: the device of PyTorch, where it is no host memory
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = numpy.frombuffer(data, numpy.uint8)
        elif not isinstance(data, numpy.ndarray):
            self.gpu = data.device if data.is_cuda else None
            data = data if data.is_cuda else data.numpy()
        self.data = data
        self.size: int = int(data.nbytes)


class Staging:
    """Registered host memory from which whole blocks are written. Closed by `with`."""

    def __init__(self, size: int, contents: Sequence[Content], device: Device) -> None:
        self._stack = ExitStack()
        gpus = {content.data.gpu for content in contents if content.data.gpu is not None}
        self._tensor: Any = None
        if gpus:
            # Pinned, so that a GPU's copy engine writes to it; and nothing is copied that a kernel has yet to compute.
            torch = torch_module()
            self._tensor = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True)
            for gpu in gpus:
                torch.cuda.current_stream(gpu).synchronize()
        whole = numpy.empty(size + PAGE, numpy.uint8) if self._tensor is None else self._tensor.numpy()
        self._skip = -whole.ctypes.data % PAGE
        self._bytes = whole[self._skip : self._skip + size]
        self.buffer = self._stack.enter_context(ugds.register(self._bytes, devices=[device]))

    def fill(self, place: int, source: Bytes, start: int, size: int) -> None:
        """Copies bytes of a source. Not thread-safe: each thread has its own."""
        if source.gpu is None:
            self._bytes[place : place + size] = source.data[start : start + size]
        else:
            at = self._skip + place
            self._tensor[at : at + size].copy_(source.data[start : start + size])

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


NewArena = Callable[[int, Any], Arena]
