# SPDX-License-Identifier: Apache-2.0
"""A copier for fastsafetensors (0.4 and 0.5), by which its loaders read files through uGDS. Importing this registers it
as `ugds`:

    import ugds.fastsafetensors
    from fastsafetensors.loader import BaseSafeTensorsFileLoader

    loader = BaseSafeTensorsFileLoader(None, Device("cuda:0"), copier_type="ugds")

What is read lands in the memory that fastsafetensors allocates. `max_threads` and the other parameters of its own
copiers are taken, and mean nothing here. Raises `ugds.Error` where a file cannot be read.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ugds
from ugds._load import layout, transfer
from ugds._load.files import Source
from ugds._load.layout import Run
from ugds._load.transfer import Piece

try:
    from fastsafetensors.copier.base import CopierInterface
    from fastsafetensors.copier.registry import register_copier_constructor
except ImportError as error:
    raise ImportError(
        f"this needs fastsafetensors ({error}); what to do: pip install fastsafetensors", name="fastsafetensors"
    ) from error

__all__ = ["Copier"]

NAME = "ugds"
#: Files that are read at once, each by the threads of `ugds._load.transfer`.
_FILES = 2


class Copier(CopierInterface):  # type: ignore[misc]
    """Reads one file, as fastsafetensors asks for it."""

    def __init__(self, metadata: Any, device: Any, framework: Any, pool: ThreadPoolExecutor) -> None:
        self.metadata = metadata
        self.device = device
        self.framework = framework
        self._pool = pool
        self._ranges: Iterable[tuple[int, int]] | None = None
        self._reading: Future[None] | None = None

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Reads these parts of the file alone, from and up to a byte."""
        super().set_byte_ranges(byte_ranges)
        self._ranges = byte_ranges if byte_ranges is None else list(byte_ranges)

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """The memory for the file's tensors, into which they are being read."""
        head, size = self.metadata.header_length, self.metadata.size_bytes
        ranges = [(head, size)] if self._ranges is None else self._ranges
        runs = [Run(start, end - start, start - head) for start, end in ranges]
        buffer = self.framework.alloc_tensor_memory(size - head, self.device)
        on_gpu = str(self.device.type).lower().rpartition(".")[2] != "cpu"
        if on_gpu:
            self.framework.synchronize(self.device)  # its stream may still use the memory for what was in it
        memory = _Memory(buffer.get_base_address(), size - head, on_gpu)
        self._reading = self._pool.submit(_read, self.metadata.src, memory, runs)
        return buffer

    def finish_io(self) -> None:
        """Nothing is written to the memory any more when this returns."""
        if self._reading is not None:
            with contextlib.suppress(Exception):  # `wait_io` raises it
                self._reading.result()

    def wait_io(self, gbuf: Any, dtype: Any = None, noalign: bool = False, **more: Any) -> Any:
        """The tensors."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.result()
        if dtype is not None:
            more["dtype"] = dtype
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, **more)


class _Memory:
    """Memory that somebody else allocated, as what `ugds.register` takes."""

    def __init__(self, address: int, size: int, on_gpu: bool) -> None:
        self.size = size
        self.registrable: Any
        if on_gpu:
            self.registrable = self
            data = (address, False)
            self.__cuda_array_interface__ = {
                "shape": (size,),
                "typestr": "|u1",
                "data": data,
                "strides": None,
                "version": 3,
            }
        else:
            self.registrable = (ctypes.c_ubyte * size).from_address(address) if size else None


def _read(path: str, memory: _Memory, runs: list[Run]) -> None:
    if memory.size == 0:
        return
    with Source(path) as source:
        device = source.device()
        with ugds.register(memory.registrable, devices=[device]) as buffer:
            pieces = [Piece(path, device, buffer, *piece) for piece in layout.pieces(runs)]
            transfer.read(pieces, lambda count: None, len(pieces))


@register_copier_constructor(NAME)  # type: ignore[untyped-decorator]
def new_copier(device: Any, **_options: Any) -> Callable[[Any, Any, Any], Copier]:
    """What fastsafetensors calls for each loader."""
    pool = ThreadPoolExecutor(_FILES, thread_name_prefix="ugds-files")

    def construct(metadata: Any, device: Any, framework: Any) -> Copier:
        return Copier(metadata, device, framework, pool)

    return construct
