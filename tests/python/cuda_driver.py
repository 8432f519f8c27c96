# SPDX-License-Identifier: Apache-2.0
"""A GPU for tests, through the CUDA driver alone: the real one (libcuda.so.1) or the fake (fake_cuda.py).

    gpu = Gpu()
    array = gpu.alloc(4096)           # has __cuda_array_interface__, .ptr, .nbytes, put, get, free
    stream = gpu.stream()             # has .ptr; synchronize, query, write_word, wait_word, call
    gpu.fill(array, seed=1, stream=stream)
    assert gpu.check(array, seed=1, stream=stream) == 0

Every call makes the GPU's primary context current for its own time, so any thread may call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ugds.bench.ptx import PTX

NOT_READY = 600
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_U64 = ctypes.c_uint64


class CudaError(RuntimeError):
    """A call of the driver did not give 0: `code` is what it gave."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} gave {code}")
        self.code = code


def pattern(nbytes: int, seed: int, offset: int = 0) -> bytes:
    """What `fill` with that seed leaves in the bytes from `offset` on."""
    i = np.arange(offset, offset + nbytes, dtype=np.uint64)
    with np.errstate(over="ignore"):
        values = np.uint64(seed) + i * np.uint64(2654435761)
    return ((values >> np.uint64(16)) & np.uint64(0xFF)).astype(np.uint8).tobytes()


class Array:
    """Device memory as bytes."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self.nbytes = nbytes
        address = _U64()
        with gpu.current():
            gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.ptr = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False), "version": 3, "strides": None}

    def put(self, data: bytes, offset: int = 0) -> None:
        """Copies bytes there, and returns when that is done."""
        with self._gpu.current():
            self._gpu.call("cuMemcpyHtoD_v2", _U64(self.ptr + offset), data, ctypes.c_size_t(len(data)))

    def get(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of the bytes, after all that the legacy default stream waits for."""
        size = self.nbytes - offset if nbytes is None else nbytes
        data = ctypes.create_string_buffer(max(size, 1))
        with self._gpu.current():
            self._gpu.call("cuMemcpyDtoH_v2", data, _U64(self.ptr + offset), ctypes.c_size_t(size))
        return data.raw[:size]

    def free(self) -> None:
        if self.ptr:
            with self._gpu.current():
                self._gpu.call("cuMemFree_v2", _U64(self.ptr))
            self.ptr = 0


class Pinned:
    """Host memory that the GPU reaches: `array` is it as numpy bytes, `ptr` its address."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self.nbytes = nbytes
        address = ctypes.c_void_p()
        with gpu.current():
            gpu.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), 1)
        self.ptr = address.value or 0
        self.array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.ptr), dtype=np.uint8)
        self.array[:] = 0

    def free(self) -> None:
        if self.ptr:
            with self._gpu.current():
                self._gpu.call("cuMemFreeHost", ctypes.c_void_p(self.ptr))
            self.ptr = 0


class Stream:
    """A stream. One that is not `blocking` does not wait for the legacy default stream."""

    def __init__(self, gpu: Gpu, blocking: bool) -> None:
        self._gpu = gpu
        self._functions: list[Any] = []
        stream = ctypes.c_void_p()
        with gpu.current():
            gpu.call("cuStreamCreate", ctypes.byref(stream), 0 if blocking else 1)
        self.ptr = stream.value or 0

    def synchronize(self) -> None:
        with self._gpu.current():
            self._gpu.call("cuStreamSynchronize", ctypes.c_void_p(self.ptr))

    def query(self) -> bool:
        """Whether everything on it is done."""
        with self._gpu.current():
            code = self._gpu.library.cuStreamQuery(ctypes.c_void_p(self.ptr))
        if code not in (0, NOT_READY):
            raise CudaError("cuStreamQuery", code)
        return code == 0

    def write_word(self, address: int, value: int) -> None:
        with self._gpu.current():
            self._gpu.call("cuStreamWriteValue64_v2", ctypes.c_void_p(self.ptr), _U64(address), _U64(value), 0)

    def wait_word(self, address: int, value: int) -> None:
        """It goes on when the word at the address is `value` or after."""
        with self._gpu.current():
            self._gpu.call("cuStreamWaitValue64_v2", ctypes.c_void_p(self.ptr), _U64(address), _U64(value), 0)

    def call(self, function: Callable[[], None]) -> None:
        """Calls it in the driver's thread when the stream gets there; it may not call the driver."""
        kept = _HOST_FUNCTION(lambda _: function())
        self._functions.append(kept)
        with self._gpu.current():
            self._gpu.call("cuLaunchHostFunc", ctypes.c_void_p(self.ptr), kept, None)

    def begin_capture(self, mode: int = 0) -> None:
        with self._gpu.current():
            self._gpu.call("cuStreamBeginCapture_v2", ctypes.c_void_p(self.ptr), mode)

    def end_capture(self) -> None:
        """Ends the capture and drops its graph; CudaError(901) where something spoiled it."""
        graph = ctypes.c_void_p()
        with self._gpu.current():
            self._gpu.call("cuStreamEndCapture", ctypes.c_void_p(self.ptr), ctypes.byref(graph))
            self._gpu.call("cuGraphDestroy", graph)

    def destroy(self) -> None:
        if self.ptr:
            with self._gpu.current():
                self._gpu.call("cuStreamDestroy_v2", ctypes.c_void_p(self.ptr))
            self.ptr = 0


class Gpu:
    """A GPU by its number, in its primary context. What `alloc`, `pinned` and `stream` made, `close` takes away."""

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library)
        self.ordinal = ordinal
        self._made: list[Array | Pinned | Stream] = []
        self._kernels: dict[str, ctypes.c_void_p] = {}
        self._module = ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    def call(self, function: str, *arguments: Any) -> None:
        """A function of the driver; CudaError where it does not give 0."""
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise CudaError(function, code)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The GPU's context is this thread's current one inside."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.library.cuCtxPopCurrent_v2(None)

    def alloc(self, nbytes: int) -> Array:
        array = Array(self, nbytes)
        self._made.append(array)
        return array

    def pinned(self, nbytes: int) -> Pinned:
        memory = Pinned(self, nbytes)
        self._made.append(memory)
        return memory

    def stream(self, blocking: bool = False) -> Stream:
        stream = Stream(self, blocking)
        self._made.append(stream)
        return stream

    def synchronize(self) -> None:
        with self.current():
            self.call("cuCtxSynchronize")

    def load(self) -> None:
        """Launches every kernel once, which loads them. A first launch waits until no stream waits for a word."""
        word = self.alloc(8)
        self.spin(1)
        self._launch("ugds_fill", (word.ptr, 8, 0), None, 8)
        self._launch("ugds_check", (word.ptr, 0, 0, word.ptr), None, 8)
        self.synchronize()
        word.free()

    def fill(self, array: Array, seed: int, stream: Stream | None = None, offset: int = 0, nbytes: int = -1) -> None:
        """Enqueues a kernel that writes `pattern(nbytes, seed)` into the array from `offset` on."""
        size = array.nbytes - offset if nbytes < 0 else nbytes
        self._launch("ugds_fill", (array.ptr + offset, size, seed), stream, size)

    def launch_check(
        self, array: Array, seed: int, result: int, stream: Stream | None = None, offset: int = 0, nbytes: int = -1
    ) -> None:
        """Enqueues a kernel that adds how many bytes are wrong to the 64-bit word of device memory at `result`."""
        size = array.nbytes - offset if nbytes < 0 else nbytes
        self._launch("ugds_check", (array.ptr + offset, size, seed, result), stream, size)

    def check(self, array: Array, seed: int, stream: Stream | None = None, offset: int = 0, nbytes: int = -1) -> int:
        """How many bytes are not `pattern(nbytes, seed)` when the stream gets there. Waits for the stream."""
        word = self.alloc(8)
        word.put(bytes(8))
        self.launch_check(array, seed, word.ptr, stream, offset, nbytes)
        self.synchronize() if stream is None else stream.synchronize()
        wrong = int.from_bytes(word.get(), "little")
        word.free()
        self._made.remove(word)
        return wrong

    def spin(self, nanoseconds: int, stream: Stream | None = None) -> None:
        """Enqueues a kernel that takes that long."""
        self._launch("ugds_spin", (nanoseconds,), stream, 1)

    def close(self) -> None:
        """Frees all that is left, after all that was enqueued. Waits for ever where a stream does."""
        if not self._context:
            return
        for made in reversed(self._made):
            made.destroy() if isinstance(made, Stream) else made.free()
        if self._module:
            with self.current():
                self.call("cuModuleUnload", self._module)
        self.call("cuDevicePrimaryCtxRelease_v2", self.ordinal)
        self._context = ctypes.c_void_p()

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kernel(self, name: str) -> ctypes.c_void_p:
        if name not in self._kernels:
            if not self._module:
                self.call("cuModuleLoadData", ctypes.byref(self._module), PTX.encode())
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._kernels[name] = function
        return self._kernels[name]

    def _launch(self, name: str, numbers: tuple[int, ...], stream: Stream | None, width: int) -> None:
        values = [_U64(number) for number in numbers]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        threads = 1 if name == "ugds_spin" else 256
        blocks = max(1, min(1024, -(-width // threads)))
        on = ctypes.c_void_p(stream.ptr if stream else None)
        with self.current():
            kernel = self._kernel(name)
            self.call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, on, pointers, None)
