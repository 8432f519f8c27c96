# SPDX-License-Identifier: Apache-2.0
"""What it takes to register memory with an open device, and to close the registration, by kind of memory and size."""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ugds
from ugds import sizes as units
from ugds._report import Record
from ugds.bench import cuda
from ugds.bench._devices import opened
from ugds.bench._gpu import DEVICE, KIB, MIB, Figures, the_gpu

SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB)
SMALLEST, LARGEST = 64 * KIB, 4096 * MIB
#: Exported memory is whole pages of this size.
GPU_PAGE = 64 * KIB
ROUTES = ("direct", "staged")


def measure(uri: str | None, ordinal: int, route: str | None, sizes: Sequence[int], rounds: int) -> list[Record]:
    """Records of host memory, of the GPU's by each route that there is (or by `route`), and of exporting it as a
    DMA-BUF. Sizes for which there is no memory are left out, and told on the standard error, as is a route that cannot
    be had."""
    gpu = the_gpu(ordinal)
    params = {"gpu": gpu.ordinal, "gpu_name": gpu.name, "rounds": rounds}
    with opened(uri or DEVICE) as device:
        made = _of_host(sizes, rounds, params, device.uri)
        of_gpu, exported = _of_gpu(gpu, route, sizes, rounds, params, device.uri)
    # Tables are of neighbours.
    return made + sorted(of_gpu, key=lambda record: record.route) + exported


def _of_host(sizes: Sequence[int], rounds: int, params: dict[str, Any], uri: str) -> list[Record]:
    made = []
    for size in sizes:
        if size > spare_memory() // 2:
            _tell(f"host memory of {units.format(size)} is left out: the machine has not as much to spare")
            continue
        with touched(size) as memory:
            made.append(_registered(memory, None, size, rounds, params, uri))
    return made


def _of_gpu(
    gpu: cuda.Gpu, route: str | None, sizes: Sequence[int], rounds: int, params: dict[str, Any], uri: str
) -> tuple[list[Record], list[Record]]:
    """Registrations, and exports."""
    made: list[Record] = []
    exported: list[Record] = []
    routes = [route] if route else list(ROUTES)
    for size in sizes:
        try:
            memory = gpu.memory(size + GPU_PAGE)
        except ugds.Error as error:
            if error.errno != errno.ENOMEM:
                raise
            _tell(f"GPU memory of {units.format(size)} is left out: {error.cause}")
            continue
        with memory:
            for way in list(routes):
                try:
                    made.append(_registered(Part(memory, size), way, size, rounds, params, uri))
                except ugds.Error as error:
                    routes.remove(way)
                    _tell(f"{way} registration of GPU memory is left out: {error.cause}")
            exported += _exported(gpu, memory, size, rounds, params, uri)
    return made, exported


class Part:
    """So many bytes of GPU memory, from a page's beginning."""

    def __init__(self, memory: cuda.Memory, nbytes: int) -> None:
        self.address, self.nbytes = page_of(memory), nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


def page_of(memory: cuda.Memory) -> int:
    return -(-memory.address // GPU_PAGE) * GPU_PAGE


def _registered(memory: Any, route: str | None, size: int, rounds: int, params: dict[str, Any], uri: str) -> Record:
    opening, closing, where = [], [], ("", "")
    for _ in range(rounds + 1):
        start = time.perf_counter_ns()
        registration = ugds.register(memory, require=route)
        ready = time.perf_counter_ns()
        where = registration.memory, registration.route
        registration.close()
        opening.append((ready - start) / 1e6)
        closing.append((time.perf_counter_ns() - ready) / 1e6)
    # The first may find the memory as nobody has used it yet.
    figures: Figures = {
        "register_ms": (statistics.median(opening[1:]), "ms"),
        "first_register_ms": (opening[0], "ms"),
        "close_ms": (statistics.median(closing[1:]), "ms"),
    }
    return Record("register", {**params, "size": size}, uri, *where, figures)


def _exported(
    gpu: cuda.Gpu, memory: cuda.Memory, size: int, rounds: int, params: dict[str, Any], uri: str
) -> list[Record]:
    """The driver's own part of a direct registration for a device on the bus. Nothing where it does not export."""
    taken: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter_ns()
        try:
            descriptor = gpu.export_dmabuf(page_of(memory), size)
        except ugds.Error as error:
            _tell(f"exporting GPU memory is left out: {error.cause}")
            return []
        taken.append((time.perf_counter_ns() - start) / 1e6)
        os.close(descriptor)
    figures: Figures = {"dmabuf_export_ms": (statistics.median(taken[1:]), "ms")}
    return [Record("register", {**params, "size": size}, uri, "cuda", "direct", figures)]


@contextmanager
def touched(size: int) -> Iterator[mmap.mmap]:
    """Memory of this process, every page of which is there."""
    with mmap.mmap(-1, size) as memory:
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
        yield memory


def spare_memory(proc: Path = Path("/proc")) -> int:
    """Bytes that the machine says are available."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
