# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first byte: opening a device, registering a buffer, and one completed read.

    python -m ugds.bench.setup URI    measures once, in this fresh process, and prints nanoseconds

Imports are not counted: they are the interpreter's, and over before the clock starts.
"""

from __future__ import annotations

import mmap
import statistics
import subprocess
import sys
import time

import ugds
from ugds import _report
from ugds._report import CommandError, Record
from ugds.bench._devices import opened

SIZE = 4096


def first_read(uri: str) -> tuple[int, str, str]:
    """Nanoseconds from just before `ugds.open` to the completed first read; memory and route of the registration."""
    memory = mmap.mmap(-1, SIZE)
    start = time.perf_counter_ns()
    with opened(uri) as device:
        # A server of another process reaches only memory that it can map.
        registration = ugds.empty(SIZE) if device.transport == "vfio-user" else ugds.register(memory)
        device.read(registration)
        end = time.perf_counter_ns()
        where = registration.memory, registration.route
        registration.close()
    return end - start, *where


def in_fresh_process(uri: str) -> int:
    done = subprocess.run([sys.executable, "-m", "ugds.bench.setup", uri], capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(f"the measuring process failed:\n{done.stderr.strip()}")
    return int(done.stdout)


def measure(uri: str, processes: int, repetitions: int) -> list[Record]:
    # Says what is wrong with the device, where something is, before any process starts.
    _, memory, route = first_read(uri)
    fresh = [in_fresh_process(uri) / 1e6 for _ in range(processes)]
    again = [first_read(uri)[0] / 1e6 for _ in range(repetitions)]
    return [
        Record(
            "setup",
            {"processes": processes},
            uri,
            memory,
            route,
            {
                "open_to_first_read_ms": (statistics.median(fresh), "ms"),
                "open_to_first_read_max_ms": (max(fresh), "ms"),
            },
        ),
        Record(
            "setup",
            {"repetitions": repetitions},
            uri,
            memory,
            route,
            {
                "reopen_to_first_read_ms": (statistics.median(again), "ms"),
                "reopen_to_first_read_max_ms": (max(again), "ms"),
            },
        ),
    ]


if __name__ == "__main__":
    try:
        print(first_read(sys.argv[1])[0])
    except ugds.Error as error:
        sys.exit(_report.describe(error))
