# SPDX-License-Identifier: Apache-2.0
"""Thousands of random requests by cuFile's calls, each compared with plain POSIX on the same bytes: `python
cufile_oracle.py MEMORY WAY CASES SEED FOLDER`. In a process of its own: the CUDA driver is chosen once in each.

MEMORY: host, cuda or managed; WAY: sync, vector, batch or stream."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from ctypes import byref, c_long, c_size_t, c_ssize_t
from pathlib import Path
from typing import Any

import cufile_client as cf

MEMORY_SIZE = 1 << 20
FILE_SIZE = 1 << 20
BEYOND = 1 << 16  #: how far requests go beyond the end of the file


class Host:
    """Memory that the processor reaches."""

    def __init__(self, size: int) -> None:
        self._memory = ctypes.create_string_buffer(size + 4096)
        self.address = (ctypes.addressof(self._memory) + 4095) & ~4095
        self.stream = None

    def put(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def get(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.address + offset, size)

    def wait(self) -> None:
        pass


class Cuda(Host):
    """Memory of the driver that UGDS_CUDA_LIBRARY names."""

    def __init__(self, size: int, managed: bool, stream: bool) -> None:
        self.driver = ctypes.CDLL(os.environ["UGDS_CUDA_LIBRARY"])
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self.check(self.driver.cuInit(0))
        self.check(self.driver.cuDevicePrimaryCtxRetain(byref(context), 0))
        self.check(self.driver.cuCtxSetCurrent(context))
        if managed:
            self.check(self.driver.cuMemAllocManaged(byref(address), c_size_t(size), 1))
        else:
            self.check(self.driver.cuMemAlloc_v2(byref(address), c_size_t(size)))
        self.address = address.value
        self.stream = ctypes.c_void_p()
        if stream:
            self.check(self.driver.cuStreamCreate(byref(self.stream), 0))

    def check(self, code: int) -> None:
        assert code == 0, f"the driver says {code}"

    def put(self, offset: int, data: bytes) -> None:
        self.check(self.driver.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address + offset), data, c_size_t(len(data))))

    def get(self, offset: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.check(self.driver.cuMemcpyDtoH_v2(data, ctypes.c_uint64(self.address + offset), c_size_t(size)))
        return data.raw

    def wait(self) -> None:
        self.check(self.driver.cuStreamSynchronize(self.stream))


class Request:
    """One at random: sizes and offsets of any alignment, small ones more often, some beyond the end of the file."""

    def __init__(self, random: random.Random) -> None:
        unit = random.choice([1, 1, 512, 4096])
        largest = random.choice([64, 5000, 70_000, 300_000])
        self.write = random.random() < 0.4
        self.size = max(unit, random.randrange(largest) // unit * unit)
        self.offset = random.randrange(FILE_SIZE + BEYOND) // unit * unit
        # In its own half of the memory, so that what is beside it can be looked at.
        self.base = random.randrange(MEMORY_SIZE - self.size - 600) // unit * unit
        self.buffer_offset = random.choice([0, 0, 3, 512])


def transfer(cufile: cf.CuFile, way: str, handle: int, memory: Any, r: Request) -> int:
    address, name = memory.address + r.base, "Write" if r.write else "Read"
    if way == "sync":
        return (cufile.write if r.write else cufile.read)(handle, address, r.size, r.offset, r.buffer_offset)
    if way == "vector":
        address += r.buffer_offset
        cut = r.size // 3
        vector = (cf.IOVec * 2)(cf.IOVec(address, cut), cf.IOVec(address + cut, r.size - cut))
        return int(getattr(cufile.library, f"cuFile{name}v")(handle, vector, 2, r.offset, 0))
    if way == "batch":
        request = cf.IOParams(1, address, r.offset, r.buffer_offset, r.size, handle, int(r.write), 7)
        ((cookie, status, moved),) = cufile.batch([request])
        assert cookie == 7
        assert (status == cf.COMPLETE) == (moved >= 0)
        return moved
    size, offset, buffer_offset, done = c_size_t(r.size), c_long(r.offset), c_long(r.buffer_offset), c_ssize_t(-7)
    pointers = (byref(size), byref(offset), byref(buffer_offset), byref(done))
    cufile.call(f"cuFile{name}Async", handle, address, *pointers, memory.stream)
    memory.wait()
    return done.value


def run(kind: str, way: str, cases: int, seed: int, folder: Path) -> None:
    random_numbers = random.Random(seed)
    cufile = cf.CuFile()
    memory = Host(MEMORY_SIZE) if kind == "host" else Cuda(MEMORY_SIZE, kind == "managed", way == "stream")
    fd = cf.open_file(folder / "file", FILE_SIZE)
    model = os.open(folder / "model", os.O_RDWR | os.O_CREAT)
    os.write(model, (folder / "file").read_bytes())
    handle = cufile.register(fd)
    registered = False
    for case in range(cases):
        if case % 50 == 0:  # registered in turns
            if registered:
                cufile.call("cuFileBufDeregister", memory.address)
            else:
                cufile.call("cuFileBufRegister", memory.address, MEMORY_SIZE, 0)
            registered = not registered
        r = Request(random_numbers)
        begin = r.base + r.buffer_offset
        what = f"case {case} of seed {seed}: {vars(r)}"
        data = random_numbers.randbytes(r.size)
        if r.write:
            memory.put(begin, data)
            assert os.pwrite(model, data, r.offset) == r.size
            assert transfer(cufile, way, handle, memory, r) == r.size, f"{what}: {cufile.words()}"
            low = max(0, r.offset - 5000)
            high = r.offset + r.size + 5000
            assert os.pread(fd, high - low, low) == os.pread(model, high - low, low), what
        else:
            guard = 32
            low, high = max(0, begin - guard), min(MEMORY_SIZE, begin + r.size + guard)
            memory.put(begin, data)
            before = memory.get(low, high - low)
            expected = os.pread(model, r.size, r.offset)
            moved = transfer(cufile, way, handle, memory, r)
            assert moved == len(expected), f"{what}: {moved} instead of {len(expected)}: {cufile.words()}"
            after = memory.get(low, high - low)
            at = begin - low
            # What is behind a short read, up to the size that was asked for, may be anything.
            assert after[at : at + moved] == expected, what
            assert after[:at] == before[:at], what
            assert after[at + r.size :] == before[at + r.size :], what
    assert os.fstat(fd).st_size == os.fstat(model).st_size
    cufile.deregister(handle)
    os.close(fd)
    print(f"{cases} cases")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
