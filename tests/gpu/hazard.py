# SPDX-License-Identifier: Apache-2.0
"""`python hazard.py WHAT BINDING STREAMS`: staged reads on many streams at once, while another thread does what waits
for streams that wait. Its exit status is 0 where every byte arrived; a watchdog ends it otherwise.

Each of these was measured not to end while a stream waits for a word that only the processor sets. So nothing that sets
the word may need them, or anything behind them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import ugds
from gpu_support import KIB, store, wrong
from ugds.bench import cuda

SIZE, TURNS = 64 * KIB, 5
STORED = 5
#: Seconds until the watchdog bites.
BOUND = float(os.environ.get("UGDS_TEST_BOUND", "20"))


def copies(gpu: cuda.Gpu) -> Callable[[], None]:
    pinned, memory, stream = gpu.pinned(SIZE), gpu.memory(SIZE), gpu.stream()

    def work() -> None:
        gpu.copy_to_device(memory.address, pinned.address, SIZE, stream)
        stream.synchronize()

    return work


def kernels(gpu: cuda.Gpu) -> Callable[[], None]:
    memory, stream = gpu.memory(SIZE), gpu.stream()

    def work() -> None:
        gpu.fill(memory.address, SIZE, 1, stream)
        stream.synchronize()

    return work


def frees(gpu: cuda.Gpu) -> Callable[[], None]:
    return lambda: gpu.memory(SIZE).close()


def pinned_allocations(gpu: cuda.Gpu) -> Callable[[], None]:
    return lambda: gpu.pinned(SIZE).close()


def first_uses(gpu: cuda.Gpu) -> Callable[[], None]:
    """Of a kernel, which is loaded then."""
    stream = gpu.stream()

    def work() -> None:
        kernels = gpu.load()
        kernels.launch("ugds_spin", 1, stream, 1000)
        stream.synchronize()

    return work


def legacy(gpu: cuda.Gpu) -> Callable[[], None]:
    memory = gpu.memory(SIZE)

    def work() -> None:
        gpu.fill(memory.address, SIZE, 1, cuda.LEGACY)
        gpu.write(memory.address, np.zeros(8, np.uint8))

    return work


def streams(gpu: cuda.Gpu) -> Callable[[], None]:
    def work() -> None:
        with gpu.stream() as stream, gpu.event() as event:
            event.record(stream)
            event.synchronize()

    return work


def captures(gpu: cuda.Gpu) -> Callable[[], None]:
    memory, stream = gpu.memory(SIZE), gpu.stream()

    def work() -> None:
        stream.begin_capture()
        gpu.fill(memory.address, SIZE, 1, stream)
        stream.end_capture()

    return work


def registrations(gpu: cuda.Gpu) -> Callable[[], None]:
    """Of ours, which pin and allocate."""

    def work() -> None:
        with gpu.memory(SIZE) as memory, ugds.register(memory, require="staged"):
            pass

    return work


def nothing(gpu: cuda.Gpu) -> Callable[[], None]:
    return lambda: time.sleep(0.001)


HAZARDS: dict[str, Callable[[cuda.Gpu], Callable[[], None]]] = {
    "nothing": nothing,
    "copies": copies,
    "kernels": kernels,
    "frees": frees,
    "pinned": pinned_allocations,
    "first_uses": first_uses,
    "legacy": legacy,
    "streams": streams,
    "captures": captures,
    "registrations": registrations,
}


def meanwhile(work: Callable[[], None], until: threading.Event, errors: list[BaseException]) -> None:
    try:
        while not until.is_set():
            work()
    except BaseException as error:  # raised by the thread that waits for this one
        errors.append(error)


def main(what: str, binding: str, count: int) -> None:
    faulthandler.dump_traceback_later(BOUND, exit=True)
    gpu = cuda.gpu(0)
    work, stop = HAZARDS[what](gpu), threading.Event()
    errors: list[BaseException] = []
    work()
    with ExitStack() as stack:
        ssd: Any = stack.enter_context(ugds.open("emulated:64MiB?latency=20ms"))
        store(ssd, 0, count * SIZE, STORED)
        memory = stack.enter_context(gpu.memory(count * SIZE))
        buffer = stack.enter_context(ugds.register(memory, require="staged"))
        # Those that the legacy stream waits for are blocking ones.
        made = [stack.enter_context(gpu.stream(blocking=what == "legacy")) for _ in range(count)]
        other = threading.Thread(target=meanwhile, args=(work, stop, errors))
        other.start()
        kept = []
        for _ in range(TURNS):
            for lane, stream in enumerate(made):
                numbers: list[Any] = [lane * SIZE, SIZE, lane * SIZE]
                if binding == "late":
                    kept.append([np.array([number], np.int64) for number in numbers])
                    numbers = kept[-1]
                ssd.read_async(buffer, *numbers, stream=stream.handle)
        for stream in made:
            ugds.synchronize(stream.handle)
        stop.set()
        other.join()
        if errors:
            raise errors[0]
        assert wrong(gpu, memory.address, 0, count * SIZE, STORED) == 0
        told = ssd.stats().streams
        assert told["requests"] >= TURNS * count, told
    print("every byte arrived", told)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
