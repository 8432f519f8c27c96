# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of GPU memory share: the device, the memory and its registration, and measuring in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ugds
from ugds._report import CommandError, Record, describe
from ugds.bench import cuda, load, targets
from ugds.bench._devices import opened

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: An SSD's latency and bandwidth as the paper's Figure 16 has them, with threads enough for the copies, and 512 KiB a
#: command, as data-centre SSDs take them: smaller ones cost the driver's copies more than they move.
DEVICE = "emulated:1GiB?latency=10us&bandwidth=5.5GiB/s&copiers=4&mdts=7"
ROUNDS = 9
Figures = dict[str, tuple[float, str]]


@dataclass(frozen=True)
class Bench:
    """An open device whose first `span` bytes are written, and a registered buffer of a GPU's memory."""

    gpu: cuda.Gpu
    device: Any  #: ugds.Device
    buffer: Any  #: ugds.Registration
    span: int

    def record(self, name: str, params: Mapping[str, Any], figures: Figures) -> Record:
        params = {"gpu": self.gpu.ordinal, "gpu_name": self.gpu.name, **params}
        return Record(name, params, self.device.uri, self.buffer.memory, self.buffer.route, figures)

    def read_async(self, size: int, turn: int, stream: cuda.Stream, lane: int = 0) -> Any:
        """The `turn`-th of reads one after another, to the `lane`-th place of the buffer."""
        return self.device.read_async(self.buffer, turn * size % self.span, size, lane * size, stream=stream.handle)

    def drain(self, *streams: cuda.Stream) -> None:
        """Raises what went wrong on the streams."""
        for stream in streams:
            ugds.synchronize(stream.handle)


def the_gpu(ordinal: int) -> cuda.Gpu:
    """Raises CommandError, in one line, where there is none."""
    try:
        return cuda.gpu(ordinal)
    except ugds.Error as error:
        remedy = f"\n  what to do: {error.hint}" if error.hint else ""
        raise CommandError(f"this measures GPU memory, and {error.cause}{remedy}") from None


@contextmanager
def ready(uri: str | None, ordinal: int, route: str | None, nbytes: int, overwrite: bool = False) -> Iterator[Bench]:
    """Opens the device (DEVICE for None), fills what is read of it, and registers that much memory of the GPU. Raises
    CommandError where there is no GPU, or the route cannot be had."""
    gpu = the_gpu(ordinal)
    uri = uri or DEVICE
    targets.writable(uri, overwrite)
    with ExitStack() as stack:
        device = stack.enter_context(opened(uri))
        span = min(load.SPAN, device.capacity // (16 * MIB) * (16 * MIB))
        if span == 0:
            raise CommandError(f"{uri} has {device.capacity} bytes; this needs 16 MiB at least", status=2)
        load.fill(device, span)
        memory = stack.enter_context(gpu.memory(nbytes))
        buffer = stack.enter_context(registered(memory, route))
        yield Bench(gpu, device, buffer, span)


@contextmanager
def registered(memory: Any, route: str | None) -> Iterator[Any]:
    try:
        buffer = ugds.register(memory, require=route)
    except ugds.Error as error:
        asked = f"{route} " if route else ""
        raise CommandError(f"GPU memory cannot be registered {asked}here\n  {describe(error)}") from None
    with buffer:
        yield buffer


def in_turn(rounds: int, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Each way once a round, forwards and backwards by turns, so that all meet the same machine; after one round that
    does not count. Gives what each returned, round by round."""
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            found[name].append(ways[name]())
    return found


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Of what was measured in the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def median_gap(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """The same of differences."""
    return statistics.median(a - b for a, b in zip(longer, shorter, strict=True))
