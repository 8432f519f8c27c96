# SPDX-License-Identifier: Apache-2.0
"""What clients do to a server that no client should, and what is left of it: nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ugds
import vfio_user_client as vu
from vfio_user_client import PAGE, Client, Memory, Refused, idle

HERE = Path(__file__).parent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ugds.Server]:
    with ugds.serve("emulated:16MiB", str(tmp_path / "s")) as started:
        warm_up(started)
        yield started


def warm_up(server: ugds.Server) -> None:
    """The memory of a client's doorbells stays until the next one comes: from here on there is one."""
    Client(server.path).close()
    idle(server)
    server.events()


def still_serves(server: ugds.Server) -> None:
    with vu.drive(server.path) as drive:
        drive.write(7, b"!" * PAGE)
        assert drive.read(7, PAGE) == b"!" * PAGE


def footprint() -> dict[str, int]:
    """What this process has, the server in it included."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {"files": len(os.listdir("/proc/self/fd")), "memfds": sum("memfd:" in line for line in maps)}


def header(command: int, size: int, flags: int = 0, number: int = 1) -> bytes:
    return struct.pack("<HHIII", number, command, size, flags, 0)


VERSION = header(vu.VERSION, 20) + struct.pack("<HH", 0, 1)

#: (what is sent after the version, the errno of the reply; None: the connection ends without one)
MESSAGES: dict[str, tuple[bytes, int | None]] = {
    "size 0": (header(vu.DEVICE_INFO, 0), None),
    "size below the header": (header(vu.DEVICE_INFO, 15), None),
    "huge size": (header(vu.REGION_WRITE, 0xFFFF_FFFF), errno.E2BIG),
    "more than may be transferred": (header(vu.REGION_WRITE, 33 + (1 << 20)), errno.E2BIG),
    "a reply": (header(vu.DEVICE_INFO, 16, vu.REPLY), None),
    "another type": (header(vu.DEVICE_INFO, 16, 7), None),
    "command 0": (header(0, 16), errno.ENOTSUP),
    "command 14": (header(14, 16), errno.ENOTSUP),
    "command 65535": (header(65535, 16), errno.ENOTSUP),
    "region descriptors": (header(6, 32) + bytes(16), errno.ENOTSUP),
    "memory access by message": (header(vu.DMA_READ, 32) + bytes(16), errno.ENOTSUP),
    "several writes": (header(15, 24) + bytes(8), errno.ENOTSUP),
    "feature": (header(vu.FEATURE, 24) + struct.pack("<II", 8, 0x50001), errno.ENOTSUP),
    "migration": (header(17, 24) + bytes(8), errno.ENOTSUP),
    "version twice": (VERSION, errno.EINVAL),
    "empty map": (header(vu.DMA_MAP, 16), errno.EINVAL),
    "short map": (header(vu.DMA_MAP, 47) + bytes(31), errno.EINVAL),
    "empty unmap": (header(vu.DMA_UNMAP, 16), errno.EINVAL),
    "unmap with a small argsz": (header(vu.DMA_UNMAP, 40) + struct.pack("<IIQQ", 23, 0, 0, 0), errno.EINVAL),
    "short device info": (header(vu.DEVICE_INFO, 20) + bytes(4), errno.EINVAL),
    "device info with a small argsz": (header(vu.DEVICE_INFO, 32) + struct.pack("<IIII", 15, 0, 0, 0), errno.EINVAL),
    "short region info": (header(vu.REGION_INFO, 47) + bytes(31), errno.EINVAL),
    "interrupts of kind 5": (header(vu.IRQ_INFO, 32) + struct.pack("<IIII", 16, 0, 5, 0), errno.EINVAL),
    "short interrupts": (header(vu.SET_IRQS, 32) + bytes(16), errno.EINVAL),
    "interrupts with a small argsz": (header(vu.SET_IRQS, 36) + struct.pack("<IIIII", 19, 33, 2, 0, 1), errno.EINVAL),
    "short read": (header(vu.REGION_READ, 31) + bytes(15), errno.EINVAL),
    "read of nothing": (header(vu.REGION_READ, 32) + struct.pack("<QII", 0, 7, 0), errno.EINVAL),
    "read of 4 GiB": (header(vu.REGION_READ, 32) + struct.pack("<QII", 0, 7, 0xFFFF_FFFF), errno.EINVAL),
    "read at the end of all": (header(vu.REGION_READ, 32) + struct.pack("<QII", 2**64 - 4, 0, 4), errno.EINVAL),
    "write without its data": (header(vu.REGION_WRITE, 32) + struct.pack("<QII", 0x14, 0, 4), errno.EINVAL),
    "write with more data": (header(vu.REGION_WRITE, 40) + struct.pack("<QIIQ", 0x14, 0, 4, 0), errno.EINVAL),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_malformed_message_is_refused_or_ends_the_connection(server: ugds.Server, name: str) -> None:
    message, code = MESSAGES[name]
    before = footprint()
    with Client(server.path) as client:
        client.socket.sendall(message)
        if code is None or code == errno.E2BIG:
            if code is not None:
                _, _, flags, error, payload, _ = client.receive()
                assert (flags, error, payload) == (vu.REPLY | vu.ERROR, code, b"")
            assert client.socket.recv(1) == b""
        else:
            _, _, flags, error, payload, _ = client.receive()
            assert (flags, error, payload) == (vu.REPLY | vu.ERROR, code, b"")
            assert client.register(8) == 0x20000  # the connection goes on
    idle(server)
    assert footprint() == before
    still_serves(server)


@pytest.mark.parametrize(
    "first",
    [
        header(vu.DEVICE_INFO, 32) + struct.pack("<IIII", 16, 0, 0, 0),
        header(vu.VERSION, 16),
        header(vu.VERSION, 19) + bytes(3),
        header(vu.VERSION, 20) + struct.pack("<HH", 1, 0),
        header(vu.VERSION, 22) + struct.pack("<HH", 0, 1) + b"{}",
        header(vu.VERSION, 16 + (2 << 20)),
    ],
)
def test_without_an_agreement_nothing_follows(server: ugds.Server, first: bytes) -> None:
    with Client(server.path, negotiate=False) as client:
        client.socket.sendall(first)
        _, _, flags, error, _, _ = client.receive()
        assert flags == vu.REPLY | vu.ERROR
        assert error in (errno.EINVAL, errno.E2BIG)
        assert client.socket.recv(1) == b""
    still_serves(server)


def test_an_older_minor_version_is_agreed_to(server: ugds.Server) -> None:
    with Client(server.path, negotiate=False) as client:
        reply, _ = client.call(vu.VERSION, struct.pack("<HH", 0, 0))
        assert struct.unpack_from("<HH", reply) == (0, 0)
        assert client.register(8) == 0x20000
    with Client(server.path, negotiate=False) as client:
        reply, _ = client.call(vu.VERSION, struct.pack("<HH", 0, 9) + b"no JSON at all\0")
        assert struct.unpack_from("<HH", reply) == (0, 1)


def test_descriptors_that_nobody_asked_for_are_closed(server: ugds.Server) -> None:
    before = footprint()
    with Client(server.path) as client, contextlib.closing(Memory(PAGE)) as memory:
        asked = struct.pack("<QII", 0, vu.BAR0, 8)
        for count in (1, 8, 200, 253):
            client.call(vu.REGION_READ, asked, [memory.fd] * count)
        # In two pieces, more together than one message can carry.
        message = header(vu.REGION_READ, 32) + asked
        socket.send_fds(client.socket, [message[:9]], [memory.fd] * 253)
        time.sleep(0.05)
        socket.send_fds(client.socket, [message[9:]], [memory.fd] * 253)
        _, _, flags, error, _, _ = client.receive()
        assert (flags, error) == (vu.REPLY | vu.ERROR, errno.EMFILE)
        assert client.register(8) == 0x20000
        assert footprint()["files"] <= before["files"] + 8
    idle(server)
    assert footprint() == before


def test_a_client_may_die_in_the_middle_of_any_message(server: ugds.Server) -> None:
    before = footprint()
    event = os.eventfd(0)
    with contextlib.closing(Memory(PAGE)) as memory:
        complete = [
            (VERSION, []),
            (header(vu.DMA_MAP, 48) + struct.pack("<IIQQQ", 32, 3, 0, 0x1000, PAGE), [memory.fd]),
            (header(vu.SET_IRQS, 36) + struct.pack("<IIIII", 20, 36, 2, 0, 1), [event]),
            (header(vu.REGION_WRITE, 36) + struct.pack("<QIII", 0x14, 0, 4, 0x460001), []),
        ]
        for which, (message, fds) in enumerate(complete):
            for length in range(1, len(message) + 1, 5):
                with Client(server.path, negotiate=which != 0) as client:
                    socket.send_fds(client.socket, [message[:length]], fds)
    os.close(event)
    idle(server)
    assert footprint() == before
    still_serves(server)


KILLED = """
import os, sys
sys.path.insert(0, {here!r})
import vfio_user_client as vu
client = vu.Client({path!r})
drive = vu.Drive(client, vector=1)
event = os.eventfd(0)
client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 1, 1, [event])
client.enable_msix()
print("ready", flush=True)
while True:
    for i in range(20):
        drive.io.submit(1 + i % 2, 1, *drive.prps(i * 2 * vu.PAGE, 2), i, 0, 1)
    for i in range(20):
        drive.io.wait()
    client.register(vu.CSTS)
"""


@pytest.mark.slow
def test_a_client_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    # Some commands are under way whenever it happens.
    with ugds.serve("emulated:16MiB?latency=200us", str(tmp_path / "s")) as server:
        warm_up(server)
        before = footprint()
        random.seed(3)
        for _ in range(12):
            program = KILLED.format(here=str(HERE), path=server.path)
            with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == b"ready\n"
                time.sleep(random.random() * 0.05)
                client.send_signal(signal.SIGKILL)
            still_serves(server)
        idle(server)
        assert footprint() == before
        assert server.emulator.violations() == []
        assert server.emulator.counters()["mapped_bytes"] == 0
        told = [event for event, _, _ in server.events()]
        assert told == ["connected", "disconnected"] * 24


@pytest.mark.slow
def test_a_thousand_clients_leave_nothing_behind(server: ugds.Server) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    def visit(number: int) -> None:
        with Client(server.path) as client, contextlib.closing(Memory(64 * PAGE)) as memory:
            event = os.eventfd(0)
            client.map(number << 20, memory)
            client.map(1 << 40, memory)
            client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 0, 2, [event, event])
            client.enable_msix()
            if number % 10 == 0:
                with contextlib.closing(vu.Drive(client)) as drive:
                    drive.write(number, b"v" * PAGE)
            os.close(event)

    for number in range(100):
        visit(number)
    idle(server)
    before, memory = footprint(), resident()
    for number in range(1000):
        visit(number)
    idle(server)
    assert footprint() == before
    assert resident() < memory + (8 << 20)
    assert server.emulator.counters()["mapped_ranges"] == 0
    assert server.emulator.violations() == []
    assert server.clients == 1101


def test_as_many_ranges_as_are_promised_can_be_mapped(server: ugds.Server) -> None:
    with Client(server.path) as client, contextlib.closing(Memory(2 * PAGE)) as memory:
        most = client.version["max_dma_maps"]
        for i in range(most):
            client.send(vu.DMA_MAP, struct.pack("<IIQQQ", 32, 3, i % 2 * PAGE, i << 30, PAGE), [memory.fd], vu.NO_REPLY)
        with pytest.raises(Refused) as caught:
            client.map(most << 30, memory)
        assert caught.value.errno in (errno.ENOSPC, errno.ENOMEM)
        assert server.emulator.counters()["mapped_ranges"] == most
        client.unmap(5 << 30, PAGE)
        client.map(5 << 30, memory, 0, PAGE)
    idle(server)
    assert server.emulator.counters()["mapped_ranges"] == 0
    still_serves(server)


def test_without_descriptors_callers_wait(tmp_path: Path) -> None:
    program = f"""
import os, resource, sys, time
sys.path.insert(0, {str(HERE)!r})
import ugds, vfio_user_client as vu
with ugds.serve("emulated:1MiB", {str(tmp_path / "s")!r}) as server:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        os.close(held.pop())
    client = vu.Client(server.path, negotiate=False)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25
    assert server.clients == 0
    while held:
        os.close(held.pop())
    client.negotiate()
    assert server.clients == 1
    client.close()
    print("served")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "served\n", done.stderr


class Fuzz:
    """Messages that are nearly right."""

    def __init__(self, seed: int, memory: Memory, event: int) -> None:
        self.random = random.Random(seed)
        self.memory, self.event = memory, event

    def number(self) -> int:
        return self.random.choice(
            [0, 1, 2, 3, 4, 7, 8, 16, 20, 24, 32, 33, 36, 4096, 8192, 0x14, 0x1000, 0x7FFF_FFFF, 0x8000_0000, 2**32 - 1]
            + [self.random.getrandbits(32) for _ in range(4)]
        )

    def wide(self) -> int:
        near = self.random.choice([0, 1 << 12, 1 << 47, 1 << 48, 1 << 63, 2**64 - 1, self.number() << 12])
        return (near + self.random.choice([-4096, -1, 0, 0, 0, 1, 4096])) % 2**64

    def payload(self, command: int) -> bytes:
        n, w = self.number, self.wide
        if command == vu.DMA_MAP:
            offset = self.random.choice([0, 0, w()])
            return struct.pack("<IIQQQ", 32, self.random.choice([3, 3, 1, n()]), offset, w(), w())
        if command == vu.DMA_UNMAP:
            return struct.pack("<IIQQ", self.random.choice([24, n()]), self.random.choice([0, 0, 2, n()]), w(), w())
        if command == vu.REGION_INFO:
            return struct.pack("<IIIIQQ", n(), n(), self.random.randrange(12), n(), w(), w())
        if command == vu.SET_IRQS:
            flags = self.random.choice([33, 34, 36, 36, 9, n()])
            return struct.pack("<IIIII", 20, flags, self.random.choice([2, 2, n()]), n() % 12, n() % 5)
        if command in (vu.REGION_READ, vu.REGION_WRITE):
            region = self.random.choice([0, 0, 4, 7, n()])
            count = self.random.choice([1, 2, 4, 8, n()])
            offset = self.random.choice([n() % 10000, n() % 64 * 4, w()])
            data = self.random.randbytes(min(count, 64)) if command == vu.REGION_WRITE else b""
            return struct.pack("<QII", offset, region, count) + data
        return self.random.randbytes(self.random.randrange(64))

    def message(self) -> tuple[bytes, list[int]]:
        r = self.random
        command = r.choice([*range(1, 19), vu.DMA_MAP, vu.SET_IRQS, vu.REGION_READ, vu.REGION_WRITE, r.getrandbits(16)])
        payload = self.payload(command)
        if r.random() < 0.2:
            payload = payload[: r.randrange(len(payload) + 1)]
        if r.random() < 0.1:
            payload += r.randbytes(r.randrange(40))
        size, flags = 16 + len(payload), r.choice([0, 0, 0, 0, vu.NO_REPLY])
        if r.random() < 0.02:
            size = self.number()
        if r.random() < 0.02:
            flags = self.number()
        fds = [
            r.choice([self.memory.fd, self.memory.fd, self.event, self.event, 0])
            for _ in range(r.choice([0, 1, 1, 2, 9]))
        ]
        return header(command, size, flags) + payload, fds


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_are_nearly_right_do_no_harm(server: ugds.Server, seed: int) -> None:
    before = footprint()
    event = os.eventfd(0)
    with contextlib.closing(Memory(64 * PAGE)) as memory:
        fuzz = Fuzz(seed, memory, event)
        for _ in range(40):
            with Client(server.path) as client:
                client.socket.setblocking(False)
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    for _ in range(60):
                        message, fds = fuzz.message()
                        socket.send_fds(client.socket, [message], fds)
                        with contextlib.suppress(BlockingIOError):
                            drain(client)
    os.close(event)
    idle(server)
    assert footprint() == before
    still_serves(server)


def drain(client: Client) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(client.socket, 65536, 16)
        for fd in fds:
            os.close(fd)
        if not data:
            raise BrokenPipeError


def test_rings_and_commands_of_garbage_do_no_harm(server: ugds.Server) -> None:
    """The client's memory holds what it likes, while the controller reads it."""
    r: Any = random.Random(5)
    for _ in range(10):
        with Client(server.path) as client, contextlib.closing(vu.Drive(client)) as drive:
            assert drive.doorbells is not None
            for _ in range(20):
                drive.memory.map[: 6 * PAGE] = b"".join(
                    struct.pack("<I", r.choice([0, r.getrandbits(32), r.randrange(16), drive.base >> 32]))
                    for _ in range(6 * 1024)
                )
                with memoryview(drive.doorbells) as view, view.cast("I") as words:
                    for _ in range(4):
                        words[r.randrange(20)] = r.choice([r.randrange(64), r.getrandbits(32)])
            client.register(vu.CSTS)
    idle(server)
    server.emulator.clear_violations()
    still_serves(server)
