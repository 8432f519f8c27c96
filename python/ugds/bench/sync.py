# SPDX-License-Identifier: Apache-2.0
"""Synchronous requests by size and number of threads, and reads against memcpy."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

import ugds
from ugds import sizes as units
from ugds._core import Device, Registration
from ugds._report import CommandError, Record
from ugds.bench._devices import opened

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
SMALLEST, LARGEST = 4 * _KIB, 64 * _MIB
MOST_THREADS = 64
# Both sides of the comparison with memcpy go through the same amount of memory in the same order.
COMPARED, STEP, PAIRS = 256 * _MIB, 1 * _MIB, 15


def parse_sizes(text: str) -> list[int]:
    try:
        found = [units.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--sizes: {error}", status=2) from None
    for size in found:
        if not SMALLEST <= size <= LARGEST or size % SMALLEST:
            raise CommandError(f"--sizes: {size} is not a multiple of 4KiB from 4KiB to 64MiB", status=2)
    return found


def parse_threads(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_THREADS for part in parts):
        raise CommandError(f'--threads: "{text}" is not a list of numbers from 1 to {MOST_THREADS}', status=2)
    return [int(part) for part in parts]


def measure(uri: str, sizes: list[int], threads: list[int], mode: str, seconds: float) -> list[Record]:
    """A record for each size and number of threads, and one with `ratio_to_memcpy`. Writes to the device."""
    with opened(uri) as device:
        span = min(device.capacity, COMPARED)
        if span < LARGEST:
            raise CommandError(f"{uri} holds less than {units.format(LARGEST)}, which this needs", status=2)
        fill(device, span)
        records = [point(device, span, size, count, mode, seconds) for size in sizes for count in threads]
        records.append(ratio_to_memcpy(device, span))
    return records


def fill(device: Device, span: int) -> None:
    """Random bytes, so that every page of the device is its own memory and no copy is of zeros."""
    with ugds.empty(16 * _MIB) as registration:  # what every transport can reach
        data = np.frombuffer(memoryview(registration), np.uint8)
        data[:] = np.random.default_rng(1).integers(0, 256, data.size, np.uint8)
        for offset in range(0, span, data.size):
            data[: 8 * _KIB] = offset >> 24 & 0xFF
            device.write(registration, offset, min(data.size, span - offset))
        del data
    device.flush()


@dataclass
class _Worker:
    """One thread's requests: sequential through its own part of the device."""

    device: Device
    buffer: Registration
    start: int
    length: int
    size: int
    mode: str
    latencies: list[int]
    error: BaseException | None = None

    def run(self, gate: threading.Barrier, deadline: list[float]) -> None:
        try:
            gate.wait()
            self._run(deadline[0])
        except BaseException as error:  # reported by the thread that waits for this one
            self.error = error

    def _run(self, deadline: float) -> None:
        device, buffer, size, clock = self.device, self.buffer, self.size, time.perf_counter_ns
        write = {"read": (False,), "write": (True,), "mixed": (False, True)}[self.mode]
        end, offset, turn, latencies = int(deadline * 1e9), self.start, 0, self.latencies
        before = clock()
        while before < end or not latencies:
            if write[turn % len(write)]:
                device.write(buffer, offset, size)
            else:
                device.read(buffer, offset, size)
            after = clock()
            latencies.append(after - before)
            before = after
            turn += 1
            offset += size
            if offset + size > self.start + self.length:
                offset = self.start


def point(device: Device, span: int, size: int, threads: int, mode: str, seconds: float) -> Record:
    part = max(size, span // threads // size * size)
    buffers = [ugds.empty(size) for _ in range(threads)]
    try:
        workers = [
            _Worker(device, buffer, index * part % max(size, span - part + 1) // size * size, part, size, mode, [])
            for index, buffer in enumerate(buffers)
        ]
        deadline: list[float] = [0.0]
        started: list[int] = []

        def release() -> None:
            started.append(time.perf_counter_ns())
            deadline[0] = started[0] / 1e9 + seconds

        gate = threading.Barrier(threads, release)
        running = [threading.Thread(target=worker.run, args=(gate, deadline)) for worker in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        elapsed = (time.perf_counter_ns() - started[0]) / 1e9
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        latencies = np.concatenate([worker.latencies for worker in workers])
        p50, p99 = np.percentile(latencies, [50, 99]) / 1000
        figures = {
            "gib_per_s": (latencies.size * size / elapsed / _GIB, "GiB/s"),
            "requests_per_s": (latencies.size / elapsed, "1/s"),
            "p50_us": (float(p50), "us"),
            "p99_us": (float(p99), "us"),
        }
        params = {"mode": mode, "size": size, "threads": threads}
        return Record("sync", params, device.uri, buffers[0].memory, buffers[0].route, figures)
    finally:
        for buffer in buffers:
            buffer.close()


def ratio_to_memcpy(device: Device, span: int) -> Record:
    """1 MiB reads of the whole span into one buffer, against memcpy of as many random bytes to another, in turn in one
    run: the median over the pairs of the ratio of their throughputs. Either call is made through one Python call a MiB
    and releases the interpreter's lock. What was read is compared with the device's own bytes afterwards."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = ctypes.c_void_p
    source = np.random.default_rng(2).integers(0, 256, span, np.uint8)
    target = np.empty(STEP, np.uint8)
    steps = range(0, span // STEP * STEP, STEP)

    with ugds.empty(STEP) as buffer:
        # Both hold the same bytes, so that the comparison at the end covers both.
        view = np.frombuffer(memoryview(buffer), np.uint8)
        for offset in steps:
            view[:] = source[offset : offset + STEP]
            device.write(buffer, offset, STEP)
        device.flush()

        def read() -> int:
            before = time.perf_counter_ns()
            for offset in steps:
                device.read(buffer, offset, STEP)
            return time.perf_counter_ns() - before

        start, to = source.ctypes.data, target.ctypes.data

        def copy() -> int:
            before = time.perf_counter_ns()
            for offset in steps:
                memcpy(to, start + offset, STEP)
            return time.perf_counter_ns() - before

        read(), copy()
        pairs = []
        for turn in range(PAIRS):
            first, second = (read, copy) if turn % 2 == 0 else (copy, read)
            one, other = first(), second()
            pairs.append((one, other) if turn % 2 == 0 else (other, one))
        for offset in steps:
            view[:] = 0
            device.read(buffer, offset, STEP)
            memcpy(to, start + offset, STEP)
            if not np.array_equal(view, target):
                raise CommandError(f"{device.uri}: what was read at byte {offset} is not what was written")
        del view
        total = len(steps) * STEP / _GIB * 1e9
        figures = {
            "ratio_to_memcpy": (statistics.median(copied / taken for taken, copied in pairs), "1"),
            "read_gib_per_s": (total / statistics.median(taken for taken, _ in pairs), "GiB/s"),
            "memcpy_gib_per_s": (total / statistics.median(copied for _, copied in pairs), "GiB/s"),
        }
        params = {"mode": "read", "size": STEP, "threads": 1, "span": len(steps) * STEP, "pairs": PAIRS}
        return Record("sync", params, device.uri, buffer.memory, buffer.route, figures)
