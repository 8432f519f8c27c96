# SPDX-License-Identifier: Apache-2.0
"""The interface of ugds_drv.ko (drv/uapi/ugds_drv.h) as a test calls it: files, requests, mappings."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devices import PciDevice, wait_for

API_VERSION = 1
PAGE = 4096
CLASS = Path("/sys/class/ugds_drv")
PARAMETERS = Path("/sys/module/ugds_drv/parameters")

LIVE, WEDGED, GONE = 0, 1, 2
MAPPING_UNKNOWN, MAPPING_LIVE, MAPPING_REVOKED = 0, 1, 2
READ, READ_WRITE = 1, 3
PEER, HOST = 1, 2
REVOCABLE, PINNED, STATIC = 1, 2, 3
TRANSLATED, FLR, DMABUF, P2PDMA, NVIDIA, FAULTS = (1 << bit for bit in range(6))
REQUIRE_PEER, ALLOW_REVOCABLE = 1, 2
WITH_FLR = 1
DISABLED, FUNCTION_RESET = 1, 2

REASONS = {
    0: "none",
    1: "revoked",
    2: "system reset",
    3: "suspended",
    4: "pci error",
    5: "removed",
    6: "not stopped",
    16: "argument",
    17: "range",
    18: "overlap",
    19: "limit",
    20: "memory",
    21: "unpinnable",
    22: "dma",
    23: "bounced",
    24: "array",
    25: "token",
    26: "mapped",
    27: "descriptor",
    28: "beyond end",
    29: "attach",
    30: "cannot pin",
    31: "fence",
    32: "exporter",
    33: "pieces",
    34: "not peer",
    35: "stale",
    36: "vectors",
    37: "not built",
    38: "again",
}

_u32, _s32, _u64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


class Request(ctypes.Structure):
    """One request's structure. `number` is the ioctl's, in its type 0xd6."""

    number = -1
    argsz: int
    flags: int
    reason: int

    def __init__(self, **fields: Any) -> None:
        super().__init__(argsz=ctypes.sizeof(self), **fields)


class Info(Request):
    number = 0
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("api_version", _u32), ("reason", _u32), ("capabilities", _u64)],
        *[("pci_domain", _u32), ("pci_address", _u32), ("state", _u32), ("vectors", _u32), ("bar_size", _u64)],
        *[("bar_offset", _u64), ("dma_bits", _u32), ("reserved", _u32), ("coherent_max", _u64)],
        *[("coherent_total", _u64), ("map_max", _u64)],
    ]


class Status(Request):
    number = 1
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("token", _u64), ("generation", _u64), ("state", _u32)],
        *[("cause", _u32), ("mapping", _u32), ("reason", _u32)],
    ]


class Alloc(Request):
    number = 2
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("length", _u64), ("dma_address", _u64), ("mmap_offset", _u64)],
        *[("token", _u64), ("reason", _u32), ("reserved", _u32)],
    ]


class MapHost(Request):
    number = 3
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("address", _u64), ("length", _u64), ("pages", _u64), ("token", _u64)],
        *[("access", _u32), ("reason", _u32)],
    ]


class MapDmabuf(Request):
    number = 4
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("offset", _u64), ("length", _u64), ("pages", _u64), ("token", _u64)],
        *[("fd", _s32), ("access", _u32), ("reason", _u32), ("placement", _u32), ("holding", _u32)],
        *[("peer_domain", _u32), ("peer_address", _u32), ("physical", _u32), ("peer_bytes", _u64)],
    ]


class MapNvidia(MapHost):
    number = 5


class Unmap(Request):
    number = 6
    _fields_ = [("argsz", _u32), ("flags", _u32), ("token", _u64), ("reason", _u32), ("reserved", _u32)]


class Interrupts(Request):
    number = 7
    _fields_ = [("argsz", _u32), ("flags", _u32), ("eventfds", _u64), ("count", _u32), ("reason", _u32)]


class Reset(Request):
    number = 8
    _fields_ = [
        *[("argsz", _u32), ("flags", _u32), ("stopped", _u32), ("method", _u32), ("reason", _u32)],
        ("reserved", _u32),
    ]


class Event(Request):
    number = 9
    _fields_ = [("argsz", _u32), ("flags", _u32), ("fd", _s32), ("reason", _u32)]


REQUESTS = (Info, Status, Alloc, MapHost, MapDmabuf, MapNvidia, Unmap, Interrupts, Reset, Event)


class Refused(OSError):
    """What the module said no to. `reason` is its reason's name, `request` the structure as it came back."""

    def __init__(self, code: int, request: Request) -> None:
        self.reason = REASONS[request.reason]
        self.request = request
        super().__init__(code, f"{type(request).__name__}: {os.strerror(code)}, because of: {self.reason}")


class Pages(Sequence[int]):
    """What a mapping gave: the DMA address of each page, and its token."""

    def __init__(self, count: int) -> None:
        self.addresses = (_u64 * count)()
        self.token = 0
        self.answer: Any = None

    def __getitem__(self, number: Any) -> Any:
        return self.addresses[number]

    def __len__(self) -> int:
        return len(self.addresses)


class Coherent:
    """Memory of ALLOC_COHERENT, mapped here."""

    def __init__(self, file: DrvFile, length: int) -> None:
        self.file, self.length = file, length
        self.answer = file.call(Alloc(length=length))
        self.token, self.iova = self.answer.token, self.answer.dma_address
        self.memory = mmap.mmap(file.fd, length, offset=self.answer.mmap_offset)

    def free(self) -> None:
        self.memory.close()
        self.file.unmap(self.token)


class DrvFile:
    """An open node."""

    def __init__(self, node: Path) -> None:
        self.fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)

    def call(self, request: Any) -> Any:
        """Makes a request. Raises Refused where it has a reason to, else OSError."""
        try:
            fcntl.ioctl(self.fd, 0xD600 | request.number, request)
        except OSError as error:
            if error.errno is None:
                raise
            raise Refused(error.errno, request) from None
        return request

    def info(self) -> Any:
        return self.call(Info())

    def status(self, token: int = 0) -> Any:
        return self.call(Status(token=token))

    def map_host(self, memory: mmap.mmap, offset: int = 0, length: int = 0, access: int = READ_WRITE) -> Pages:
        return self.map_address(address_of(memory) + offset, length or len(memory) - offset, access)

    def map_address(self, address: int, length: int, access: int = READ_WRITE) -> Pages:
        pages = Pages(max(length // PAGE, 1))
        request = MapHost(address=address, length=length, pages=ctypes.addressof(pages.addresses), access=access)
        pages.answer = self.call(request)
        pages.token = pages.answer.token
        return pages

    def map_dmabuf(self, fd: int, length: int, offset: int = 0, access: int = READ_WRITE, flags: int = 0) -> Pages:
        pages = Pages(max(length // PAGE, 1))
        where = ctypes.addressof(pages.addresses)
        request = MapDmabuf(flags=flags, offset=offset, length=length, pages=where, fd=fd, access=access)
        pages.answer = self.call(request)
        pages.token = pages.answer.token
        return pages

    def unmap(self, token: int) -> None:
        self.call(Unmap(token=token))

    def interrupts(self, *eventfds: int) -> None:
        array = (_s32 * max(len(eventfds), 1))(*eventfds)
        self.call(Interrupts(eventfds=ctypes.addressof(array), count=len(eventfds)))

    def reset(self, flags: int = 0) -> Any:
        return self.call(Reset(flags=flags))

    def tell(self, fd: int) -> None:
        self.call(Event(fd=fd))

    def registers(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.info().bar_size)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> DrvFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def node_of(device: PciDevice) -> Path:
    """The node of a device that ugds_drv has, once it has made it."""

    def look() -> Path | None:
        nodes = [Path("/dev", folder.name) for folder in device.folder.glob("ugds_drv/*")]
        return next((node for node in nodes if node.exists()), None)

    return wait_for(f"the node of {device.name}", look)


def points() -> list[str]:
    return (PARAMETERS / "fault_points").read_text().split()


@contextmanager
def failing(point: str) -> Iterator[None]:
    """The next pass of that step fails. It has to be met."""
    (PARAMETERS / "fault").write_text(point)
    try:
        yield
        left = (PARAMETERS / "fault").read_text().strip()
        assert not left, f"nothing came by {left}"
    finally:
        (PARAMETERS / "fault").write_text("\n")


def refused_with(error: OSError, code: int, reason: str) -> None:
    got = (errno.errorcode.get(error.errno or 0), error.reason if isinstance(error, Refused) else "")
    assert got == (errno.errorcode[code], reason)


def fields(request: Request) -> Sequence[str]:
    kind: Any = type(request)
    return [name for name, _ in kind._fields_] or [name for name, _ in kind.__base__._fields_]
