# SPDX-License-Identifier: Apache-2.0
"""What the tests of GPU memory share: contents that the GPU and numpy both know, memory with guards around it, every
way to move bytes, and programs in processes of their own."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ugds
from numpy.typing import NDArray
from ugds.bench import cuda

#: A driver that a test names is one made of host memory: everything holds there but speed and frameworks.
FAKE = bool(os.environ.get("UGDS_CUDA_LIBRARY"))
KIB, MIB = 1 << 10, 1 << 20
BLOCK = 4 * KIB
GUARD = 64 * KIB
ROUTES = ("direct", "staged")
_TILE = MIB
_STEP = 2654435761
_MASK = (1 << 64) - 1


# --- Contents: for each kind, an endless row of bytes. A part of it can be written, compared and computed alone. -----


def _tiles(start: int, end: int, kind: int) -> Iterator[tuple[int, int, int, int]]:
    """(position, bytes, position in its tile, what is added to the tile's bytes) of the pieces of [start, end)."""
    while start < end:
        tile, inside = divmod(start, _TILE)
        size = min(end - start, _TILE - inside)
        yield start, size, inside, kind + 37 * tile & 0xFF
        start += size


def _seeds(start: int, end: int, kind: int) -> Iterator[tuple[int, int, int]]:
    """(position, bytes, the kernels' seed) of the same."""
    for at, size, inside, added in _tiles(start, end, kind):
        yield at, size, (added << 16) + inside * _STEP & _MASK


def fill(gpu: cuda.Gpu, address: int, start: int, end: int, kind: int, stream: cuda.Stream | None = None) -> None:
    """Writes bytes [start, end) of the row to GPU memory at `address`."""
    for at, size, seed in _seeds(start, end, kind):
        gpu.fill(address + at - start, size, seed, stream)


def wrong(gpu: cuda.Gpu, address: int, start: int, end: int, kind: int, stream: cuda.Stream | None = None) -> int:
    """How many bytes at `address` are not [start, end) of the row, as the GPU finds."""
    result = _counter(gpu)
    gpu.clear(result.address, 8, stream)
    for at, size, seed in _seeds(start, end, kind):
        gpu.check(address + at - start, size, seed, result.address, stream)
    if stream is None:
        gpu.synchronize()
    else:
        stream.synchronize()
    return int(gpu.read(result.address, 8).view(np.uint64)[0])


@functools.cache
def _counter(gpu: cuda.Gpu) -> cuda.Memory:
    return gpu.memory(8)


@functools.cache
def _whole_tile() -> NDArray[np.uint8]:
    return cuda.pattern(_TILE, 0)


def expected(start: int, end: int, kind: int) -> NDArray[np.uint8]:
    whole = _whole_tile()
    parts = [whole[inside : inside + size] + np.uint8(added) for _, size, inside, added in _tiles(start, end, kind)]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


# --- The device's own bytes, by way of host memory -------------------------------------------------------------------


def store(ssd: ugds.Device, start: int, end: int, kind: int) -> None:
    """Puts bytes [start, end) of the row at those bytes of the device: whole blocks."""
    with ugds.empty(_TILE) as buffer:
        view = np.frombuffer(memoryview(buffer), np.uint8)
        for at in range(start, end, _TILE):
            size = min(_TILE, end - at)
            view[:size] = expected(at, at + size, kind)
            ssd.write(buffer, at, size)
        del view


def stored_wrong(ssd: ugds.Device, start: int, end: int, first: int, kind: int) -> int:
    """How many of the device's bytes [start, end) are not the row's from `first`. Any bytes."""
    bad = 0
    with ugds.empty(_TILE) as buffer:
        view = np.frombuffer(memoryview(buffer), np.uint8)
        at = start
        while at < end:
            size = min(_TILE - BLOCK, end - at)
            begin, stop = at // BLOCK * BLOCK, -(-(at + size) // BLOCK) * BLOCK
            ssd.read(buffer, begin, stop - begin)
            got = view[at - begin : at - begin + size]
            bad += int(np.count_nonzero(got != expected(first + at - start, first + at - start + size, kind)))
            at += size
        del view
    return bad


# --- Registered memory with guards -----------------------------------------------------------------------------------

_GUARDED = 201  # the kind of row that lies all over it before each request


class Room:
    """Registered GPU memory: `size` bytes to use, from `base` in the registration, and a guard before and behind."""

    def __init__(self, gpu: cuda.Gpu, memory: cuda.Memory, buffer: Any, size: int) -> None:
        self.gpu, self.memory, self.buffer, self.base, self.size = gpu, memory, buffer, GUARD, size

    def watch(self) -> None:
        fill(self.gpu, self.memory.address, 0, self.memory.nbytes, _GUARDED)
        self.gpu.synchronize()

    def overwritten(self, at: int, size: int) -> int:
        """How many bytes changed since `watch` outside of [at, at + size) of the registration."""
        address, end = self.memory.address, self.memory.nbytes
        before = wrong(self.gpu, address, 0, at, _GUARDED)
        return before + wrong(self.gpu, address + at + size, at + size, end, _GUARDED)


@contextmanager
def room(gpu: cuda.Gpu, size: int, route: str) -> Iterator[Room]:
    with gpu.memory(size + 2 * GUARD) as memory, ugds.register(memory, require=route) as buffer:
        assert (buffer.memory, buffer.route, buffer.gpu) == ("cuda", route, gpu.ordinal), buffer.why
        yield Room(gpu, memory, buffer, size)


# --- Ways to move bytes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One request, or several that together are one range."""

    direction: str  #: read or write
    offset: int  #: on the device
    size: int
    at: int  #: in the registration


def pieces(move: Move, most: int = 16) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Offsets, sizes and places in the buffer of up to so many parts of whole blocks, not in order."""
    blocks = move.size // BLOCK
    count = min(most, blocks)
    cuts = [BLOCK * (blocks * i // count) for i in range(count + 1)]
    parts = [(move.offset + a, b - a, move.at + a) for a, b in itertools.pairwise(cuts)]
    parts = parts[1::2] + parts[::2]
    offsets, sizes, places = zip(*parts, strict=True)
    return offsets, sizes, places


def by_sync(ssd: Any, buffer: Any, move: Move, stream: cuda.Stream) -> int:
    return int(getattr(ssd, move.direction)(buffer, move.offset, move.size, move.at))


def by_unaligned(ssd: Any, buffer: Any, move: Move, stream: cuda.Stream) -> int:
    if move.direction == "read":
        return int(ssd.read(buffer, move.offset, move.size, move.at))
    return int(ssd.write(buffer, move.offset, move.size, move.at, unaligned=True))


def by_batch(ssd: Any, buffer: Any, move: Move, stream: cuda.Stream) -> int:
    offsets, sizes, places = pieces(move)
    with ssd.batch() as batch:
        getattr(batch, move.direction)(buffer, list(offsets), list(sizes), list(places))
        return sum(done.size for done in batch.wait())


def by_stream(ssd: Any, buffer: Any, move: Move, stream: cuda.Stream) -> int:
    enqueue = ssd.read_async if move.direction == "read" else ssd.write_async
    operation = enqueue(buffer, move.offset, move.size, move.at, stream=stream.handle)
    stream.synchronize()
    assert operation.done()
    return int(operation.result())


def by_group(ssd: Any, buffer: Any, move: Move, stream: cuda.Stream) -> int:
    offsets, sizes, places = pieces(move)
    with ssd.group(stream.handle) as group:
        getattr(group, move.direction)(buffer, list(offsets), list(sizes), list(places))
    stream.synchronize()
    return int(group.result())


WAYS = {"sync": by_sync, "batch": by_batch, "stream": by_stream, "group": by_group}


# --- Processes of their own ------------------------------------------------------------------------------------------


def run_alone(program: Path, *arguments: str, bound: float = 60, prefix: Sequence[str] = (), **environment: str) -> str:
    """The output of a program that is done within `bound` seconds and exits with 0."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, *sys.path]))
    command = [*prefix, sys.executable, str(program), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=bound,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def streams(gpu: cuda.Gpu, count: int, blocking: bool = False) -> Iterator[list[cuda.Stream]]:
    with ExitStack() as stack:
        yield [stack.enter_context(gpu.stream(blocking)) for _ in range(count)]
