# SPDX-License-Identifier: Apache-2.0
"""A controller leaves, or its client is killed, while ugds_drv has it open: nobody is left waiting, no memory is
written late, and the next opening works."""

from __future__ import annotations

import errno
import mmap
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devices import Controller
from host import Host
from small_nvme import CSTS, READ, SmallNvme

import drv as api
from drv import PAGE, DrvFile, node_of, refused_with

Give = Callable[[str], Controller]
Open = Callable[[str], DrvFile]
Slow = Callable[[str, int], None]
KIB, MIB = 1 << 10, 1 << 20
SECONDS = 15.0
pytestmark = pytest.mark.boot("iommufd", "debug")


@pytest.fixture
def loose(host: Host, drv: Give, controllers: dict[str, Controller]) -> Iterator[Controller]:
    """A controller to be unplugged, that ugds_drv has. It is put back afterwards."""
    yield drv("loose")
    if not controllers["loose"].present:
        controllers["loose"].plug(host)


def must_be_gone(file: DrvFile, nvme: SmallNvme, area: api.Coherent, event: int) -> None:
    """What an open file still gives when its device has left."""
    assert select.select([event], [], [], SECONDS)[0]
    status = file.status()
    assert (status.state, api.REASONS[status.cause]) == (api.GONE, "removed")
    assert nvme.read32(CSTS) == 0xFFFFFFFF
    assert nvme.read64(0) == 0xFFFFFFFFFFFFFFFF
    nvme.write32(0x1000, 5)  # a doorbell that nobody hears
    assert nvme.read32(CSTS) == 0xFFFFFFFF
    assert area.memory[:PAGE] == b"\x5a" * PAGE
    assert file.info().state == api.GONE
    for request in (api.Alloc(length=PAGE), api.Reset(), api.Unmap(token=1), api.Event(fd=-1)):
        with pytest.raises(OSError) as refused:
            file.call(request)
        refused_with(refused.value, errno.ENODEV, "removed")
    with pytest.raises(OSError) as refused:
        file.map_host(mmap.mmap(-1, PAGE))
    refused_with(refused.value, errno.ENODEV, "removed")


@pytest.mark.parametrize("how", ["unplug", "unbind"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_controller_leaves_while_it_is_open(host: Host, loose: Controller, slow: Slow, how: str, busy: bool) -> None:
    file = DrvFile(node_of(loose))
    event = os.eventfd(0, os.EFD_NONBLOCK)
    file.interrupts(event, event)
    file.interrupts(-1, -1)
    file.tell(event)
    nvme, area = SmallNvme(file), api.Coherent(file, 64 * KIB)
    area.memory[:] = b"\x5a" * 64 * KIB
    memory = mmap.mmap(-1, MIB)
    memory[:] = b"\x11" * MIB
    pages = file.map_host(memory)
    if busy:
        slow("loose1", KIB)
        for number in range(4):
            nvme.start(READ, 0, 128, pages.addresses[number * 16 :][:16], number)
    start = time.monotonic()
    if how == "unplug":
        before = loose.unplug(host)
        assert loose.left(host, before, SECONDS)
    else:
        loose.unbind()
    assert time.monotonic() - start < SECONDS
    must_be_gone(file, nvme, area, event)
    if busy:
        slow("loose1", 0)
        then = memory[:]
        time.sleep(0.3)
        assert memory[:] == then
    nvme.close()
    area.memory.close()
    file.close()
    os.close(event)
    if not loose.present:
        loose.plug(host)
    loose.bind("ugds_drv")
    with DrvFile(node_of(loose)) as again:
        nvme = SmallNvme(again)
        nvme.read(0, 8, again.map_host(mmap.mmap(-1, PAGE)))
        nvme.close()


def test_registers_that_were_never_touched_read_as_ones_when_it_has_left(loose: Controller) -> None:
    file = DrvFile(node_of(loose))
    untouched, touched = file.registers(), file.registers()
    assert touched[0:4] != b"\xff" * 4
    loose.unbind()
    assert untouched[:] == touched[:] == b"\xff" * len(untouched)
    untouched.close()
    touched.close()
    file.close()


def client(node: Path, memory: mmap.mmap, ready: int) -> None:
    """Keeps the controller busy, writing memory, until it is killed."""
    file = DrvFile(node)
    nvme = SmallNvme(file)
    own = mmap.mmap(-1, 8 * 64 * KIB)  # freed with the process
    pages = file.map_host(own)
    os.write(ready, b"1")
    flying = 0
    while True:
        while flying < 8:
            nvme.start(READ, 0, 128, pages.addresses[flying * 16 :][:16], flying)
            flying += 1
        nvme.reap(nvme.io)
        flying -= 1


@pytest.mark.limit(300)
@pytest.mark.boot("debug")
def test_a_hundred_killed_clients_leave_a_controller_that_writes_nowhere(host: Host, drv: Give, machine: dict) -> None:
    node = node_of(drv("two"))
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    random_ = random.Random(7)
    opened = []
    for _ in range(100):
        told, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                client(node, mmap.mmap(-1, PAGE), ready)
            finally:
                os._exit(1)
        os.close(ready)
        assert os.read(told, 1) == b"1"
        os.close(told)
        time.sleep(random_.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        # What was the client's is free now; whatever gets it must stay as it is.
        taken = mmap.mmap(-1, 2 * MIB)
        taken[:] = b"\x11" * len(taken)
        start = time.monotonic()
        with DrvFile(node) as file:
            opened.append(time.monotonic() - start)
            nvme = SmallNvme(file)
            page = mmap.mmap(-1, PAGE)
            nvme.read(0, 8, file.map_host(page))
            assert set(page[:]) == {0x42}
            nvme.close()
        assert taken[:] == b"\x11" * len(taken)
    assert max(opened) < 5


def test_a_killed_client_s_commands_do_not_outlive_it(host: Host, drv: Give, slow: Slow) -> None:
    """With commands that the disk holds back: they are not done when the client is dead, and never will be."""
    two = drv("two")
    node = node_of(two)
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    (told, ready), (heard, go) = os.pipe(), os.pipe()
    shared = mmap.mmap(-1, 64 * KIB)  # with this process, so that what is written late is seen
    child = os.fork()
    if child == 0:
        try:
            file = DrvFile(node)
            nvme = SmallNvme(file)
            pages = file.map_host(shared)
            nvme.read(0, 128, pages)
            shared[:] = bytes(64 * KIB)
            os.write(ready, b"1")
            os.read(heard, 1)
            for place in range(4):
                nvme.start(READ, 0, 128, pages, place)
            os.write(ready, b"2")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(told, 1) == b"1"
    slow("two1", KIB)
    os.write(go, b"1")
    assert os.read(told, 1) == b"2"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not two.bus_master()
    shared[:] = bytes(64 * KIB)
    slow("two1", 0)
    time.sleep(0.5)
    assert set(shared[:]) == {0}
    with DrvFile(node) as file:
        nvme = SmallNvme(file)
        nvme.read(0, 128, file.map_host(shared))
        assert set(shared[:]) == {0x42}
        nvme.close()
