# SPDX-License-Identifier: Apache-2.0
"""Moves the bytes of files by several threads, which wait outside of the interpreter's lock: each has a large request
under way, which the library cuts into as many commands as the device has room for."""

from __future__ import annotations

import bisect
import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from ugds._core import Device, Registration
from ugds._load.errors import failure
from ugds._load.layout import PIECE
from ugds._load.memory import Bytes, Staging
from ugds._load.progress import Advance

#: That read, each up to 16 MiB at once.
READERS = 4


class Way(NamedTuple):
    """How a file is written: by so many threads, each with memory for one request."""

    threads: int
    chunk: int


#: To the disk: several requests are under way.
TO_DISK = Way(4, 8 << 20)
#: To the page cache, where file systems let one writer in at a time: what it copies is still in the processor's cache.
TO_CACHE = Way(1, 256 << 10)

Job = TypeVar("Job")


class Piece(NamedTuple):
    """Bytes of a file, and where in registered memory they go."""

    file: str  #: for people
    device: Device
    buffer: Registration
    offset: int
    size: int
    place: int
    ended: Callable[[], None] = lambda: None  #: called when it is there or has failed, by the thread that read it


class Content(NamedTuple):
    """Bytes of memory, and where in a file they go."""

    start: int
    data: Bytes

    @property
    def end(self) -> int:
        return self.start + self.data.size


def read(pieces: Iterable[Piece], advance: Advance, count: int) -> None:
    """Takes each piece, of `count`, when a thread is free for it. Raises `ugds.Error` of the first that failed; EIO
    where the file ended before."""

    def one(piece: Piece) -> None:
        file, device, buffer, offset, size, place, ended = piece
        try:
            got = device.read(buffer, offset, size, place)
            if got != size:
                cause = f"the file ends {size - got} bytes earlier than its header says"
                raise failure(errno.EIO, "read", file, cause, "was it cut while it was read?", offset, size, got)
        finally:
            ended()
        advance(size)

    work(pieces, lambda: one, min(READERS, count))


def write(device: Device, contents: Sequence[Content], size: int, way: Way, advance: Advance) -> None:
    """Writes a file of `size` bytes, whose contents leave no hole and are in order. Each request but the last is
    of whole blocks, from memory that is aligned to them. Raises `ugds.Error`."""
    starts = [content.start for content in contents]

    with ExitStack() as stack:

        def lane() -> Callable[[int], None]:
            staging = stack.enter_context(Staging(min(way.chunk, -(-size // 4096) * 4096), contents, device))

            def one(at: int) -> None:
                length = min(way.chunk, size - at)
                for content in covering(contents, starts, at, at + length):
                    begin, end = max(at, content.start), min(at + length, content.end)
                    staging.fill(begin - at, content.data, begin - content.start, end - begin)
                done = device.write(staging.buffer, at, length, 0, unaligned=True)
                if done != length:
                    raise failure(errno.EIO, "write", "the file", "it took less", "look at its disk", at, length, done)
                advance(length)

            return one

        offsets = range(0, size, way.chunk)
        work(offsets, lane, min(way.threads, len(offsets)))


def covering(contents: Sequence[Content], starts: Sequence[int], begin: int, end: int) -> Iterator[Content]:
    """Those that have bytes in [begin, end)."""
    for index in range(max(0, bisect.bisect_right(starts, begin) - 1), len(contents)):
        if starts[index] >= end:
            return
        if contents[index].end > begin:
            yield contents[index]


def work(jobs: Iterable[Job], lane: Callable[[], Callable[[Job], None]], threads: int) -> None:
    """Does jobs in several threads, each by what `lane()` gave it, begun in order. After one that failed none begins,
    and its exception is raised when those that are under way have ended; so it is for Ctrl-C. `lane` is called by this
    thread alone. A job is asked for by one thread at a time, when there is one for it."""
    lanes = [lane() for _ in range(threads)]
    lock, waiting = threading.Lock(), iter(jobs)
    failures: list[BaseException] = []
    stop = threading.Event()

    def run(one: Callable[[Job], None]) -> None:
        while not stop.is_set():
            try:
                with lock:
                    job: Any = next(waiting, stop)
                if job is stop:
                    return
                one(job)
            except BaseException as error:
                failures.append(error)
                stop.set()

    if len(lanes) <= 1:
        for job in waiting:
            lanes[0](job)
        return
    started = [threading.Thread(target=run, args=(one,), name="ugds-load", daemon=True) for one in lanes]
    try:
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        stop.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]


__all__ = ["PIECE", "Content", "Piece", "read", "write"]
