# SPDX-License-Identifier: Apache-2.0
"""The ways in which bytes can be read: one registry, which the demonstration goes through.

A new way in is one function and one line in `MODES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ugds._core import Device, Registration

#: Reads device bytes [offset, offset + length) to the start of a buffer, in requests of at most `size` bytes. Gives the
#: latency of each request in nanoseconds.
Reader = Callable[[Device, Registration, int, int, int], list[int]]


@dataclass(frozen=True)
class Mode:
    name: str
    size: int  #: bytes a request
    read: Reader


def read_sync(device: Device, buffer: Registration, offset: int, length: int, size: int, start: int = 0) -> list[int]:
    """One request after another. `start` is where in the buffer the first byte goes."""
    clock, latencies = time.perf_counter_ns, []
    before = clock()
    for done in range(0, length, size):
        device.read(buffer, offset + done, min(size, length - done), start + done)
        after = clock()
        latencies.append(after - before)
        before = after
    return latencies


def read_threads(threads: int) -> Reader:
    """Synchronous requests from several threads, each on its own part of the range."""

    def read(device: Device, buffer: Registration, offset: int, length: int, size: int) -> list[int]:
        part = -(-length // (threads * size)) * size
        starts = range(0, length, part)
        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(
                lambda start: read_sync(device, buffer, offset + start, min(part, length - start), size, start), starts
            )
            return [latency for latencies in parts for latency in latencies]

    return read


def write_sync(device: Device, buffer: Registration, offset: int, length: int, size: int) -> list[int]:
    """The start of the buffer to the device, one request after another."""
    clock, latencies = time.perf_counter_ns, []
    before = clock()
    for done in range(0, length, size):
        device.write(buffer, offset + done, min(size, length - done), done)
        after = clock()
        latencies.append(after - before)
        before = after
    return latencies


_KIB, _MIB = 1 << 10, 1 << 20

MODES = (
    Mode("sync", 4 * _KIB, read_sync),
    Mode("sync", 64 * _KIB, read_sync),
    Mode("sync", 1 * _MIB, read_sync),
    Mode("sync", 16 * _MIB, read_sync),
    Mode("sync, 4 threads", 64 * _KIB, read_threads(4)),
)
