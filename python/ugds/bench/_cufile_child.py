# SPDX-License-Identifier: Apache-2.0
"""A process that drives one libcufile, as `ugds bench cufile` asks it to: a line of JSON is a request, and so is its
answer. Ours and NVIDIA's are driven by these same lines.

    python -m ugds.bench._cufile_child LIBRARY GPU
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_long, c_size_t, c_ssize_t, c_uint, c_void_p
from functools import partial
from typing import Any, TextIO

import numpy as np

from ugds._core import Error
from ugds.bench import cuda
from ugds.bench._cufile_calls import (
    BATCH,
    COMPLETE,
    FIXED,
    OPAQUE_FD,
    READ,
    CuFile,
    Descr,
    IOEvents,
    IOParams,
    Refused,
    Timespec,
)

Answer = dict[str, Any]


class Child:
    """What one process has open: a library, GPU memory and a file."""

    def __init__(self, library: str, gpu: int) -> None:
        self._gpu = cuda.gpu(gpu)
        self._cufile = CuFile(library)
        self._memory: Any = None
        self._files: dict[str, tuple[int, int]] = {}  #: by path: the descriptor, the handle

    def hello(self) -> Answer:
        version = c_int()
        self._cufile.call("cuFileGetVersion", byref(version))
        return {"version": version.value, "gpu_name": self._gpu.name}

    def open(self) -> Answer:
        """Opens the driver."""
        start = time.perf_counter_ns()
        self._cufile.call("cuFileDriverOpen")
        return {"ms": (time.perf_counter_ns() - start) / 1e6}

    def prepare(self, paths: Sequence[str], nbytes: int, direct: bool) -> Answer:
        """Registers the files, and as much memory. Gives what registering one file and the memory took, and the code of
        a library that does not take the memory: it goes on without."""
        self._memory = self._gpu.memory(nbytes)
        self._gpu.use()
        answer: Answer = {}
        taken = []
        for path in paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            handle = c_void_p()
            start = time.perf_counter_ns()
            self._cufile.call("cuFileHandleRegister", byref(handle), byref(Descr(type=OPAQUE_FD, fd=descriptor)))
            taken.append(time.perf_counter_ns() - start)
            self._files[path] = (descriptor, handle.value or 0)
        start = time.perf_counter_ns()
        try:
            self._cufile.call("cuFileBufRegister", self._memory.address, nbytes, 0)
        except Refused as error:
            answer["unregistered"] = error.code
        answer["ms"] = (taken[0] + time.perf_counter_ns() - start) / 1e6
        return answer

    def sync(self, path: str, size: int, count: int, span: int, write: bool = False) -> Answer:
        """`count` requests one after another; the last ones' bytes are compared."""
        _, handle = self._files[path]
        move = self._cufile.library.cuFileWrite if write else self._cufile.library.cuFileRead
        base = self._memory.address
        places = [(turn * size % span, self._lane(turn, size)) for turn in range(count)]
        self._mark(size, count)
        start = time.perf_counter_ns()
        for offset, lane in places:
            if move(handle, base, size, offset, lane) != size:
                raise Refused(f"cuFile{'Write' if write else 'Read'}", ctypes.get_errno())
        taken = time.perf_counter_ns() - start
        return {"seconds": taken / 1e9, "wrong": self._wrong(path, size, places)}

    def stream(self, path: str, size: int, count: int, span: int, fixed: bool = True) -> Answer:
        """`count` reads on one stream, and a synchronisation. `inside` is the time in the submitting calls."""
        _, handle = self._files[path]
        base, read = self._memory.address, self._cufile.library.cuFileReadAsync
        places = [(turn * size % span, self._lane(turn, size)) for turn in range(count)]
        # What pointers lead to has to stay until the stream has been there.
        sizes, done = (c_size_t * count)(*([size] * count)), (c_ssize_t * count)(*([-1] * count))
        offsets, lanes = ((c_long * count)(*(place[which] for place in places)) for which in (0, 1))
        arrays: Sequence[tuple[Any, Any]] = ((sizes, c_size_t), (offsets, c_long), (lanes, c_long), (done, c_ssize_t))
        pointers = [[byref(kind.from_buffer(array, turn * 8)) for array, kind in arrays] for turn in range(count)]
        self._mark(size, count)
        with self._gpu.stream() as stream:
            if fixed:
                self._cufile.call("cuFileStreamRegister", stream.handle, FIXED)
            refused = 0
            self._gpu.use()
            start = time.perf_counter_ns()
            for at_size, at_offset, at_lane, at_done in pointers:
                refused = read(handle, base, at_size, at_offset, at_lane, at_done, stream.handle).err or refused
            inside = time.perf_counter_ns() - start
            stream.synchronize()
            taken = time.perf_counter_ns() - start
            if fixed:
                self._cufile.call("cuFileStreamDeregister", stream.handle)
        if refused or any(moved != size for moved in done):
            raise Refused("cuFileReadAsync", refused or next(moved for moved in done if moved != size))
        return {"seconds": taken / 1e9, "inside": inside / 1e9, "wrong": self._wrong(path, size, places)}

    def batch(self, path: str, size: int, count: int, span: int, batches: int, limit: float) -> Answer:
        """Batches of `count` reads, one after another. `done` is how many requests of the last one ended in time, and
        after fewer than all of them this process is of no more use."""
        _, handle = self._files[path]
        places = [(turn * size % span, self._lane(turn, size)) for turn in range(count)]
        requests = (IOParams * count)()
        for turn, (offset, lane) in enumerate(places):
            requests[turn] = IOParams(BATCH, self._memory.address, offset, lane, size, handle, READ, turn + 1)
        self._mark(size, count)
        taken, done = 0, 0
        for _ in range(batches):
            start = time.perf_counter_ns()
            batch = c_void_p()
            self._cufile.call("cuFileBatchIOSetUp", byref(batch), count)
            self._cufile.call("cuFileBatchIOSubmit", batch, count, requests, 0)
            done = self._collect(batch, count, size, start + int(limit * 1e9))
            taken += time.perf_counter_ns() - start
            if done < count:
                return {"seconds": taken / 1e9, "done": done, "wrong": 0}
            self._cufile.library.cuFileBatchIODestroy(batch)
        return {"seconds": taken / 1e9, "done": done, "wrong": self._wrong(path, size, places)}

    def _collect(self, batch: c_void_p, count: int, size: int, until: int) -> int:
        events, done = (IOEvents * count)(), 0
        while done < count and time.perf_counter_ns() < until:
            told = c_uint(count - done)
            wait = Timespec(1, 0)
            self._cufile.call("cuFileBatchIOGetStatus", batch, count - done, byref(told), events, byref(wait))
            for event in events[: told.value]:
                if event.status != COMPLETE or event.ret != size:
                    raise Refused(f"a request of a batch ended with status {event.status:#x} and", event.ret)
            done += told.value
        return done

    # --- Bytes ---------------------------------------------------------------------------------------------------

    def _lane(self, turn: int, size: int) -> int:
        """Where in the memory a request's bytes go."""
        return turn % int(self._memory.nbytes // size) * size

    def _mark(self, size: int, count: int) -> None:
        """Other bytes in the memory than the file's, and others each time."""
        used = min(self._memory.nbytes, size * count)
        self._gpu.fill(self._memory.address, used, time.perf_counter_ns() & 0xFF0000)
        self._gpu.synchronize()

    def _wrong(self, path: str, size: int, places: Sequence[tuple[int, int]]) -> int:
        """How many bytes of the last requests' are not the same in the file and the memory. The file is read past the
        page cache where it is open so."""
        descriptor, _ = self._files[path]
        last = {lane: offset for offset, lane in places}  # of two in a place, the later
        if len({*last.values()}) < len(last):
            last = {lane: offset for offset, lane in places[-1:]}  # two wrote one range
        chosen = list(last.items())[-max(1, (4 << 20) // size) :]
        wrong = 0
        with mmap.mmap(-1, size) as room:
            for lane, offset in chosen:
                os.preadv(descriptor, [room], offset)
                there = np.frombuffer(bytes(room), np.uint8)
                wrong += int((there != self._gpu.read(self._memory.address + lane, size)).sum())
        return wrong


def _said(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except Refused as error:
        return {"refused": str(error), "code": error.code}
    except Error as error:
        return {"refused": error.cause, "hint": error.hint, "code": error.errno}
    except (OSError, AttributeError) as error:
        return {"refused": str(error), "code": getattr(error, "errno", None) or 0}


def serve(library: str, gpu: int, requests: TextIO, answers: TextIO) -> None:
    child: list[Child] = []

    def begin() -> Answer:
        child.append(Child(library, gpu))
        return child[0].hello()

    print(json.dumps(_said(begin)), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        work = partial(getattr(child[0], request.pop("do")), **request)
        print(json.dumps(_said(work)), file=answers, flush=True)


if __name__ == "__main__":
    # Libraries may print; what they print is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(sys.argv[1], int(sys.argv[2]), sys.stdin, answers)
        # Nothing is closed in order: what hung is not waited for.
        os._exit(0)
