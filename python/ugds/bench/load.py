# SPDX-License-Identifier: Apache-2.0
"""A load of synchronous requests, one in flight a thread, and what it came to.

What puts it on a device is here; `ugds.bench.fio` puts the same load on a file.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ugds
from ugds import sizes as units
from ugds._core import Device, Registration
from ugds._report import CommandError

_KIB, _MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALLEST, LARGEST = 4 * _KIB, 64 * _MIB
MOST_THREADS = 64
#: Bytes that a load goes over, where the device or file has as many.
SPAN = 256 * _MIB


@dataclass(frozen=True)
class Load:
    """`threads` threads, each with one request of `size` bytes after another, for `seconds`. Each goes through its own
    part of the device in order; of its requests `read_percent` in a hundred are reads, evenly spread, the rest writes.
    """

    read_percent: int
    size: int
    threads: int
    seconds: float

    @property
    def pattern(self) -> tuple[bool, ...]:
        """Whether each request of the shortest period is a write."""
        period = 100 // math.gcd(100, self.read_percent)
        writes = period * (100 - self.read_percent) // 100
        return tuple((turn + 1) * writes // period > turn * writes // period for turn in range(period))

    def part(self, span: int) -> int:
        """Bytes that each thread goes through, of `span`."""
        return max(self.size, span // self.threads // self.size * self.size)


@dataclass(frozen=True)
class Summary:
    """What requests of one kind came to."""

    gib_per_s: float
    requests_per_s: float
    mean_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Result:
    every: Summary
    reads: Summary | None  #: None where there was no read
    writes: Summary | None
    memory: str
    route: str

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Result:
        """What `dataclasses.asdict` made of one."""
        sides = {name: found[name] and Summary(**found[name]) for name in ("every", "reads", "writes")}
        return cls(**sides, memory=found["memory"], route=found["route"])


def median(results: Sequence[Result]) -> Result:
    """Figure by figure."""

    def middle(sides: Sequence[Summary | None]) -> Summary | None:
        found = [side for side in sides if side is not None]
        names = [field.name for field in dataclasses.fields(Summary)]
        figures = {name: statistics.median(getattr(side, name) for side in found) for name in names} if found else None
        return None if figures is None else Summary(**figures)

    every = middle([result.every for result in results])
    assert every is not None
    reads, writes = middle([result.reads for result in results]), middle([result.writes for result in results])
    return Result(every, reads, writes, results[0].memory, results[0].route)


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    try:
        found = [units.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"{option}: {error}", status=2) from None
    for size in found:
        if not SMALLEST <= size <= LARGEST or size % SMALLEST:
            raise CommandError(f"{option}: {size} is not a multiple of 4KiB from 4KiB to 64MiB", status=2)
    return found


def parse_numbers(text: str, option: str, most: int) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise CommandError(f'{option}: "{text}" is not a list of numbers from 1 to {most}', status=2)
    return [int(part) for part in parts]


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
    """One thread's requests."""

    device: Device
    buffer: Registration
    start: int
    length: int
    size: int
    pattern: tuple[bool, ...]
    latencies: tuple[list[int], list[int]]  #: of reads and of writes, in nanoseconds
    error: BaseException | None = None

    def run(self, gate: threading.Barrier, deadline: Callable[[], int]) -> None:
        try:
            gate.wait()
            self._run(deadline())
        except BaseException as error:  # reported by the thread that waits for this one
            self.error = error

    def _run(self, end: int) -> None:
        device, buffer, size, clock = self.device, self.buffer, self.size, time.perf_counter_ns
        pattern, period = self.pattern, len(self.pattern)
        (reads, writes), offset, turn = self.latencies, self.start, 0
        before = clock()
        while before < end or turn < period:
            if pattern[turn % period]:
                device.write(buffer, offset, size)
                taken = writes
            else:
                device.read(buffer, offset, size)
                taken = reads
            after = clock()
            taken.append(after - before)
            before = after
            turn += 1
            offset += size
            if offset + size > self.start + self.length:
                offset = self.start


def on_device(device: Device, span: int, load: Load) -> Result:
    """Puts the load on the first `span` bytes of a device. What was there is lost where it has writes."""
    size, part = load.size, load.part(span)
    buffers = [ugds.empty(size) for _ in range(load.threads)]
    try:
        workers = [
            _Worker(
                device,
                buffer,
                index * part % max(size, span - part + 1) // size * size,
                part,
                size,
                load.pattern,
                ([], []),
            )
            for index, buffer in enumerate(buffers)
        ]
        elapsed = _run_together(workers, load.seconds)
        reads = np.concatenate([np.array(worker.latencies[0], np.int64) for worker in workers])
        writes = np.concatenate([np.array(worker.latencies[1], np.int64) for worker in workers])
        return Result(
            _summary(np.concatenate([reads, writes]), size, elapsed),
            _summary(reads, size, elapsed) if reads.size else None,
            _summary(writes, size, elapsed) if writes.size else None,
            buffers[0].memory,
            buffers[0].route,
        )
    finally:
        for buffer in buffers:
            buffer.close()


def _run_together(workers: Sequence[_Worker], seconds: float) -> float:
    """Seconds from when all were let go until the last was done."""
    started: list[int] = []
    gate = threading.Barrier(len(workers), lambda: started.append(time.perf_counter_ns()))
    running = [
        threading.Thread(target=worker.run, args=(gate, lambda: started[0] + int(seconds * 1e9))) for worker in workers
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    elapsed = (time.perf_counter_ns() - started[0]) / 1e9
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return elapsed


def _summary(latencies: NDArray[np.int64], size: int, elapsed: float) -> Summary:
    p50, p99 = np.percentile(latencies, [50, 99]) / 1000
    requests = latencies.size / elapsed
    return Summary(requests * size / GIB, requests, float(latencies.mean()) / 1000, float(p50), float(p99))
