# SPDX-License-Identifier: Apache-2.0
"""Sixteen 1 MiB writes, and a kernel before each that takes as long: what overlapping the two comes to.

Each pair is a kernel and a write of what the kernel made, so a write can only run beside the next pair's kernel. The
least time that this takes is that of 17 stages: the first kernel, 15 writes beside kernels, and the last write.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack

from ugds._report import Record
from ugds.bench import cuda
from ugds.bench._gpu import MIB, Bench, Figures, in_turn, median_ratio, ready, seconds
from ugds.bench.figures import OVERLAP_PAIRS as PAIRS

SIZE = MIB
STAGES = PAIRS + 1
CALIBRATIONS = 9


def measure(uri: str | None, ordinal: int, route: str | None, rounds: int, overwrite: bool = False) -> list[Record]:
    """One record. Writes to the device."""
    with ExitStack() as stack:
        bench = stack.enter_context(ready(uri, ordinal, route, PAIRS * SIZE, overwrite))
        io, compute = (stack.enter_context(bench.gpu.stream()) for _ in range(2))
        made = [stack.enter_context(bench.gpu.event()) for _ in range(PAIRS)]
        nanoseconds = _as_long_as_a_write(bench)
        schedules = Schedules(bench, io, compute, made, nanoseconds)
        ways: dict[str, Callable[[], float]] = {
            "sequential": lambda: seconds(schedules.sequential),
            "overlap": lambda: seconds(schedules.overlap),
            "pipelined": lambda: seconds(schedules.pipelined),
            "write": lambda: seconds(schedules.writes),
            "kernel": lambda: seconds(schedules.kernels),
        }
        found = in_turn(rounds, ways)
        bench.drain(io)
        figures = figures_of(found)
        params = {"size": SIZE, "pairs": PAIRS, "rounds": rounds, "kernel_us": nanoseconds // 1000}
        return [bench.record("overlap", params, figures)]


def figures_of(found: dict[str, list[float]]) -> Figures:
    """Of the seconds that each round took: `write` and `kernel` are those of all pairs' alone."""
    stage = [max(write, kernel) / PAIRS for write, kernel in zip(found["write"], found["kernel"], strict=True)]
    ideal = [STAGES * one for one in stage]
    ms = {name: statistics.median(times) * 1000 for name, times in found.items()}
    return {
        "sequential_ms": (ms["sequential"], "ms"),
        "overlap_ms": (ms["overlap"], "ms"),
        "pipelined_ms": (ms["pipelined"], "ms"),
        "ideal_ms": (statistics.median(ideal) * 1000, "ms"),
        "pipelined_ratio_to_ideal": (median_ratio(found["pipelined"], ideal), "1"),
        "pipelined_speedup": (median_ratio(found["sequential"], found["pipelined"]), "1"),
        "write_ms": (ms["write"] / PAIRS, "ms"),
        "kernel_ms": (ms["kernel"] / PAIRS, "ms"),
    }


def _as_long_as_a_write(bench: Bench) -> int:
    """Nanoseconds of a synchronous write, once the device and its threads are warm."""
    for _ in range(CALIBRATIONS):
        bench.device.write(bench.buffer, 0, SIZE)
    taken = [seconds(lambda: bench.device.write(bench.buffer, 0, SIZE)) for _ in range(CALIBRATIONS)]
    return int(statistics.median(taken) * 1e9)


class Schedules:
    """The paper's three, on a stream for writes and one for kernels."""

    def __init__(
        self, bench: Bench, io: cuda.Stream, compute: cuda.Stream, made: list[cuda.Event], nanoseconds: int
    ) -> None:
        self._bench, self._io, self._compute, self._made, self._nanoseconds = bench, io, compute, made, nanoseconds

    def _kernel(self, _pair: int) -> None:
        self._bench.gpu.spin(self._nanoseconds, self._compute)

    def _write(self, pair: int) -> None:
        at = pair * SIZE
        self._bench.device.write_async(self._bench.buffer, at, SIZE, at, stream=self._io.handle)

    def sequential(self) -> None:
        """Each kernel and each write is waited for before the next begins."""
        for pair in range(PAIRS):
            self._kernel(pair)
            self._compute.synchronize()
            self._write(pair)
            self._io.synchronize()

    def overlap(self) -> None:
        """A write runs beside the next kernel, and both are waited for."""
        for stage in range(STAGES):
            if stage < PAIRS:
                self._kernel(stage)
            if stage > 0:
                self._write(stage - 1)
            self._compute.synchronize()
            self._io.synchronize()

    def pipelined(self) -> None:
        """All pairs are enqueued, each write behind its kernel, and waited for once."""
        for pair in range(PAIRS):
            self._kernel(pair)
            self._made[pair].record(self._compute)
            self._io.wait(self._made[pair])
            self._write(pair)
        self._compute.synchronize()
        self._io.synchronize()

    def writes(self) -> None:
        """Alone, synchronously."""
        for pair in range(PAIRS):
            self._bench.device.write(self._bench.buffer, pair * SIZE, SIZE, pair * SIZE)

    def kernels(self) -> None:
        """Alone, enqueued at once."""
        for pair in range(PAIRS):
            self._kernel(pair)
        self._compute.synchronize()
