# SPDX-License-Identifier: Apache-2.0
"""The rig itself, without uGDS: what the other tests rely on is there, and shows what it should."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import kernel_log
import pytest
from devices import Controller, PciDevice, kernel_disks, read_direct, wait_for, write_direct
from host import Host, HostError

EVERY_BOOT = ("iommufd", "debian", "debug", "noiommu")
pytestmark = pytest.mark.boot(*EVERY_BOOT)


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_the_host_answers_and_says_why_not(host: Host) -> None:
    assert host.qmp("query-status")["status"] == "running"
    assert "nvme" in host.hmp("info pci") or "Class 0264" in host.hmp("info pci")
    with pytest.raises(HostError, match="no drive"):
        host.read_image("../boot", 0, 1)
    with pytest.raises(HostError, match=r"QmpError: .*not been found"):
        host.qmp("no-such-command")


def test_every_controller_of_the_table_is_on_the_bus_alone_in_its_group(
    controllers: dict[str, Controller], machine: dict[str, object]
) -> None:
    assert controllers
    for controller in controllers.values():
        assert (controller.folder / "class").read_text().strip() == "0x010802"
        if not machine["iommu"]:
            # vfio makes a group of its own for a device without.
            name = controller.folder / "iommu_group" / "name"
            assert controller.group is None or name.read_text().strip() == "vfio-noiommu"
            continue
        # A port may be there too: it does no I/O of its own.
        members = [path.resolve() for path in (controller.folder / "iommu_group" / "devices").iterdir()]
        assert [p.name for p in members if (p / "class").read_text().startswith("0x0108")] == [controller.address]


@pytest.mark.boot("debian")
def test_the_kernels_driver_and_the_host_see_the_same_bytes(
    host: Host, controller: Callable[[str], Controller]
) -> None:
    two = controller("two")
    with kernel_disks(two) as disks:
        for number, (disk, namespace) in enumerate(zip(disks, two.namespaces, strict=True)):
            size = Path("/sys/block", disk.name, "size").read_text()
            assert int(size) * 512 == namespace.size
            block = Path("/sys/block", disk.name, "queue/logical_block_size").read_text()
            assert int(block) == namespace.block
            written, planted = noise(65536, number), noise(65536, 10 + number)
            write_direct(disk, 1 << 20, written)
            assert host.read_image(namespace.drive, 1 << 20, 65536) == written
            host.write_image(namespace.drive, 2 << 20, planted)
            assert read_direct(disk, 2 << 20, 65536) == planted


@pytest.mark.boot("iommufd", "debian")
def test_the_peers_memory_is_the_same_for_the_guest_and_the_host(host: Host, peer: PciDevice) -> None:
    planted, stored = noise(8192, 1), noise(8192, 2)
    host.write_peer(4096, planted)
    fd = os.open(peer.folder / "resource2", os.O_RDWR)
    try:
        with mmap.mmap(fd, 64 << 20) as memory:
            assert memory[4096 : 4096 + 8192] == planted
            memory[1 << 20 : (1 << 20) + 8192] = stored
    finally:
        os.close(fd)
    assert host.read_peer(1 << 20, 8192) == stored


@pytest.mark.boot("iommufd", "debian", "debug")
def test_a_controller_can_be_unplugged_and_plugged_in_again(
    host: Host, controller: Callable[[str], Controller]
) -> None:
    loose = controller("loose")
    before = loose.unplug(host)
    assert loose.left(host, before)
    wait_for("the device has left the bus", lambda: not loose.present)
    assert host.wait_event("DEVICE_DELETED", host.event_count(), 0.1, device="loose") is None
    loose.plug(host)
    assert (loose.folder / "class").read_text().strip() == "0x010802"


@pytest.mark.parametrize(
    "line",
    [
        "DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0x0 [fault reason 0x06] PTE Read not set",
        "WARNING: possible circular locking dependency detected",
        "BUG: unable to handle page fault",
        "DMA-API: nvme: device driver frees DMA memory it has not allocated",
        "INFO: task python:101 blocked for more than 120 seconds",
        "kmemleak: 3 new suspected memory leaks",
    ],
)
@pytest.mark.boot("iommufd")
def test_what_a_sick_kernel_says_is_noticed(line: str) -> None:
    assert line in kernel_log.judge([line])
    assert not kernel_log.judge([line], (line[:10],))


@pytest.mark.boot("iommufd")
def test_what_a_healthy_kernel_says_is_not() -> None:
    lines = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout.splitlines()
    # Up to the first program: what tests provoke comes later.
    lines = lines[: next(number for number, line in enumerate(lines) if "Run /init" in line)]
    assert len(lines) > 100
    assert kernel_log.judge(lines) == ""


@pytest.mark.provokes("WARNING: on purpose")
def test_a_message_that_a_test_announces_is_let_pass() -> None:
    Path("/dev/kmsg").write_text("WARNING: on purpose\n")
