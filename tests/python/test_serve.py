# SPDX-License-Identifier: Apache-2.0
"""A served controller as a client of another make finds it (vfio_user_client.py)."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ugds
import ugds.testing
import vfio_user_client as vu
from vfio_user_client import PAGE, Client, Drive, Memory, Refused, idle, refused

URI = "emulated:64MiB"
READ, WRITE, FLUSH = 0x02, 0x01, 0x00


@pytest.mark.parametrize(
    "traits", ["", "?lba=512", "?stride=2", "?doorbells=trapped", "?vectors=0", "?mdts=0&queues=1"]
)
def test_blocks_are_written_and_read(serve: Callable[..., ugds.Server], traits: str) -> None:
    server = serve(URI + traits)
    block = 512 if "512" in traits else PAGE
    with vu.drive(server.path) as drive:
        controller = drive.identify(1)
        assert controller[4:24].strip() == b"uGDS0001"
        assert controller[0:2] == drive.client.read(vu.CONFIG, 0, 2)
        assert struct.unpack_from("<Q", drive.identify(0, 1))[0] == (64 << 20) // block
        for pages in (1, 2, 3, 20):
            data = os.urandom(pages * PAGE)
            drive.write(5, data, block)
            assert drive.read(5, len(data), block) == data
            assert server.emulator.peek(5 * block, len(data)) == data
        drive.io.run(FLUSH, 1)
    idle(server)
    assert server.emulator.counters()["mapped_ranges"] == 0


def test_what_the_device_says_of_itself(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve("emulated:1MiB?queues=7&vectors=5").path) as client:
        assert client.version == {"max_msg_fds": 8, "max_data_xfer_size": 1 << 20, "max_dma_maps": 16384}
        reply, _ = client.call(vu.DEVICE_INFO, struct.pack("<IIII", 16, 0, 0, 0))
        assert struct.unpack("<IIII", reply) == (16, 3, 9, 5)
        flags, size, offset, areas, fds = client.region(vu.BAR0)
        assert (flags, size, offset, areas, len(fds)) == (15, 8192, 0, [(4096, 4096)], 1)
        assert client.region(vu.BAR4)[:2] == (3, 65536)
        assert client.region(vu.CONFIG)[:2] == (3, 4096)
        for index in (1, 2, 3, 5, 6, 8):
            assert client.region(index) == (0, 0, 0, [], [])
        counts = []
        for index in range(5):
            reply, _ = client.call(vu.IRQ_INFO, struct.pack("<IIII", 16, 0, index, 0))
            argsz, irq_flags, got, count = struct.unpack("<IIII", reply)
            assert (argsz, got) == (16, index)
            assert irq_flags == (1 if count else 0)
            counts.append(count)
        assert counts == [0, 0, 5, 1, 1]


def test_a_reply_that_does_not_fit_says_what_it_needs(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve().path) as client:
        reply, fds = client.call(vu.REGION_INFO, struct.pack("<IIIIQQ", 32, 0, 0, 0, 0, 0))
        assert struct.unpack("<IIIIQQ", reply) == (64, 15, 0, 0, 8192, 0)
        assert fds == []
        refused(errno.EINVAL, client.region, 0, argsz=31)
        refused(errno.EINVAL, client.region, 9)


@pytest.mark.parametrize(
    ("traits", "doorbells"),
    [("queues=1", 4096), ("queues=511", 4096), ("queues=512", 8192), ("queues=2&stride=12", 3 * 2 * 16384)],
)
def test_the_doorbells_fill_whole_pages(serve: Callable[..., ugds.Server], traits: str, doorbells: int) -> None:
    with Client(serve(f"emulated:1MiB?{traits}").path) as client:
        _, size, _, areas, fds = client.region(vu.BAR0)
        assert areas == [(4096, doorbells)]
        assert size & (size - 1) == 0
        assert size >= 4096 + doorbells > size // 2
        assert os.fstat(fds[0]).st_size >= 4096 + doorbells
        with pytest.raises(PermissionError):
            os.ftruncate(fds[0], 0)  # or the server would die of it


def test_with_trapped_doorbells_nothing_is_mapped(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve("emulated:1MiB?doorbells=trapped").path) as client:
        assert client.region(vu.BAR0) == (3, 8192, 0, [], [])


def test_configuration_space_is_one_of_an_nvme_controller(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve("emulated:1MiB?vectors=5").path) as client:

        def get(at: int, width: int = 4) -> int:
            return int.from_bytes(client.read(vu.CONFIG, at, width), "little")

        assert get(0) == 0x0010_1B36
        assert get(8) >> 8 == 0x010802
        whole = client.read(vu.CONFIG, 0, 4096)
        assert len(whole) == 4096
        for at in range(0x100):
            assert client.read(vu.CONFIG, at, 1)[0] == whole[at]
        found, at = {}, whole[0x34]
        while at:
            found[whole[at]] = at
            at = whole[at + 1]
        assert sorted(found) == [0x01, 0x10, 0x11]
        msix = found[0x11]
        assert get(msix + 2, 2) == 4  # five vectors, disabled
        assert (get(msix + 4), get(msix + 8)) == (4, 0x8000 | 4)
        for low, size in ((0x10, 8192), (0x20, 65536)):
            client.write(vu.CONFIG, low, b"\xff" * 8)
            assert get(low, 8) == (1 << 64) - size | 4
        client.write(vu.CONFIG, 0x12, b"\x34")
        assert get(0x10) == 0xFF34_E004
        before = client.read(vu.CONFIG, 0, 4)
        client.write(vu.CONFIG, 0, b"\0" * 4)
        assert client.read(vu.CONFIG, 0, 4) == before
        client.write(vu.CONFIG, 4, b"\xff\xff")
        assert get(4, 2) == 0x0546
        client.write(vu.CONFIG, 0x100, b"\xff" * 64)
        assert get(0x100, 8) == 0
        refused(errno.EINVAL, client.read, vu.CONFIG, 4095, 2)
        refused(errno.EINVAL, client.read, vu.CONFIG, 1 << 40, 1)
        refused(errno.EINVAL, client.write, vu.CONFIG, (1 << 64) - 1, b"xx")


def test_the_msix_table_keeps_what_is_written(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve("emulated:1MiB?vectors=2").path) as client:
        assert client.read(vu.BAR4, 12, 4) == b"\1\0\0\0"
        client.write(vu.BAR4, 16, bytes(range(16)))
        assert client.read(vu.BAR4, 0, 48) == bytes(12) + b"\1\0\0\0" + bytes(range(16)) + bytes(16)
        client.write(vu.BAR4, 0x8000, b"\xff" * 8)
        assert client.read(vu.BAR4, 0x8000, 8) == bytes(8)


def test_registers_are_read_by_four_or_eight_bytes(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve().path) as client:
        assert client.register(vu.CAP, 8) == client.register(vu.CAP) | client.register(vu.CAP + 4) << 32
        assert client.register(8) == 0x20000
        for count in (1, 2, 3, 5, 16):
            refused(errno.EINVAL, client.read, vu.BAR0, 0, count)
            refused(errno.EINVAL, client.write, vu.BAR0, 0x14, bytes(count))
        refused(errno.EINVAL, client.read, vu.BAR0, 8190, 4)
        refused(errno.EINVAL, client.read, 1, 0, 4)
        refused(errno.EINVAL, client.read, 4_000_000_000, 0, 4)
        client.set_register(vu.ASQ, 0x1234_5678_9000, 8)
        assert client.register(vu.ASQ, 8) == 0x1234_5678_9000


def test_interrupts_come_by_eventfd_once_msix_is_enabled(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with vu.drive(server.path, vector=3) as drive:
        client = drive.client
        first, second = os.eventfd(0), os.eventfd(0)
        client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 2, 2, [first, second])
        drive.read(0, PAGE)
        assert vu.wait_for_interrupt(second, 0.05) == 0
        client.enable_msix()
        for _ in range(50):
            drive.io.submit(READ, 1, drive.base + drive.data)
            assert vu.wait_for_interrupt(second) == 1
            assert drive.io.poll() == (0, 0)
        assert vu.wait_for_interrupt(first, 0) == 0
        client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 3, 1, [first])  # another in its place
        drive.read(0, PAGE)
        assert vu.wait_for_interrupt(first) == 1
        assert vu.wait_for_interrupt(second, 0) == 0
        client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 3, 1)  # without a descriptor: nobody
        drive.read(0, PAGE)
        assert vu.wait_for_interrupt(first, 0.05) == 0
        client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 2, 2, [first, second])
        client.irqs(vu.DATA_NONE | vu.TRIGGER, 0, 0)  # all of them
        drive.read(0, PAGE)
        assert vu.wait_for_interrupt(second, 0.05) == 0
        os.close(first)
        os.close(second)


def test_a_client_can_trigger_its_own_interrupts(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve().path) as client:
        events = [os.eventfd(0) for _ in range(3)]
        client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 1, 3, events)
        client.irqs(vu.DATA_NONE | vu.TRIGGER, 1, 2)
        assert [vu.wait_for_interrupt(fd, 0) for fd in events] == [1, 1, 0]
        client.irqs(vu.DATA_BOOL | vu.TRIGGER, 1, 3, data=b"\1\0\1")
        assert [vu.wait_for_interrupt(fd, 0) for fd in events] == [1, 0, 1]
        os.write(events[0], ((1 << 64) - 2).to_bytes(8, "little"))  # one more would block
        client.irqs(vu.DATA_NONE | vu.TRIGGER, 1, 1)
        for fd in events:
            os.close(fd)


def test_an_interrupt_request_that_makes_no_sense_is_refused(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve("emulated:1MiB?vectors=4").path) as client:
        event, (reading, writing) = os.eventfd(0), os.pipe()
        eventfds, none = vu.DATA_EVENTFD | vu.TRIGGER, vu.DATA_NONE | vu.TRIGGER
        refused(errno.EINVAL, client.irqs, eventfds, 4, 1, [event])
        refused(errno.EINVAL, client.irqs, eventfds, 3, 2, [event, event])
        refused(errno.EINVAL, client.irqs, eventfds, 0xFFFF_FFFF, 2, [event, event])
        refused(errno.EINVAL, client.irqs, eventfds, 0, 2, [event])
        refused(errno.EINVAL, client.irqs, eventfds, 0, 1, [writing])
        refused(errno.EINVAL, client.irqs, eventfds, 0, 0)
        refused(errno.EINVAL, client.irqs, none, 0, 1, [event])
        refused(errno.EINVAL, client.irqs, none, 1, 0)
        refused(errno.EINVAL, client.irqs, vu.DATA_BOOL | vu.TRIGGER, 0, 2, data=b"\1")
        refused(errno.EINVAL, client.irqs, vu.DATA_NONE, 0, 1)
        refused(errno.EINVAL, client.irqs, vu.DATA_NONE | vu.DATA_BOOL | vu.TRIGGER, 0, 1)
        refused(errno.EINVAL, client.irqs, none | 64, 0, 1)
        refused(errno.EINVAL, client.irqs, none, 0, 1, index=0)
        refused(errno.EINVAL, client.irqs, none, 0, 1, index=5)
        refused(errno.ENOTSUP, client.irqs, vu.DATA_NONE | vu.MASK, 0, 1)
        refused(errno.E2BIG, client.irqs, eventfds, 0, 4, [event] * 9)
        client.irqs(eventfds, 0, 1, [event], index=3)  # of errors, which never come
        for fd in (event, reading, writing):
            os.close(fd)


@pytest.mark.parametrize("how", ["message", "configuration space"])
def test_a_reset_stops_the_controller_and_leaves_memory_and_interrupts(
    serve: Callable[..., ugds.Server], how: str
) -> None:
    server = serve()
    with vu.drive(server.path, vector=1) as drive:
        drive.write(1, b"x" * PAGE)
        event = os.eventfd(0)
        drive.client.irqs(vu.DATA_EVENTFD | vu.TRIGGER, 1, 1, [event])
        drive.client.enable_msix()
        if how == "message":
            assert drive.client.call(vu.RESET) == (b"", [])
        else:
            express = 0x50
            assert drive.client.read(vu.CONFIG, express, 1) == b"\x10"
            drive.client.write(vu.CONFIG, express + 9, b"\x80")
            assert drive.client.read(vu.CONFIG, express + 9, 1)[0] & 0x80 == 0
        assert drive.client.register(vu.CSTS) == 0
        assert drive.client.register(vu.CC) == 0
        assert drive.client.register(vu.ASQ, 8) == 0
        drive.client.unmap(drive.base, drive.memory.size)
        again = Drive(drive.client, base=drive.base, vector=1)
        again.io.submit(READ, 1, again.base + again.data, 0, 1)
        assert vu.wait_for_interrupt(event) == 1
        assert again.io.poll() == (0, 0)
        assert again.memory.map[again.data : again.data + PAGE] == b"x" * PAGE
        again.close()
        os.close(event)


def test_a_reset_that_fails_is_said_to_have_failed(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with Client(server.path) as client:
        server.emulator.inject("reset_fails")
        refused(errno.EIO, client.call, vu.RESET)
        client.call(vu.RESET)


def test_shadow_doorbells_wake_the_controller_by_a_message(serve: Callable[..., ugds.Server]) -> None:
    server = serve("emulated:64MiB?idle=100us")
    with vu.drive(server.path) as drive:
        shadow, events = Memory(PAGE), Memory(PAGE)
        drive.client.map(0x1000, shadow)
        drive.client.map(0x2000, events)
        drive.admin.run(0x7C, 0, 0x1000, 0x2000)
        rings = 0

        def ring(index: int, value: int) -> None:
            nonlocal rings
            if index < 2:
                return Drive.ring(drive, index, value)
            (old,) = struct.unpack_from("<I", shadow.map, 4 * index)
            with memoryview(shadow.map) as view, view.cast("I") as words:
                words[index] = value
            time.sleep(0)
            (event,) = struct.unpack_from("<I", events.map, 4 * index)
            if (value - event - 1) & 0xFFFF < (value - old) & 0xFFFF:
                rings += 1
                drive.client.set_register(vu.DOORBELLS + 4 * index, value)
            return None

        drive.ring = ring
        for i in range(20):
            drive.write(i, bytes([i]) * PAGE)
            time.sleep(0.003)  # asleep by now
            assert drive.read(i, PAGE) == bytes([i]) * PAGE
        assert rings > 0
        shadow.close()
        events.close()


def test_a_message_without_a_reply_is_done_before_the_next(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve().path) as client:
        for value in range(200):
            data = struct.pack("<QIIQ", vu.ASQ, vu.BAR0, 8, value << 12)
            client.send(vu.REGION_WRITE, data, flags=vu.NO_REPLY)
            client.send(99, b"nonsense", flags=vu.NO_REPLY)
            assert client.register(vu.ASQ, 8) == value << 12


def test_messages_may_be_sent_ahead_and_in_pieces(serve: Callable[..., ugds.Server]) -> None:
    with Client(serve().path) as client:
        asked = struct.pack("<QII", vu.CAP, vu.BAR0, 8)
        sent = [client.send(vu.REGION_READ, asked) for _ in range(100)]
        answers = {client.receive()[4] for _ in sent}
        assert len(answers) == 1
        message = struct.pack("<HHIII", 7, vu.REGION_READ, 32, 0, 0) + asked
        for byte in message:
            client.socket.send(bytes([byte]))
            time.sleep(0.0005)
        assert client.receive()[4] in answers


def test_who_reads_no_replies_holds_up_nobody(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with Client(server.path) as client:
        client.socket.setblocking(False)
        message = struct.pack("<HHIIIQII", 7, vu.REGION_READ, 32, 0, 0, 0, vu.CONFIG, 4096)
        with pytest.raises(BlockingIOError):
            for _ in range(100_000):
                client.socket.send(message)
        with pytest.raises(Refused) as caught:
            Client(server.path)
        assert caught.value.errno == errno.EBUSY
    idle(server)
    Client(server.path).close()


def test_one_client_at_a_time(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with vu.drive(server.path) as drive:
        for _ in range(3):
            refused(errno.EBUSY, Client, server.path)
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
        for one in silent:
            one.connect(server.path)
        drive.write(0, b"a" * PAGE)
        assert drive.read(0, PAGE) == b"a" * PAGE
        for one in silent:
            one.close()
    for _ in range(50):  # whoever comes after one that has gone is let in
        Client(server.path).close()
    assert server.clients == 51
    kinds = [event for event, _, _ in server.events()]
    assert kinds.count("refused") == 3


def test_one_that_says_nothing_keeps_others_out_for_a_second_at_most(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with Client(server.path, negotiate=False) as silent:
        refused(errno.EBUSY, Client, server.path)
        time.sleep(1.1)
        with vu.drive(server.path) as drive:
            assert drive.read(0, PAGE) == bytes(PAGE)
        assert silent.socket.recv(1) == b""
    idle(server)
    assert [event for event, _, _ in server.events()] == ["refused", "refused", "connected", "disconnected"]


def test_one_that_only_looks_is_no_client(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    for _ in range(5):
        Client(server.path, negotiate=False).close()
        idle(server)
    assert server.clients == 0
    assert server.events() == []


def test_data_outlasts_clients_and_servers(serve: Callable[..., ugds.Server], tmp_path: Path) -> None:
    image = f"emulated:{tmp_path}/image?size=4MiB"
    data = os.urandom(8 * PAGE)
    server = serve(image)
    with vu.drive(server.path) as drive:
        drive.write(9, data)
    with vu.drive(server.path) as drive:
        assert drive.read(9, len(data)) == data
    server.close()
    with ugds.open(image) as ssd, ugds.empty(len(data)) as buffer:  # the image is free again
        ssd.read(buffer, offset=9 * PAGE)
        assert bytes(memoryview(buffer)) == data
    with vu.drive(serve(image, "again").path) as drive:
        assert drive.read(9, len(data)) == data


def test_a_named_device_is_shared_with_this_process(serve: Callable[..., ugds.Server]) -> None:
    uri = "emulated:4MiB?name=served"
    server = serve(uri)
    try:
        with ugds.open(uri) as ssd, vu.drive(server.path) as drive, ugds.empty(PAGE) as buffer:
            drive.write(3, b"z" * PAGE)
            ssd.read(buffer, offset=3 * PAGE)
            assert bytes(memoryview(buffer)) == b"z" * PAGE
    finally:
        server.close()
        assert ugds.testing.forget_subsystem("served")


def test_a_controller_that_leaves_the_bus_is_back_for_the_next_client(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    with vu.drive(server.path) as drive:
        server.emulator.inject("remove")
        drive.io.submit(READ, 1, drive.base + drive.data)
        end = time.monotonic() + 20
        while drive.client.register(vu.CSTS) != 0xFFFF_FFFF:
            assert time.monotonic() < end
    with vu.drive(server.path) as drive:
        assert drive.read(0, PAGE) == bytes(PAGE)


def test_closing_ends_the_client_and_removes_the_socket(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    client = Client(server.path)
    server.close()
    assert client.socket.recv(1) == b""
    assert not os.path.exists(server.path)
    assert server.closed
    server.close()
    for use in (lambda: server.clients, server.events, server.fileno, lambda: server.emulator):
        with pytest.raises(ugds.Error) as caught:
            use()
        assert caught.value.errno == errno.EBADF
    client.close()


def test_the_emulator_of_a_closed_server_says_so(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    emulator = server.emulator
    assert emulator.counters()["commands"] == 0
    server.close()
    with pytest.raises(ugds.Error, match="closed"):
        emulator.counters()


def test_events_can_be_waited_for(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    assert select.select([server], [], [], 0)[0] == []
    client = Client(server.path)
    assert select.select([server], [], [], 20)[0] == [server]
    assert server.events() == [("connected", os.getpid(), "")]
    assert select.select([server], [], [], 0)[0] == []
    client.close()
    assert select.select([server], [], [], 20)[0] == [server]
    assert server.events() == [("disconnected", os.getpid(), "the client left")]


def test_a_child_of_a_fork_leaves_the_server_alone(serve: Callable[..., ugds.Server]) -> None:
    server = serve()
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(0 if os.path.exists(server.path) else 1)
    assert os.waitpid(child, 0)[1] == 0
    with vu.drive(server.path) as drive:
        drive.write(0, b"p" * PAGE)
        assert drive.read(0, PAGE) == b"p" * PAGE


def test_several_servers_and_their_clients_run_side_by_side(serve: Callable[..., ugds.Server]) -> None:
    servers = [serve(name=str(i)) for i in range(3)]
    failures: list[BaseException] = []

    def work(server: ugds.Server, mark: bytes) -> None:
        try:
            for _ in range(5):
                with vu.drive(server.path) as drive:
                    for lba in range(10):
                        drive.write(lba, mark * PAGE)
                        assert drive.read(lba, PAGE) == mark * PAGE
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s, bytes([65 + i]))) for i, s in enumerate(servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
