# SPDX-License-Identifier: Apache-2.0
"""Reads of a file from one Python thread, against what the system itself reaches in the same run: pread by a thread,
io_uring with as many requests in flight (fio makes both), and, of a file in the page cache, eight threads of pread; for
GPU memory those threads read into pinned memory, and copy on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import ugds
from ugds._report import CommandError, Record
from ugds.bench import fio, load
from ugds.bench._devices import opened
from ugds.bench._gpu import GIB, MIB, Figures, in_turn, median_ratio, registered, seconds, the_gpu

SIZES = (4 << 10, 64 << 10, MIB, 16 * MIB)
DEPTH, ROUNDS, THREADS = 16, 5, 8
SPAN = 256 * MIB
#: Bytes of a measurement, at most; of small requests fewer, for a slow disk answers some thousand a second.
_MOVED, _MOST = 256 * MIB, 4096


@contextmanager
def file_of(place: str) -> Iterator[Path]:
    """A file that is there; or one of random bytes, made in a folder that is, and removed at the end."""
    path = Path(place)
    if path.is_dir():
        target = fio.FileTarget(f"posix:{path / 'ugds-bench'}", "posix", path / "ugds-bench", SPAN)
        with target:
            yield target.path
        return
    if not path.is_file():
        raise CommandError(f"{path} is neither a file nor a folder in which one can be made", status=2)
    if path.stat().st_size < SPAN:
        raise CommandError(f"{path} has less than 256 MiB, which this reads", status=2)
    yield path


def measure(place: str, sizes: Sequence[int], gpu: int | None, rounds: int = ROUNDS) -> list[Record]:
    """A record for each size, way and state of the file: read past the page cache, where the file system has that, and
    from the page cache. Raises CommandError."""
    records = []
    with file_of(place) as path, ExitStack() as stack:
        memory = _memory(stack, gpu, max(*sizes, 64 * MIB))
        for direct in (True, False):
            with opened(_uri(path, direct)) as device:
                if direct and device.info.why_buffered:
                    continue
                if not direct:
                    path.read_bytes()
                for size in sizes:
                    records.append(_one(device, memory, path, size, direct, rounds))
                    if gpu is not None:
                        records.append(_stream(device, memory, path, size, direct, rounds, gpu))
                    elif size <= MIB:
                        records.append(_many(device, memory, path, size, direct, rounds))
                if not direct:
                    records.append(_cached(device, memory, path, gpu, rounds))
    return records


def _uri(path: Path, direct: bool) -> str:
    from urllib.parse import quote

    return f"file:{quote(str(path))}{'' if direct else '?direct=off'}"


def _memory(stack: ExitStack, gpu: int | None, nbytes: int) -> Any:
    if gpu is None:
        return stack.enter_context(ugds.empty(nbytes))
    return stack.enter_context(registered(stack.enter_context(the_gpu(gpu).memory(nbytes)), None))


def _offsets(size: int) -> list[int]:
    count = max(2, min(_MOST, _MOVED // size))
    places = SPAN // size
    order = np.random.default_rng(size).permutation(max(places, count)) % places
    return [int(place) * size for place in order[:count]]


def _preads(path: Path, direct: bool, size: int, offsets: Sequence[int]) -> Callable[[], float]:
    """The same requests by `pread`, from Python too, into memory as aligned."""
    import mmap

    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    room = mmap.mmap(-1, size)
    view = [memoryview(room)[:size]]

    def run() -> None:
        for offset in offsets:
            os.preadv(descriptor, view, offset)

    return lambda: seconds(run)


def _one(device: Any, memory: Any, path: Path, size: int, direct: bool, rounds: int) -> Record:
    """One request after another."""
    offsets = _offsets(size)

    def read() -> None:
        for offset in offsets:
            device.read(memory, offset, size)

    found = in_turn(rounds, {"ours": lambda: seconds(read), "pread": _preads(path, direct, size, offsets)})
    moved = len(offsets) * size / GIB
    figures = {
        "read_gib_per_s": (moved / statistics.median(found["ours"]), "GiB/s"),
        "pread_gib_per_s": (moved / statistics.median(found["pread"]), "GiB/s"),
        "share_of_pread": (median_ratio(found["pread"], found["ours"]), "1"),
    }
    return _record(device, memory, {"way": "sync", "size": size, "depth": 1, "cached": not direct}, figures)


def _many(device: Any, memory: Any, path: Path, size: int, direct: bool, rounds: int) -> Record:
    """DEPTH requests in flight, kept so by one thread; against fio's io_uring at that size and depth."""
    offsets = _in_order(size)
    lanes = 64 * MIB // size

    def read() -> None:
        with device.batch(DEPTH) as batch:
            given = 0
            for offset in offsets[:DEPTH]:
                batch.read(memory, offset, size, given % lanes * size)
                given += 1
            left = len(offsets)
            while left:
                done = batch.wait(1)
                left -= len(done)
                for offset in offsets[given : given + len(done)]:
                    batch.read(memory, offset, size, given % lanes * size)
                    given += 1

    figures = _beside_io_uring(path, size, direct, DEPTH, rounds, len(offsets), lambda: seconds(read))
    return _record(device, memory, {"way": "batch", "size": size, "depth": DEPTH, "cached": not direct}, figures)


def _stream(device: Any, memory: Any, path: Path, size: int, direct: bool, rounds: int, gpu: int) -> Record:
    """All enqueued at once on one stream, where one runs after another; against fio's io_uring at that size, with one
    request in flight too."""
    offsets = _in_order(size)
    lanes = 64 * MIB // size
    with the_gpu(gpu).stream() as stream:

        def read() -> None:
            for turn, offset in enumerate(offsets):
                device.read_async(memory, offset, size, turn % lanes * size, stream=stream.handle)
            stream.synchronize()

        def timed() -> float:
            taken = seconds(read)
            ugds.synchronize(stream.handle)
            return taken

        figures = _beside_io_uring(path, size, direct, 1, rounds, len(offsets), timed)
    if direct:
        figures["stream_share_of_io_uring"] = figures.pop("share_of_io_uring")
    return _record(device, memory, {"way": "stream", "size": size, "depth": 1, "cached": not direct}, figures)


def _in_order(size: int) -> list[int]:
    """As fio reads."""
    return [turn * size % (SPAN // size * size) for turn in range(len(_offsets(size)))]


def _beside_io_uring(
    path: Path, size: int, direct: bool, depth: int, rounds: int, count: int, read: Callable[[], float]
) -> Figures:
    """Of `count` reads, which `read` makes; fio reads as many at least, with so many in flight."""
    moved = count * size / GIB
    with fio.FileTarget(f"io_uring:{path}", "io_uring", path, None, depth) as target:
        target._direct = direct
        span = min(1.0, max(0.3, moved))

        def by_fio() -> float:
            return moved / target.load(load.Load(100, size, 1, span)).every.gib_per_s

        found = in_turn(max(2, rounds // 2), {"ours": read, "io_uring": by_fio})
    return {
        "read_gib_per_s": (moved / statistics.median(found["ours"]), "GiB/s"),
        "io_uring_gib_per_s": (moved / statistics.median(found["io_uring"]), "GiB/s"),
        "share_of_io_uring": (median_ratio(found["io_uring"], found["ours"]), "1"),
    }


def _cached(device: Any, memory: Any, path: Path, gpu: int | None, rounds: int) -> Record:
    """Large reads of one thread, against eight threads of 1 MiB preads."""
    size = 64 * MIB
    offsets = list(range(0, SPAN, size))

    def read() -> None:
        for offset in offsets:
            device.read(memory, offset, size)

    descriptor = os.open(path, os.O_RDONLY)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        works = [_worker(stack, descriptor, gpu, memory, which) for which in range(THREADS)]

        def threads() -> None:
            list(pool.map(lambda work: work(), works))

        found = in_turn(rounds, {"ours": lambda: seconds(read), "threads": lambda: seconds(threads)})
        os.close(descriptor)
    moved = SPAN / GIB
    figures = {
        "read_gib_per_s": (moved / statistics.median(found["ours"]), "GiB/s"),
        "threads_gib_per_s": (moved / statistics.median(found["threads"]), "GiB/s"),
        "share_of_threads": (median_ratio(found["threads"], found["ours"]), "1"),
    }
    params = {"way": "sync", "size": size, "depth": 1, "cached": True, "threads": THREADS}
    return _record(device, memory, params, figures)


def _worker(stack: ExitStack, descriptor: int, gpu: int | None, memory: Any, which: int) -> Callable[[], None]:
    """Its eighth of the file by preads of 1 MiB; on to the GPU from pinned memory, two buffers in turn."""
    part = SPAN // THREADS
    places = range(which * part, (which + 1) * part, MIB)
    if gpu is None:
        view = [np.empty(MIB, np.uint8).data]

        def plain() -> None:
            for offset in places:
                os.preadv(descriptor, view, offset)

        return plain
    device = the_gpu(gpu)
    pinned = stack.enter_context(device.pinned(2 * MIB))
    streams = [stack.enter_context(device.stream()) for _ in range(2)]
    halves = [[pinned.array[half * MIB : (half + 1) * MIB].data] for half in range(2)]

    def staged() -> None:
        for turn, offset in enumerate(places):
            half = turn % 2
            streams[half].synchronize()
            os.preadv(descriptor, halves[half], offset)
            device.copy_to_device(memory.address + which * MIB, pinned.address + half * MIB, MIB, streams[half])
        for stream in streams:
            stream.synchronize()

    return staged


def _record(device: Any, memory: Any, params: dict[str, Any], figures: dict[str, tuple[float, str]]) -> Record:
    route = "buffered" if params["cached"] and memory.route == "direct" else memory.route
    return Record("files", params, device.uri, memory.memory, route, figures)
