# SPDX-License-Identifier: Apache-2.0
"""Synchronous reads and writes between a device and GPU memory from one thread, against what they are made of: the same
device with host memory, and the machine's own copies between pinned memory and the GPU. The smaller of the two is what
a staged request can reach; they are measured in turn, in one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import ugds
from ugds._report import Record
from ugds.bench import cuda
from ugds.bench._gpu import GIB, MIB, Bench, Figures, in_turn, ready, seconds

SIZES = (MIB, 4 * MIB, 16 * MIB)
#: Bytes that each way moves in a round.
MOVED = 128 * MIB


def measure(
    uri: str | None,
    ordinal: int,
    route: str | None,
    modes: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    overwrite: bool = False,
) -> list[Record]:
    """A record for each mode and size. Writes to the device."""
    with (
        ready(uri, ordinal, route, max(sizes), overwrite) as bench,
        ugds.empty(max(sizes)) as host,
        bench.gpu.pinned(max(sizes)) as pinned,
        bench.gpu.stream() as stream,
    ):
        return [_point(bench, host, pinned, stream, mode, size, rounds) for mode in modes for size in sizes]


def _point(
    bench: Bench, host: Any, pinned: cuda.Pinned, stream: cuda.Stream, mode: str, size: int, rounds: int
) -> Record:
    count = max(2, MOVED // size)
    move = bench.device.read if mode == "read" else bench.device.write
    gpu, memory = bench.gpu, bench.buffer.address

    def through(buffer: Any) -> Callable[[], float]:
        def once() -> None:
            for turn in range(count):
                move(buffer, turn * size % bench.span, size)

        return lambda: seconds(once)

    def copies() -> None:
        for _ in range(count):
            if mode == "read":
                gpu.copy_to_device(memory, pinned.address, size, stream)
            else:
                gpu.copy_from_device(pinned.address, memory, size, stream)
        stream.synchronize()

    ways = {"gpu": through(bench.buffer), "host": through(host), "copy": lambda: seconds(copies)}
    found = in_turn(rounds, ways)
    gib = {name: [size * count / GIB / taken for taken in times] for name, times in found.items()}
    params = {"mode": mode, "size": size, "threads": 1, "rounds": rounds}
    return bench.record("sync", params, figures_of(gib, bench.buffer.route))


def figures_of(gib: dict[str, list[float]], route: str) -> Figures:
    """Of each round's throughputs."""
    rounds = zip(gib["gpu"], gib["host"], gib["copy"], strict=True)
    share = statistics.median(ours / min(host, copy) for ours, host, copy in rounds)
    return {
        f"{route}_share": (share, "1"),
        "gpu_gib_per_s": (statistics.median(gib["gpu"]), "GiB/s"),
        "host_gib_per_s": (statistics.median(gib["host"]), "GiB/s"),
        "copy_gib_per_s": (statistics.median(gib["copy"]), "GiB/s"),
    }
