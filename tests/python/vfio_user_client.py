# SPDX-License-Identifier: Apache-2.0
"""The smallest client of a vfio-user NVMe controller, in nothing but Python's library, so that the server is judged by
code that shares none of its own."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

VERSION, DMA_MAP, DMA_UNMAP, DEVICE_INFO, REGION_INFO, IRQ_INFO = 1, 2, 3, 4, 5, 7
SET_IRQS, REGION_READ, REGION_WRITE, DMA_READ, RESET, FEATURE = 8, 9, 10, 11, 13, 16
REPLY, NO_REPLY, ERROR = 1, 0x10, 0x20
BAR0, BAR4, CONFIG = 0, 4, 7
MSIX = 2
DATA_NONE, DATA_BOOL, DATA_EVENTFD, MASK, UNMASK, TRIGGER = 1, 2, 4, 8, 16, 32
PAGE = 4096
CAP, CC, CSTS, AQA, ASQ, ACQ, DOORBELLS = 0x00, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x1000


class Refused(Exception):
    """An error reply."""

    def __init__(self, command: int, code: int) -> None:
        super().__init__(f"message {command}: {os.strerror(code)}")
        self.errno = code


class Memory:
    """Memory of this process that the server can map."""

    def __init__(self, size: int, *, sealable: bool = True) -> None:
        self.fd = os.memfd_create("client", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0))
        os.ftruncate(self.fd, size)
        self.size = size
        self.map = mmap.mmap(self.fd, size)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class Client:
    """A connection. Its calls raise `Refused` for an error reply, and EOFError where the server has ended it."""

    def __init__(self, path: str, *, negotiate: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.next_id = 0
        self.files: list[int] = []
        self.version: dict[str, Any] = {}
        try:
            self.socket.settimeout(20)
            self.socket.connect(str(path))
            if negotiate:
                self.negotiate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.socket.close()
        for fd in self.files:
            os.close(fd)
        self.files.clear()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def negotiate(self) -> None:
        text = json.dumps({"capabilities": {"max_msg_fds": 8, "new_in_1.7": {"x": [None]}}}).encode() + b"\0"
        reply, _ = self.call(VERSION, struct.pack("<HH", 0, 1) + text)
        assert struct.unpack_from("<HH", reply) == (0, 1)
        assert reply.endswith(b"\0")
        self.version = json.loads(reply[4:-1])["capabilities"]

    def send(self, command: int, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0) -> int:
        self.next_id = (self.next_id + 1) & 0xFFFF
        message = struct.pack("<HHIII", self.next_id, command, 16 + len(payload), flags, 0) + payload
        socket.send_fds(self.socket, [message], list(fds))
        return self.next_id

    def receive(self) -> tuple[int, int, int, int, bytes, list[int]]:
        """(id, command, flags, error, payload, descriptors) of the next reply."""
        header, fds, _, _ = socket.recv_fds(self.socket, 16, 8)
        self.files += fds
        while len(header) < 16:
            more = self.socket.recv(16 - len(header))
            if not more:
                raise EOFError
            header += more
        number, command, size, flags, error = struct.unpack("<HHIII", header)
        payload = b""
        while len(payload) < size - 16:
            more = self.socket.recv(size - 16 - len(payload))
            if not more:
                raise EOFError
            payload += more
        return number, command, flags, error, payload, fds

    def call(self, command: int, payload: bytes = b"", fds: Sequence[int] = ()) -> tuple[bytes, list[int]]:
        sent = self.send(command, payload, fds)
        number, answered, flags, error, reply, files = self.receive()
        assert (number, answered, flags & 0xF) == (sent, command, REPLY)
        if flags & ERROR:
            assert reply == b""
            raise Refused(command, error)
        return reply, files

    def map(self, iova: int, memory: Memory, offset: int = 0, size: int | None = None, flags: int = 3) -> None:
        length = memory.size - offset if size is None else size
        reply, _ = self.call(DMA_MAP, struct.pack("<IIQQQ", 32, flags, offset, iova, length), [memory.fd])
        assert reply == b""

    def unmap(self, iova: int, size: int, flags: int = 0) -> None:
        asked = struct.pack("<IIQQ", 24, flags, iova, size)
        reply, _ = self.call(DMA_UNMAP, asked)
        assert reply == asked

    def read(self, region: int, offset: int, count: int) -> bytes:
        asked = struct.pack("<QII", offset, region, count)
        reply, _ = self.call(REGION_READ, asked)
        assert reply[:16] == asked
        assert len(reply) == 16 + count
        return reply[16:]

    def write(self, region: int, offset: int, data: bytes) -> None:
        asked = struct.pack("<QII", offset, region, len(data))
        reply, _ = self.call(REGION_WRITE, asked + data)
        assert reply == asked

    def register(self, offset: int, width: int = 4) -> int:
        return int.from_bytes(self.read(BAR0, offset, width), "little")

    def set_register(self, offset: int, value: int, width: int = 4) -> None:
        self.write(BAR0, offset, value.to_bytes(width, "little"))

    def region(self, index: int, argsz: int = 4096) -> tuple[int, int, int, list[tuple[int, int]], list[int]]:
        """(flags, size, offset, areas that can be mapped, descriptors)."""
        reply, fds = self.call(REGION_INFO, struct.pack("<IIIIQQ", argsz, 0, index, 0, 0, 0))
        needed, flags, got, at, size, offset = struct.unpack_from("<IIIIQQ", reply)
        assert got == index
        assert needed >= 32
        areas = []
        if at:
            identifier, version, following, count, _ = struct.unpack_from("<HHIII", reply, at)
            assert (identifier, version, following) == (1, 1, 0)
            areas = [struct.unpack_from("<QQ", reply, at + 16 + 16 * i) for i in range(count)]
            assert needed == len(reply)
        return flags, size, offset, areas, fds

    def irqs(
        self, flags: int, start: int, count: int, fds: Sequence[int] = (), data: bytes = b"", index: int = MSIX
    ) -> None:
        request = struct.pack("<IIIII", 20 + len(data), flags, index, start, count) + data
        assert self.call(SET_IRQS, request, fds) == (b"", [])

    def enable_msix(self) -> None:
        at = self.read(CONFIG, 0x34, 1)[0]
        while self.read(CONFIG, at, 1)[0] != 0x11:
            at = self.read(CONFIG, at + 1, 1)[0]
            assert at
        control = int.from_bytes(self.read(CONFIG, at + 2, 2), "little")
        self.write(CONFIG, at + 2, (control | 0x8000).to_bytes(2, "little"))


class Queue:
    """A queue pair of `depth` entries in one page of memory each."""

    def __init__(self, drive: Drive, number: int, sq: int, cq: int, depth: int) -> None:
        self.drive, self.number, self.sq, self.cq, self.depth = drive, number, sq, cq, depth
        self.tail = self.head = 0
        self.phase = 1

    def submit(self, opcode: int, nsid: int = 0, prp1: int = 0, prp2: int = 0, *words: int) -> None:
        cdw = [*words, 0, 0, 0, 0, 0, 0][:6]
        entry = struct.pack("<BBHIIIQQQ6I", opcode, 0, self.tail, nsid, 0, 0, 0, prp1, prp2, *cdw)
        at = self.sq + 64 * self.tail
        self.drive.memory.map[at : at + 64] = entry
        self.tail = (self.tail + 1) % self.depth
        self.drive.ring(2 * self.number, self.tail)

    def poll(self) -> tuple[int, int] | None:
        """(status, result) of the next completion, if there is one."""
        at = self.cq + 16 * self.head
        if self.drive.memory.map[at + 14] & 1 != self.phase:
            return None
        result, _, _, _, _, status = struct.unpack_from("<IIHHHH", self.drive.memory.map, at)
        self.head = (self.head + 1) % self.depth
        if self.head == 0:
            self.phase ^= 1
        self.drive.ring(2 * self.number + 1, self.head)
        return status >> 1 & 0x7FF, result

    def wait(self, seconds: float = 20) -> tuple[int, int]:
        end = time.monotonic() + seconds
        while (done := self.poll()) is None:
            assert time.monotonic() < end, "no completion"
        return done

    def run(self, opcode: int, nsid: int = 0, prp1: int = 0, prp2: int = 0, *words: int) -> int:
        self.submit(opcode, nsid, prp1, prp2, *words)
        status, result = self.wait()
        assert status == 0, f"opcode {opcode}: status {status:#x}"
        return result


class Drive:
    """An NVMe controller behind a client: brought up, with one I/O queue pair. Its memory is at `base`: six pages for
    queues and Identify, then `data` bytes from `self.data` on."""

    def __init__(
        self, client: Client, *, base: int = 0x7F12_3400_0000, data: int = 64 * PAGE, vector: int | None = None
    ) -> None:
        self.client, self.base = client, base
        self.memory = Memory(6 * PAGE + data)
        self.data = 6 * PAGE
        client.map(base, self.memory)
        _, _, offset, areas, fds = client.region(BAR0)
        self.doorbells: mmap.mmap | None = None
        if areas:
            at, size = areas[0]
            self.doorbells = mmap.mmap(fds[0], size, offset=offset + at)
            assert at == DOORBELLS
        self.stride = 4 << (client.register(CAP, 8) >> 32 & 0xF)
        client.write(CONFIG, 4, (0x6).to_bytes(2, "little"))
        client.set_register(CC, 0)
        self.await_ready(0)
        client.set_register(AQA, 63 << 16 | 63)
        client.set_register(ASQ, base, 8)
        client.set_register(ACQ, base + PAGE, 8)
        client.set_register(CC, 4 << 20 | 6 << 16 | 1)
        self.await_ready(1)
        self.admin = Queue(self, 0, 0, PAGE, 64)
        interrupts = 0 if vector is None else vector << 16 | 2
        self.admin.run(0x05, 0, base + 3 * PAGE, 0, 63 << 16 | 1, interrupts | 1)
        self.admin.run(0x01, 0, base + 2 * PAGE, 0, 63 << 16 | 1, 1 << 16 | 1)
        self.io = Queue(self, 1, 2 * PAGE, 3 * PAGE, 64)

    def close(self) -> None:
        if self.doorbells is not None:
            self.doorbells.close()
        self.memory.close()

    def await_ready(self, ready: int) -> None:
        end = time.monotonic() + 20
        while self.client.register(CSTS) & 1 != ready:
            assert time.monotonic() < end

    def ring(self, index: int, value: int) -> None:
        if self.doorbells is None:
            self.client.set_register(DOORBELLS + index * self.stride, value)
            return
        # One aligned 32-bit store: what a slice assignment of bytes is not.
        with memoryview(self.doorbells) as view, view.cast("I") as words:
            words[index * self.stride // 4] = value

    def identify(self, cns: int, nsid: int = 0) -> bytes:
        self.admin.run(0x06, nsid, self.base + 4 * PAGE, 0, cns)
        return self.memory.map[4 * PAGE : 5 * PAGE]

    def prps(self, offset: int, pages: int) -> tuple[int, int]:
        first = self.base + self.data + offset
        if pages <= 2:
            return first, first + PAGE if pages == 2 else 0
        self.memory.map[5 * PAGE : 5 * PAGE + 8 * (pages - 1)] = struct.pack(
            f"<{pages - 1}Q", *(first + i * PAGE for i in range(1, pages))
        )
        return first, self.base + 5 * PAGE

    def write(self, lba: int, data: bytes, block: int = PAGE) -> None:
        self.memory.map[self.data : self.data + len(data)] = data
        self.io.run(0x01, 1, *self.prps(0, -(-len(data) // PAGE)), lba, lba >> 32, len(data) // block - 1)

    def read(self, lba: int, size: int, block: int = PAGE) -> bytes:
        self.memory.map[self.data : self.data + size] = bytes(size)
        self.io.run(0x02, 1, *self.prps(0, -(-size // PAGE)), lba, lba >> 32, size // block - 1)
        return self.memory.map[self.data : self.data + size]


def wait_for_interrupt(fd: int, seconds: float = 20) -> int:
    """The interrupts since the last look; 0 after `seconds`."""
    ready, _, _ = select.select([fd], [], [], seconds)
    return int.from_bytes(os.read(fd, 8), "little") if ready else 0


@contextlib.contextmanager
def drive(path: str, **options: Any) -> Any:
    with Client(path) as client, contextlib.closing(Drive(client, **options)) as opened:
        yield opened


def idle(server: Any) -> None:
    """Waits until a server has seen its client go."""
    end = time.monotonic() + 20
    while server.connected:
        assert time.monotonic() < end
        time.sleep(0.002)


def refused(code: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The call gets an error reply with this errno."""
    try:
        call(*arguments, **options)
    except Refused as error:
        assert error.errno == code, os.strerror(error.errno)
    else:
        raise AssertionError("it was not refused")
