# SPDX-License-Identifier: Apache-2.0
"""Synchronous requests by size and number of threads, and reads against memcpy."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence

import numpy as np

import ugds
from ugds._core import Device
from ugds._report import CommandError, Record
from ugds.bench.load import GIB, Load, Result
from ugds.bench.targets import DeviceTarget, Target
from ugds.bench.targets import measure as measure_loads

# Both sides of the comparison with memcpy go through the same amount of memory in the same order.
STEP, PAIRS = 1 << 20, 15
READ_PERCENT = {"read": 100, "write": 0, "mixed": 50}


def measure(
    targets: Sequence[Target],
    modes: Sequence[str],
    sizes: Sequence[int],
    threads: Sequence[int],
    seconds: float,
    processes: int | None = None,
) -> list[Record]:
    """A record for each mode, size, number of threads and target, the measured device's first: of this process, or the
    median of fresh ones. And one with `ratio_to_memcpy`, of this process alone. Writes to the device."""
    points = [(mode, Load(READ_PERCENT[mode], size, t, seconds)) for mode in modes for size in sizes for t in threads]
    found = measure_loads(targets, [load for _, load in points], processes)
    records = [
        _record(target, mode, load, result, processes)
        for (mode, load), results in zip(points, found, strict=True)
        for target, result in zip(targets, results, strict=True)
    ]
    ours = targets[0]
    if processes is None and isinstance(ours, DeviceTarget):
        records.append(ratio_to_memcpy(ours.device, ours.span))
    return records


def _record(target: Target, mode: str, load: Load, result: Result, processes: int | None) -> Record:
    every = result.every
    figures = {
        "gib_per_s": (every.gib_per_s, "GiB/s"),
        "requests_per_s": (every.requests_per_s, "1/s"),
        "p50_us": (every.p50_us, "us"),
        "p99_us": (every.p99_us, "us"),
        "mean_us": (every.mean_us, "us"),
    }
    params = {
        "mode": mode,
        "size": load.size,
        "threads": load.threads,
        **({} if processes is None else {"processes": processes}),
        **({} if target.kind is None else {"baseline": target.kind}),
    }
    return Record("sync", params, target.uri, result.memory, result.route, figures)


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
        total = len(steps) * STEP / GIB * 1e9
        figures = {
            "ratio_to_memcpy": (statistics.median(copied / taken for taken, copied in pairs), "1"),
            "read_gib_per_s": (total / statistics.median(taken for taken, _ in pairs), "GiB/s"),
            "memcpy_gib_per_s": (total / statistics.median(copied for _, copied in pairs), "GiB/s"),
        }
        params = {"mode": "read", "size": STEP, "threads": 1, "span": len(steps) * STEP, "pairs": PAIRS}
        return Record("sync", params, device.uri, buffer.memory, buffer.route, figures)
