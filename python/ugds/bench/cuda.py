# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver, as far as benchmarks and tests need it: memory, streams, events, copies and three small kernels.

    gpu = cuda.gpu(0)
    with gpu.memory(1 << 20) as memory, gpu.stream() as stream, ugds.register(memory) as buffer:
        gpu.fill(memory.address, memory.nbytes, seed=7 << 16, stream=stream)
        device.write_async(buffer, stream=stream)
        stream.synchronize()

The library is `UGDS_CUDA_LIBRARY`, else libcuda.so.1. Everything raises `ugds.Error` with the driver's own words; where
there is no driver or no such GPU it is ENODEV. Work goes to the device's primary context, which PyTorch, CuPy, Numba
and JAX use as well. Thread-safe, as the driver is; no object here may be used after it was closed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ugds._core import Error
from ugds.bench.ptx import KERNELS, PTX

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY, NOT_READY = 2, 600
LEGACY, PER_THREAD = 1, 2  #: streams by number; 0 is the legacy one as well
_NON_BLOCKING = 1
_DMABUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_THREADS = 256

_handle, _pointer, _bytes = c_void_p, c_uint64, c_size_t
_launch = (_handle, *[c_uint] * 7, _handle, POINTER(c_void_p), POINTER(c_void_p))
# Parameters of every function that is used.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_handle), c_int),
    "cuCtxSetCurrent": (_handle,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(_pointer), _bytes),
    "cuMemFree_v2": (_pointer,),
    "cuMemHostAlloc": (POINTER(c_void_p), _bytes, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoD_v2": (_pointer, c_void_p, _bytes),
    "cuMemcpyDtoH_v2": (c_void_p, _pointer, _bytes),
    "cuMemcpyHtoDAsync_v2": (_pointer, c_void_p, _bytes, _handle),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _pointer, _bytes, _handle),
    "cuMemsetD8Async": (_pointer, ctypes.c_ubyte, _bytes, _handle),
    "cuMemGetHandleForAddressRange": (c_void_p, _pointer, _bytes, c_int, c_uint64),
    "cuStreamCreate": (POINTER(_handle), c_uint),
    "cuStreamDestroy_v2": (_handle,),
    "cuStreamSynchronize": (_handle,),
    "cuStreamQuery": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, c_uint),
    "cuStreamBeginCapture_v2": (_handle, c_int),
    "cuStreamEndCapture": (_handle, POINTER(_handle)),
    "cuGraphDestroy": (_handle,),
    "cuEventCreate": (POINTER(_handle), c_uint),
    "cuEventRecord": (_handle, _handle),
    "cuEventSynchronize": (_handle,),
    "cuEventElapsedTime": (POINTER(ctypes.c_float), _handle, _handle),
    "cuEventDestroy_v2": (_handle,),
    "cuModuleLoadData": (POINTER(_handle), c_char_p),
    "cuModuleUnload": (_handle,),
    "cuModuleGetFunction": (POINTER(_handle), _handle, c_char_p),
    "cuLaunchKernel": _launch,
}


def failed(operation: str, code: int, cause: str, hint: str = "") -> Error:
    """A `ugds.Error` made here, with every attribute that those of the library have."""
    error = Error(code, f"{operation} failed: {cause}{f'; {hint}' if hint else ''}")
    error.operation, error.cause, error.hint = operation, cause, hint
    error.device, error.offset, error.length, error.completed = "", 0, 0, 0
    error.status, error.status_text = None, ""
    return error


class Driver:
    """The driver's functions by name, each raising `ugds.Error` for what is not success."""

    def __init__(self) -> None:
        name = os.environ.get("UGDS_CUDA_LIBRARY") or LIBRARY
        hint = "install the GPU's driver, or name its library by UGDS_CUDA_LIBRARY"
        try:
            self.library = ctypes.CDLL(name)
            for function, parameters in _FUNCTIONS.items():
                getattr(self.library, function).argtypes = parameters
        except (OSError, AttributeError) as error:
            raise failed("finding a GPU", errno.ENODEV, f"there is no CUDA driver ({error})", hint) from None
        self.current = threading.local()  # `ordinal`: of the GPU whose context is this thread's
        if code := self.library.cuInit(0):
            raise failed("finding a GPU", errno.ENODEV, f"the CUDA driver does not start: {self.words(code)}", hint)

    def words(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        if self.library.cuGetErrorName(code, byref(name)) or self.library.cuGetErrorString(code, byref(text)):
            return f"CUDA error {code}"
        return f"{(name.value or b'').decode()} ({code}): {(text.value or b'').decode()}"

    def check(self, function: str, code: int) -> None:
        if code:
            number = errno.ENOMEM if code == OUT_OF_MEMORY else errno.EIO
            raise failed(function, number, self.words(code))

    def __call__(self, function: str, *arguments: Any) -> None:
        self.check(function, getattr(self.library, function)(*arguments))


@functools.lru_cache(maxsize=1)
def driver() -> Driver:
    """The one of this process. Raises `ugds.Error` (ENODEV) where there is none."""
    return Driver()


@functools.cache
def gpu(ordinal: int) -> Gpu:
    """The GPU of that number, one object for it in a process. Raises `ugds.Error` (ENODEV) where there is none."""
    return Gpu(driver(), ordinal)


class _Owned:
    """Something of the driver's, freed once: by `close`, or at the end of a `with` block."""

    def __init__(self, owner: Gpu, free: Callable[[], None]) -> None:
        self.gpu = owner
        self._free: Callable[[], None] | None = free

    @property
    def closed(self) -> bool:
        return self._free is None

    def close(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            self.gpu.use()
            free()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Memory(_Owned):
    """GPU memory: bytes, by the CUDA array interface."""

    def __init__(self, owner: Gpu, nbytes: int) -> None:
        address = c_uint64()
        owner.call("cuMemAlloc_v2", byref(address), nbytes)
        self.address, self.nbytes = int(address.value), nbytes
        super().__init__(owner, lambda: owner.call("cuMemFree_v2", self.address))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class Pinned(_Owned):
    """Memory of this process that the GPU copies from and to at full speed; `array` has its bytes."""

    def __init__(self, owner: Gpu, nbytes: int) -> None:
        address = c_void_p()
        owner.call("cuMemHostAlloc", byref(address), nbytes, 0)
        self.address, self.nbytes = int(address.value or 0), nbytes
        whole = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self.array: NDArray[np.uint8] = np.frombuffer(memoryview(whole), np.uint8)
        super().__init__(owner, lambda: owner.call("cuMemFreeHost", self.address))


class Stream(_Owned):
    """A stream; `handle` is the driver's."""

    def __init__(self, owner: Gpu, blocking: bool) -> None:
        made = c_void_p()
        owner.call("cuStreamCreate", byref(made), 0 if blocking else _NON_BLOCKING)
        self.handle = int(made.value or 0)
        self._synchronize = owner.driver.library.cuStreamSynchronize
        super().__init__(owner, lambda: owner.call("cuStreamDestroy_v2", self.handle))

    def synchronize(self) -> None:
        """Waits until all that was enqueued is done."""
        # As little as there can be: this is what benchmarks time.
        self.gpu.use()
        if code := self._synchronize(self.handle):
            self.gpu.driver.check("cuStreamSynchronize", code)

    def done(self) -> bool:
        """Whether all that was enqueued is done."""
        self.gpu.use()
        code = self.gpu.driver.library.cuStreamQuery(self.handle)
        if code != NOT_READY:
            self.gpu.driver.check("cuStreamQuery", code)
        return bool(code != NOT_READY)

    def wait(self, event: Event) -> None:
        """What is enqueued from now on waits for the event."""
        self.gpu.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def begin_capture(self) -> None:
        """Into a graph; a mode in which other threads are not disturbed."""
        self.gpu.call("cuStreamBeginCapture_v2", self.handle, 1)

    def end_capture(self) -> None:
        """Throws the graph away."""
        graph = c_void_p()
        self.gpu.call("cuStreamEndCapture", self.handle, byref(graph))
        if graph.value:
            self.gpu.call("cuGraphDestroy", graph)


class Event(_Owned):
    def __init__(self, owner: Gpu) -> None:
        made = c_void_p()
        owner.call("cuEventCreate", byref(made), 0)
        self.handle = int(made.value or 0)
        super().__init__(owner, lambda: owner.call("cuEventDestroy_v2", self.handle))

    def record(self, stream: Stream | None = None) -> None:
        self.gpu.call("cuEventRecord", self.handle, stream_number(stream))

    def synchronize(self) -> None:
        self.gpu.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """By the GPU's clock, of two that have passed."""
        taken = ctypes.c_float()
        self.gpu.call("cuEventElapsedTime", byref(taken), earlier.handle, self.handle)
        return float(taken.value)


def stream_number(stream: Stream | int | None) -> int:
    return stream.handle if isinstance(stream, Stream) else stream or 0


class Kernels(_Owned):
    """A module with the kernels of `ugds.bench.ptx`, each a function of the driver's by name."""

    def __init__(self, owner: Gpu) -> None:
        self._module = c_void_p()
        owner.call("cuModuleLoadData", byref(self._module), PTX.encode() + b"\0")
        super().__init__(owner, lambda: owner.call("cuModuleUnload", self._module))
        self._functions = {name: self._find(name) for name in KERNELS}

    def _find(self, name: str) -> c_void_p:
        function = c_void_p()
        self.gpu.call("cuModuleGetFunction", byref(function), self._module, name.encode())
        return function

    def launch(self, name: str, threads: int, stream: Stream | int | None, *numbers: int) -> None:
        """With 64-bit parameters, at most that many threads in all."""
        values = [c_uint64(number) for number in numbers]
        parameters = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        blocks = min(4096, -(-threads // _THREADS))
        shape = (blocks, 1, 1, min(threads, _THREADS), 1, 1)
        function = self._functions[name]
        self.gpu.call("cuLaunchKernel", function, *shape, 0, stream_number(stream), parameters, None)


class Gpu:
    """One GPU (see `gpu`)."""

    def __init__(self, found: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = found, ordinal
        count, device, context = c_int(), c_int(), c_void_p()
        found("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            there = "no GPU" if count.value == 0 else f"{count.value} of them, counted from 0"
            raise failed("finding a GPU", errno.ENODEV, f"there is no GPU {ordinal}: the driver has {there}")
        found("cuDeviceGet", byref(device), ordinal)
        name = ctypes.create_string_buffer(256)
        found("cuDeviceGetName", name, 256, device)
        self.name = name.value.decode(errors="replace")
        found("cuDevicePrimaryCtxRetain", byref(context), device)
        self._context = context
        self._kernels = Kernels(self)
        # A kernel is loaded when it first runs, which waits for every stream that waits for a word.
        with self.memory(4096) as memory:
            self.spin(0)
            self.fill(memory.address, 8, 0)
            self.check(memory.address, 0, 0, memory.address)
            self.synchronize()

    def use(self) -> None:
        """Makes the primary context this thread's."""
        current = self.driver.current
        if getattr(current, "ordinal", None) != self.ordinal:
            self.driver("cuCtxSetCurrent", self._context)
            current.ordinal = self.ordinal

    def call(self, function: str, *arguments: Any) -> None:
        """A function of the driver in this GPU's context."""
        self.use()
        self.driver(function, *arguments)

    def memory(self, nbytes: int) -> Memory:
        """Of unspecified contents. Raises `ugds.Error` (ENOMEM)."""
        return Memory(self, nbytes)

    def pinned(self, nbytes: int) -> Pinned:
        return Pinned(self, nbytes)

    def stream(self, blocking: bool = False) -> Stream:
        """One that does not wait for the legacy default stream, unless `blocking`."""
        return Stream(self, blocking)

    def event(self) -> Event:
        return Event(self)

    def load(self) -> Kernels:
        """The kernels once more, not yet used."""
        return Kernels(self)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    # --- Work on a stream (None: the default stream). None of it waits, but for `read` and `write`.

    def spin(self, nanoseconds: int, stream: Stream | int | None = None) -> None:
        """Takes that long."""
        self._kernels.launch("ugds_spin", 1, stream, nanoseconds)

    def fill(self, address: int, nbytes: int, seed: int, stream: Stream | int | None = None) -> None:
        """Writes `pattern(nbytes, seed)`."""
        self._kernels.launch("ugds_fill", max(1, min(nbytes, 1 << 20)), stream, address, nbytes, seed)

    def check(self, address: int, nbytes: int, seed: int, result: int, stream: Stream | int | None = None) -> None:
        """Adds the number of bytes that are not those of `pattern(nbytes, seed)` to the 64-bit number at `result`."""
        self._kernels.launch("ugds_check", max(1, min(nbytes, 1 << 20)), stream, address, nbytes, seed, result)

    def clear(self, address: int, nbytes: int, stream: Stream | int | None = None) -> None:
        self.call("cuMemsetD8Async", address, 0, nbytes, stream_number(stream))

    def copy_to_device(self, to: int, source: int, nbytes: int, stream: Stream | int | None = None) -> None:
        """From pinned memory."""
        self.call("cuMemcpyHtoDAsync_v2", to, source, nbytes, stream_number(stream))

    def copy_from_device(self, to: int, source: int, nbytes: int, stream: Stream | int | None = None) -> None:
        """To pinned memory."""
        self.call("cuMemcpyDtoHAsync_v2", to, source, nbytes, stream_number(stream))

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Puts bytes into GPU memory, and waits until they are there."""
        self.call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of GPU memory."""
        data = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", data.ctypes.data, address, nbytes)
        return data

    def wrong_bytes(self, address: int, nbytes: int, seed: int, stream: Stream | int | None = None) -> int:
        """How many bytes are not those of `pattern(nbytes, seed)`, compared by the GPU; waits for the stream."""
        with self.memory(8) as result:
            self.clear(result.address, 8, stream)
            self.check(address, nbytes, seed, result.address, stream)
            self.call("cuStreamSynchronize", stream_number(stream))
            return int(self.read(result.address, 8).view(np.uint64)[0])

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        """A descriptor of the range, to be closed by the caller. Raises `ugds.Error` where the driver does not."""
        descriptor = c_int(-1)
        self.call("cuMemGetHandleForAddressRange", byref(descriptor), address, nbytes, _DMABUF, 0)
        return descriptor.value


def pattern(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Byte i is bits 16 to 23 of seed + i * 2654435761: it repeats after 16 MiB, and seeds differ by those bits."""
    index = np.arange(nbytes, dtype=np.uint64)
    return ((index * np.uint64(2654435761) + np.uint64(seed)) >> np.uint64(16)).astype(np.uint8)
