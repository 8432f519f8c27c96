# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first byte: opening a device, registering a buffer, and one completed read.

    python -m ugds.bench.setup URI    measures once, in this fresh process, and prints nanoseconds

Imports are not counted: they are the interpreter's, and over before the clock starts.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import ugds
from ugds import _report
from ugds._report import CommandError, Record
from ugds.bench._devices import opened

SIZE = 4096


@dataclass(frozen=True)
class Stages:
    """How long each took, in nanoseconds."""

    open: int
    register: int
    read: int

    @property
    def total(self) -> int:
        return self.open + self.register + self.read


def first_read(uri: str) -> tuple[Stages, str, str]:
    """From just before `ugds.open` to the completed first read; memory and route of the registration."""
    memory, clock = mmap.mmap(-1, SIZE), time.perf_counter_ns
    start = clock()
    with opened(uri) as device:
        ready = clock()
        # A server of another process reaches only memory that it can map.
        registration = ugds.empty(SIZE) if device.transport == "vfio-user" else ugds.register(memory)
        registered = clock()
        device.read(registration)
        end = clock()
        where = registration.memory, registration.route
        registration.close()
    return Stages(ready - start, registered - ready, end - registered), *where


def in_fresh_process(uri: str) -> Stages:
    done = subprocess.run([sys.executable, "-m", "ugds.bench.setup", uri], capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(f"the measuring process failed:\n{done.stderr.strip()}")
    return Stages(*json.loads(done.stdout))


def measure(uri: str, processes: int, repetitions: int) -> list[Record]:
    # Says what is wrong with the device, where something is, before any process starts.
    _, memory, route = first_read(uri)
    fresh = [in_fresh_process(uri) for _ in range(processes)]
    totals = [stages.total / 1e6 for stages in fresh]
    again = [first_read(uri)[0].total / 1e6 for _ in range(repetitions)]
    return [
        Record(
            "setup",
            {"processes": processes},
            uri,
            memory,
            route,
            {
                "open_to_first_read_ms": (statistics.median(totals), "ms"),
                "open_to_first_read_max_ms": (max(totals), "ms"),
                "open_to_first_read_min_ms": (min(totals), "ms"),
                "open_ms": (statistics.median(stages.open for stages in fresh) / 1e6, "ms"),
                "register_ms": (statistics.median(stages.register for stages in fresh) / 1e6, "ms"),
                "first_read_ms": (statistics.median(stages.read for stages in fresh) / 1e6, "ms"),
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
                "reopen_to_first_read_min_ms": (min(again), "ms"),
            },
        ),
    ]


if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.astuple(first_read(sys.argv[1])[0])))
    except ugds.Error as error:
        sys.exit(_report.describe(error))
