# SPDX-License-Identifier: Apache-2.0
"""Batches by request size and requests a batch: a fixed amount of data, batch after batch, in fresh processes.

    python -m ugds.bench.batch_figures URI MODE SIZE DEPTH TOTAL    measures once, and prints the seconds of each batch

The clock runs from the call that submits a batch until all of it has completed. Opening the device, registering the
buffer and setting the batch up are over before the first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import ugds
from ugds import _report
from ugds import sizes as units
from ugds._demo import in_memory
from ugds._report import CommandError, Record
from ugds.bench import load
from ugds.bench._devices import opened
from ugds.bench.fio import FileTarget
from ugds.bench.load import GIB
from ugds.bench.targets import DeviceTarget, Target


def run_batch(device: Any, mode: str, size: int, depth: int, total: int) -> list[float]:
    """Seconds of each batch of `depth` requests of `size` bytes, until `total` bytes are moved; at least two batches,
    since the first one is told apart. `mode` is read or write, to and from the device's start, in order."""
    if not hasattr(device, "batch"):
        raise CommandError("this build of uGDS has no batches")
    seconds = []
    own = np.arange(depth, dtype=np.int64) * size
    with ugds.empty(depth * size) as buffer, device.batch(depth=depth) as batch:
        submit = {"read": batch.read, "write": batch.write}[mode]
        for turn in range(max(2, total // (depth * size))):
            offsets = own + turn * depth * size
            before = time.perf_counter()
            submit(buffer, offsets=offsets, sizes=size, buffer_offsets=own)
            batch.wait()
            seconds.append(time.perf_counter() - before)
    return seconds


def once(uri: str, mode: str, size: int, depth: int, total: int) -> tuple[list[float], str, str]:
    """In this process; memory and route with it."""
    with opened(uri) as device:
        wanted = max(total, 2 * depth * size)
        if device.capacity < wanted:
            raise CommandError(f"{uri} holds less than {units.format(wanted)}, which this needs", status=2)
        if mode == "read" and in_memory(uri):  # anywhere else it was filled before
            load.fill(device, wanted)
        with ugds.empty(4096) as buffer:
            where = buffer.memory, buffer.route
        return run_batch(device, mode, size, depth, total), *where


def in_fresh_process(uri: str, mode: str, size: int, depth: int, total: int) -> tuple[list[float], str, str]:
    command = [sys.executable, "-m", "ugds.bench.batch_figures", uri, mode, str(size), str(depth), str(total)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(f"the measuring process failed:\n{done.stderr.strip()}")
    seconds, memory, route = json.loads(done.stdout)
    return seconds, memory, route


def baseline_batch(
    target: Target, mode: str, size: int, depth: int, total: int, fresh: bool = True
) -> tuple[list[float], str, str]:
    """The same on a target of either kind, a device by a fresh process or by this one: seconds of each batch, memory,
    route."""
    if isinstance(target, FileTarget):
        return target.batches(mode, size, depth, total), target.memory, target.route
    return (in_fresh_process if fresh else once)(target.uri, mode, size, depth, total)


def measure(
    targets: Sequence[Target],
    modes: Sequence[str],
    sizes: Sequence[int],
    depths: Sequence[int],
    total: int,
    processes: int | None,
) -> list[Record]:
    """A record for each mode, size, depth and target, the measured device's first: medians of fresh processes, or once
    in this one. Writes to the device."""
    fresh = processes is not None
    for target in targets:
        if "read" in modes and isinstance(target, DeviceTarget) and not in_memory(target.uri):
            _ = target.device  # fills it
            target.close()  # a device on the bus is one process's at a time
    records = []
    for mode in modes:
        for size in sizes:
            for depth in depths:
                point = (mode, size, depth, total)
                rounds = [[baseline_batch(t, *point, fresh) for t in targets] for _ in range(processes or 1)]
                params = {"mode": mode, "size": size, "depth": depth, "total": total}
                params |= {"processes": processes} if fresh else {}
                for target, runs in zip(targets, zip(*rounds, strict=True), strict=True):
                    said = {**params, **({} if target.kind is None else {"baseline": target.kind})}
                    figures = _figures([seconds for seconds, _, _ in runs], size * depth)
                    records.append(Record("batch", said, target.uri, runs[0][1], runs[0][2], figures))
    return records


def _figures(runs: Sequence[Sequence[float]], batch_bytes: int) -> dict[str, tuple[float, str]]:
    """Of the seconds of the batches of each process: medians over the processes."""
    every = statistics.median(len(run) * batch_bytes / sum(run) / GIB for run in runs)
    steady = statistics.median((len(run) - 1) * batch_bytes / sum(run[1:]) / GIB for run in runs)
    first = statistics.median(run[0] for run in runs)
    following = statistics.median(statistics.median(run[1:]) for run in runs)
    slowest = statistics.median(max(run[1:]) for run in runs)
    ratio = statistics.median(run[0] / statistics.median(run[1:]) for run in runs)
    return {
        "gib_per_s": (every, "GiB/s"),
        "steady_gib_per_s": (steady, "GiB/s"),
        "first_batch_ms": (first * 1000, "ms"),
        "following_batch_ms": (following * 1000, "ms"),
        "following_batch_max_ms": (slowest * 1000, "ms"),
        "first_batch_ratio": (ratio, "1"),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(once(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))))
    except ugds.Error as error:
        sys.exit(_report.describe(error))
    except CommandError as error:
        sys.exit(str(error))
