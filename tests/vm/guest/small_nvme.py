# SPDX-License-Identifier: Apache-2.0
"""The least that moves a block: a controller driven by hand through ugds_drv, with an admin queue and one queue pair of
I/O. It shows what the module set up, without the library."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Sequence

from drv import PAGE, Coherent, DrvFile

CAP, CC, CSTS, AQA, ASQ, ACQ, DOORBELLS = 0x00, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x1000
IDENTIFY, CREATE_SQ, CREATE_CQ, READ, WRITE = 0x06, 0x01, 0x05, 0x02, 0x01
ENTRIES = 16


class Failed(Exception):
    """A command's status, when it is not success."""


class Late(Exception):
    """No completion came in time."""


class Ring:
    def __init__(self, file: DrvFile, number: int) -> None:
        self.area = Coherent(file, 2 * PAGE)  # submissions in the first page, completions in the second
        self.number, self.tail, self.head, self.phase, self.next_id = number, 0, 0, 1, 0

    @property
    def submissions(self) -> int:
        return int(self.area.iova)

    @property
    def completions(self) -> int:
        return int(self.area.iova) + PAGE


class SmallNvme:
    """A controller, enabled. `vectors`: completion queues raise interrupts 0 (admin) and 1."""

    def __init__(self, file: DrvFile, vectors: bool = False) -> None:
        self.file = file
        self.memory = file.registers()
        self.bar = (ctypes.c_uint32 * (len(self.memory) // 4)).from_buffer(self.memory)
        self.stride = 4 << (self.read64(CAP) >> 32 & 0xF)
        self.admin, self.io = Ring(file, 0), Ring(file, 1)
        self.lists = Coherent(file, 16 * PAGE)
        self.enable(vectors)

    def close(self) -> None:
        """Unmaps everything of it here, so that closing the file is the last of it."""
        del self.bar
        for memory in (self.memory, self.admin.area.memory, self.io.area.memory, self.lists.memory):
            memory.close()

    def read32(self, at: int) -> int:
        return int(self.bar[at // 4])

    def read64(self, at: int) -> int:
        return self.read32(at) | self.read32(at + 4) << 32

    def write32(self, at: int, value: int) -> None:
        self.bar[at // 4] = value

    def write64(self, at: int, value: int) -> None:
        self.write32(at, value & 0xFFFFFFFF)
        self.write32(at + 4, value >> 32)

    def enable(self, vectors: bool = False) -> None:
        for ring in (self.admin, self.io):
            ring.area.memory[:] = bytes(2 * PAGE)
            ring.tail = ring.head = 0
            ring.phase = 1
        self.write32(AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1))
        self.write64(ASQ, self.admin.submissions)
        self.write64(ACQ, self.admin.completions)
        self.write32(CC, 4 << 20 | 6 << 16 | 1)  # entries of 16 and 64 bytes, pages of 4 KiB
        end = time.monotonic() + 20
        while not self.read32(CSTS) & 1:
            assert time.monotonic() < end, f"the controller is not ready: CSTS {self.read32(CSTS):#x}"
        queue = (ENTRIES - 1) << 16 | 1
        interrupt = 1 << 16 | 1 << 1 if vectors else 0
        self.command(self.admin, CREATE_CQ, 0, self.io.completions, 0, queue, interrupt | 1)
        self.command(self.admin, CREATE_SQ, 0, self.io.submissions, 0, queue, 1 << 16 | 1)

    def submit(self, ring: Ring, opcode: int, nsid: int, prp1: int, prp2: int, *words: int) -> int:
        """Puts one command into a ring, and rings. `words` are its dwords from the tenth on."""
        ring.next_id = (ring.next_id + 1) & 0xFFFF
        entry = struct.pack("<IIQQQQ", opcode | ring.next_id << 16, nsid, 0, 0, prp1, prp2)
        entry += struct.pack("<6I", *words, *[0] * (6 - len(words)))
        ring.area.memory[ring.tail * 64 : ring.tail * 64 + 64] = entry
        ring.tail = (ring.tail + 1) % ENTRIES
        self.ring(ring)
        return ring.next_id

    def ring(self, ring: Ring) -> None:
        self.write32(DOORBELLS + 2 * ring.number * self.stride, ring.tail)

    def reap(self, ring: Ring, seconds: float = 20.0) -> int:
        """Waits for one completion and gives its identifier. Raises Late, or Failed with its status."""
        end = time.monotonic() + seconds
        at = PAGE + ring.head * 16
        while True:
            if ring.area.memory[at + 14] & 1 == ring.phase:  # before the rest is looked at
                break
            if time.monotonic() > end:
                raise Late
        identifier, status = struct.unpack_from("<HH", ring.area.memory, at + 12)
        ring.head = (ring.head + 1) % ENTRIES
        ring.phase ^= ring.head == 0
        self.write32(DOORBELLS + (2 * ring.number + 1) * self.stride, ring.head)
        if status >> 1:
            raise Failed(f"status {status >> 1:#x}")
        return int(identifier)

    def command(self, ring: Ring, *words: int, seconds: float = 20.0) -> None:
        identifier = self.submit(ring, *words)
        assert self.reap(ring, seconds) == identifier

    def identify(self, address: int) -> None:
        """Has the controller describe itself into a page."""
        self.command(self.admin, IDENTIFY, 0, address, 0, 1)

    def prps(self, pages: Sequence[int], place: int = 0) -> tuple[int, int]:
        """PRP entries for whole pages, the list in the given page of `lists`."""
        if len(pages) == 1:
            return pages[0], 0
        if len(pages) == 2:
            return pages[0], pages[1]
        assert len(pages) <= 513
        rest = struct.pack(f"<{len(pages) - 1}Q", *pages[1:])
        self.lists.memory[place * PAGE : place * PAGE + len(rest)] = rest
        return pages[0], int(self.lists.iova) + place * PAGE

    def start(self, opcode: int, block: int, blocks: int, pages: Sequence[int], place: int = 0) -> int:
        """A read or write of whole pages, from block `block` on; not waited for."""
        prp1, prp2 = self.prps(pages, place)
        return self.submit(self.io, opcode, 1, prp1, prp2, block, 0, blocks - 1)

    def transfer(self, opcode: int, block: int, blocks: int, pages: Sequence[int], seconds: float = 20.0) -> None:
        identifier = self.start(opcode, block, blocks, pages)
        assert self.reap(self.io, seconds) == identifier

    def read(self, block: int, blocks: int, pages: Sequence[int]) -> None:
        self.transfer(READ, block, blocks, pages)

    def write(self, block: int, blocks: int, pages: Sequence[int]) -> None:
        self.transfer(WRITE, block, blocks, pages)
