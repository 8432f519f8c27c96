# SPDX-License-Identifier: Apache-2.0
"""Memory that a client of a served controller shares with it, and takes away again."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ugds
import vfio_user_client as vu
from vfio_user_client import PAGE, Client, Drive, Memory, idle, refused

READ, WRITE = 0x02, 0x01


def test_memory_that_cannot_be_had_is_refused(serve: Callable[..., ugds.Server], tmp_path: Path) -> None:
    server = serve()
    with Client(server.path) as client:
        memory, (reading, writing) = Memory(4 * PAGE), os.pipe()
        client.map(0x10000, memory)
        refused(errno.EEXIST, client.map, 0x10000, memory)
        refused(errno.EEXIST, client.map, 0x13000, memory)
        refused(errno.EEXIST, client.map, 0xF000, memory)
        refused(errno.EINVAL, client.map, 0x20000, memory, 0, 5 * PAGE)
        refused(errno.EINVAL, client.map, 0x20000, memory, PAGE, 4 * PAGE)
        refused(errno.EINVAL, client.map, 0x20000, memory, 100, PAGE)
        refused(errno.EINVAL, client.map, 0x20100, memory)
        refused(errno.EINVAL, client.map, 0x20000, memory, 0, 0)
        refused(errno.EINVAL, client.map, 0x20000, memory, 0, 100)
        refused(errno.EINVAL, client.map, (1 << 48) - PAGE, memory)
        refused(errno.EINVAL, client.map, 1 << 63, memory)
        refused(errno.EINVAL, client.map, 0x20000, memory, (1 << 64) - PAGE, 2 * PAGE)
        refused(errno.EINVAL, client.map, 0x20000, memory, 0, (1 << 64) - PAGE)
        refused(errno.EINVAL, client.map, 0x20000, memory, flags=0)
        refused(errno.EINVAL, client.map, 0x20000, memory, flags=0x13)
        asked = struct.pack("<IIQQQ", 32, 3, 0, 0x20000, PAGE)
        refused(errno.EOPNOTSUPP, client.call, vu.DMA_MAP, asked)
        refused(errno.EINVAL, client.call, vu.DMA_MAP, asked, [memory.fd, memory.fd])
        refused(errno.EINVAL, client.call, vu.DMA_MAP, asked, [writing])
        refused(errno.EINVAL, client.call, vu.DMA_MAP, asked[:31], [memory.fd])
        refused(errno.EINVAL, client.call, vu.DMA_MAP, b"\0" + asked[1:], [memory.fd])
        (tmp_path / "readonly").write_bytes(bytes(PAGE))
        readonly = os.open(tmp_path / "readonly", os.O_RDONLY)
        refused(errno.EACCES, client.call, vu.DMA_MAP, asked, [readonly])
        assert server.emulator.counters()["mapped_bytes"] == 4 * PAGE
        refused(errno.ENOENT, client.unmap, 0x10000, PAGE)
        refused(errno.ENOENT, client.unmap, 0x11000, 4 * PAGE)
        refused(errno.EINVAL, client.unmap, 0x10000, 4 * PAGE, flags=1)
        client.unmap(0x10000, 4 * PAGE)
        refused(errno.ENOENT, client.unmap, 0x10000, 4 * PAGE)
        client.map(0, memory)
        client.map((1 << 48) - 4 * PAGE, memory)
        refused(errno.EINVAL, client.unmap, 0, PAGE, flags=2)
        client.unmap(0, 0, flags=2)
        assert server.emulator.counters()["mapped_ranges"] == 0
        memory.close()
        for fd in (reading, writing, readonly):
            os.close(fd)


def test_any_iova_and_any_part_of_a_file_will_do(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    for base in (0, 0x1000, 0xFFFF_F000, (1 << 47) - (70 * PAGE), (1 << 48) - (70 * PAGE)):
        with vu.drive(server.path, base=base) as drive:
            extra = Memory(8 * PAGE)
            drive.client.map(0x5555_0000_0000, extra, 3 * PAGE, 2 * PAGE)
            drive.write(0, b"\x5a" * 2 * PAGE)
            drive.io.run(READ, 1, 0x5555_0000_0000, 0x5555_0000_1000, 0, 0, 1)
            assert extra.map[:] == bytes(3 * PAGE) + b"\x5a" * 2 * PAGE + bytes(3 * PAGE)
            extra.close()


def test_read_only_memory_is_never_written(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with vu.drive(server.path) as drive:
        memory = Memory(PAGE)
        memory.map[:4] = b"keep"
        drive.client.map(0x1000, memory, flags=1)
        drive.io.run(WRITE, 1, 0x1000)
        drive.io.submit(READ, 1, 0x1000)
        assert drive.io.wait()[0] == 0x004
        assert memory.map[:4] == b"keep"
        memory.close()
    assert {rule for rule, _ in server.emulator.violations()} == {"read-only-access"}
    server.emulator.clear_violations()


def test_what_is_unmapped_is_reached_no_more(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with vu.drive(server.path) as drive:
        memory = Memory(PAGE)
        drive.client.map(0x1000, memory)
        server.emulator.inject("late_write")  # writes there until it is stopped
        drive.io.submit(READ, 1, 0x1000)
        end = time.monotonic() + 20
        while memory.map[0] == 0:
            assert time.monotonic() < end
        drive.client.unmap(0x1000, PAGE)
        after = memory.map[:]
        time.sleep(0.02)
        assert memory.map[:] == after
        memory.close()
    idle(server)
    assert "unmap-in-use" in {rule for rule, _ in server.emulator.violations()}
    server.emulator.clear_violations()
    server.emulator.clear_faults()
    with vu.drive(server.path) as drive:
        assert drive.read(0, PAGE) == bytes(PAGE)


@pytest.mark.parametrize("sealable", [True, False])
def test_a_client_that_cuts_its_memory_harms_only_itself(serve: Callable[..., ugds.Server], sealable: bool) -> None:
    server = serve()
    with vu.drive(server.path) as drive:
        memory = Memory(16 * PAGE, sealable=sealable)
        drive.client.map(0x10000, memory)
        drive.io.run(READ, 1, 0x10000)
        if sealable:
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, 0)
        else:
            os.ftruncate(memory.fd, 0)
            drive.io.submit(READ, 1, 0x18000)
            assert drive.client.socket.recv(1) == b""
            idle(server)
            assert "cut" in server.events()[-1][2]
        os.close(memory.fd)
    with vu.drive(server.path) as drive:
        drive.write(0, b"q" * PAGE)
        assert drive.read(0, PAGE) == b"q" * PAGE


def test_a_client_that_cuts_the_memory_of_its_queues_does_too(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    for _ in range(5):
        with Client(server.path) as client:
            drive = Drive(client)
            doorbells = drive.doorbells
            assert doorbells is not None
            rings = Memory(4 * PAGE, sealable=False)
            client.map(0x1000, rings)
            drive.admin.run(0x05, 0, 0x1000, 0, 63 << 16 | 2, 1)
            drive.admin.run(0x01, 0, 0x2000, 0, 63 << 16 | 2, 2 << 16 | 1)
            os.ftruncate(rings.fd, 0)
            with memoryview(doorbells) as view, view.cast("I") as words:
                words[4] = 60
            assert client.socket.recv(1) == b""
            os.close(rings.fd)
            drive.close()
        idle(server)
    server.emulator.clear_violations()  # of the entries that are zeros now
    with vu.drive(server.path) as opened:
        assert opened.read(0, PAGE) == bytes(PAGE)
