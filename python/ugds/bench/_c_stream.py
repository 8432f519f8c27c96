# SPDX-License-Identifier: Apache-2.0
"""Stream-ordered reads through the C interface, called by ctypes: what they cost without the Python package.

What ctypes itself takes for a call is measured beside them, by a function of the C library that does next to nothing,
and taken away once more: the stream's way is two calls where the synchronous one is one.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from typing import Any

from ugds import _core
from ugds.bench import cuda
from ugds.bench._gpu import in_turn, seconds

SIZE = 4096
_USER_SPACE = 3  # the descriptor's handle is a URI


class _Result(ctypes.Structure):
    _fields_ = (("err", c_int), ("cu_err", c_int))


class _Descriptor(ctypes.Structure):
    _fields_ = (("type", c_int), ("handle", ctypes.c_char_p))


class _Refused(Exception):
    """The library does not do this here."""


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_core.library_path())
    returning = ("DriverOpen", "DriverClose", "HandleRegister", "BufRegister", "BufDeregister")
    for name in (*returning, "StreamRegister", "StreamDeregister"):
        getattr(library, f"uGDS{name}").restype = _Result
    library.uGDSHandleDeregister.argtypes = (c_void_p,)
    library.uGDSHandleDeregister.restype = None
    library.uGDSBufRegister.argtypes = (c_void_p, c_size_t, c_int)
    library.uGDSBufDeregister.argtypes = (c_void_p,)
    library.uGDSStreamRegister.argtypes = library.uGDSStreamDeregister.argtypes = (c_void_p,)
    library.uGDSRead.argtypes = (c_void_p, c_void_p, c_size_t, c_int64, c_int64)
    library.uGDSRead.restype = c_ssize_t
    numbers = (POINTER(c_size_t), POINTER(c_int64), POINTER(c_int64), POINTER(c_ssize_t))
    library.uGDSReadAsync.argtypes = (c_void_p, c_void_p, *numbers, c_void_p)
    library.uGDSReadAsync.restype = _Result
    return library


@contextmanager
def _set_up(library: ctypes.CDLL, uri: str, memory: cuda.Memory, stream: cuda.Stream) -> Iterator[c_void_p]:
    """The handle of a device of its own, with memory and stream registered. Raises _Refused."""

    def ask(result: _Result) -> None:
        if result.err:
            raise _Refused

    handle, descriptor = c_void_p(), _Descriptor(_USER_SPACE, uri.encode())
    undo: list[Callable[[], Any]] = []
    try:
        ask(library.uGDSDriverOpen())
        undo.append(library.uGDSDriverClose)
        ask(library.uGDSHandleRegister(byref(handle), byref(descriptor)))
        undo.append(lambda: library.uGDSHandleDeregister(handle))
        ask(library.uGDSBufRegister(memory.address, memory.nbytes, 0))
        undo.append(lambda: library.uGDSBufDeregister(memory.address))
        ask(library.uGDSStreamRegister(stream.handle))
        undo.append(lambda: library.uGDSStreamDeregister(stream.handle))
        yield handle
    finally:
        for step in reversed(undo):
            step()


def extra_us(gpu: cuda.Gpu, uri: str, route: str, rounds: int, count: int) -> float | None:
    """One 4 KiB read on a stream and its synchronisation, less a synchronous call, in microseconds: the median of
    rounds in turn. None where the C interface does not do it, or would not by this route: it takes no wish for one, and
    memory goes the direct one where there is one."""
    if not uri.startswith("emulated:") or route != "direct":  # any other device is one handle's at a time
        return None
    library = _library()
    nothing = ctypes.CDLL(None).labs
    size, offset, place, done = c_size_t(SIZE), c_int64(0), c_int64(0), c_ssize_t(0)
    numbers = (byref(size), byref(offset), byref(place), byref(done))
    with gpu.memory(SIZE) as memory, gpu.stream() as stream:
        try:
            with _set_up(library, uri, memory, stream) as handle:
                read, read_async, wait = library.uGDSRead, library.uGDSReadAsync, stream.synchronize

                def synchronous() -> None:
                    for _ in range(count):
                        if read(handle, memory.address, SIZE, 0, 0) != SIZE:
                            raise _Refused

                def streamed() -> None:
                    for _ in range(count):
                        if read_async(handle, memory.address, *numbers, stream.handle).err:
                            raise _Refused
                        wait()
                        if done.value != SIZE:
                            raise _Refused

                def empty() -> None:
                    for _ in range(count):
                        nothing(0)

                ways = {"sync": synchronous, "stream": streamed, "empty": empty}
                found = in_turn(rounds, {name: _timed(way) for name, way in ways.items()})
        except _Refused:
            return None
    each = zip(found["stream"], found["sync"], found["empty"], strict=True)
    return statistics.median(a - b - c for a, b, c in each) * 1e6 / count


def _timed(work: Callable[[], None]) -> Callable[[], float]:
    return lambda: seconds(work)
