# SPDX-License-Identifier: Apache-2.0
"""`python dropped.py WHAT ROUTE`: a process that ends, or lets go of everything, with requests in flight. Its exit
status is 0, and it is done within seconds: a watchdog ends it with every thread's stack otherwise."""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading

import ugds
from ugds.bench import cuda

MILLISECOND = 1_000_000
KEPT: list[cuda.Stream] = []


def pending(route: str) -> None:
    """A stream with work, and requests behind it that nobody holds."""
    gpu = cuda.gpu(0)
    stream, memory = gpu.stream(), gpu.memory(1 << 20)
    KEPT.append(stream)
    ssd = ugds.open("emulated:64MiB?latency=2ms")
    buffer = ugds.register(memory, require=route)
    gpu.spin(100 * MILLISECOND, stream)
    for turn in range(8):
        ssd.read_async(buffer, turn << 20, stream=stream.handle)
        ssd.write_async(buffer, turn << 20, stream=stream.handle)


def main(what: str, route: str) -> None:
    faulthandler.dump_traceback_later(30, exit=True)
    if what == "thread":
        worker = threading.Thread(target=pending, args=(route,))
        worker.start()
        worker.join()
    else:
        pending(route)
    if what != "exit":
        gc.collect()
    if what in ("objects", "thread"):
        ugds.synchronize(KEPT[0].handle)
        KEPT[0].synchronize()
    if what == "device":
        ugds._core.close_all()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
