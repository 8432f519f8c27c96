# SPDX-License-Identifier: Apache-2.0
"""Peer to peer: the SSD moves data into and out of another device's BAR, behind the same switch or behind another port.
That device's memory is a file on the host, which has the last word."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager
from pathlib import Path

import pytest
import ugds
from devices import PciDevice
from host import Host
from support import KIB, MIB, noise
from vfio_function import VfioFunction

Open = Callable[..., ugds.Device]
BAR = 2
SIZE = 64 * MIB
POISON = b"\xee" * 4096
pytestmark = pytest.mark.boot("iommufd", "debian")
NEAR = [
    pytest.param("peered", marks=pytest.mark.boot("iommufd")),
    pytest.param("coarse", marks=pytest.mark.boot("iommufd", "debian")),
]
#: How a DMA-BUF is imported, and for which controller: below a switch, or below another root port of a processor that
#: forwards between them.
IMPORTS = [
    pytest.param("iommufd", "peered", marks=pytest.mark.boot("iommufd")),
    pytest.param("ugds_drv", "two", marks=pytest.mark.boot("debug")),
]


@contextmanager
def resource_of(peer: PciDevice) -> Iterator[mmap.mmap]:
    """The BAR, mapped through sysfs, while no driver has the device."""
    peer.unbind()
    (peer.folder / "enable").write_text("1")
    fd = os.open(peer.folder / f"resource{BAR}", os.O_RDWR)
    memory = mmap.mmap(fd, SIZE)
    os.close(fd)
    try:
        yield memory
    finally:
        memory.close()
        (peer.folder / "enable").write_text("0")


@contextmanager
def region_of(peer: PciDevice) -> Iterator[mmap.mmap]:
    """The BAR, mapped through vfio."""
    peer.bind("vfio-pci")
    with VfioFunction(peer, by_iommufd=False) as function:
        memory = function.map(BAR)
        try:
            yield memory
        finally:
            memory.close()


@contextmanager
def exported(peer: PciDevice, *ranges: tuple[int, int]) -> Iterator[tuple[VfioFunction, int]]:
    """The BAR, or ranges of it, as a DMA-BUF."""
    peer.bind("vfio-pci")
    with VfioFunction(peer, by_iommufd=True) as function:
        fd = function.dma_buf(BAR, *(ranges or ((0, SIZE),)))
        try:
            yield function, fd
        finally:
            os.close(fd)


def both_ways(ssd: ugds.Device, buffer: ugds.Registration, host: Host, drive: str, start: int = 0) -> None:
    """Disk to peer and peer to disk, with poison around what is written, and everything read back on the host. `start`
    is where in the peer's memory the registration begins."""
    for seed, (offset, size) in enumerate([(8 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (MIB, MIB)]):
        at, data = start + offset, noise(size, seed)
        host.write_peer(at - 4096, POISON + b"\xdd" * size + POISON)
        host.write_image(drive, 4 * MIB, data)
        assert ssd.read(buffer, 4 * MIB, size, offset) == size
        assert host.read_peer(at - 4096, size + 8192) == POISON + data + POISON
        back = noise(size, 100 + seed)
        host.write_peer(at, back)
        assert ssd.write(buffer, 16 * MIB, size, offset) == size
        assert host.read_image(drive, 16 * MIB, size) == back


@pytest.mark.parametrize("mapped", [resource_of, region_of])
@pytest.mark.parametrize("name", NEAR)
def test_a_bar_that_is_mapped_here_is_reached_by_type1(
    open_ssd: Open,
    host: Host,
    peer: PciDevice,
    name: str,
    mapped: Callable[[PciDevice], Context[mmap.mmap]],
) -> None:
    with mapped(peer) as memory, open_ssd(name, "type1") as ssd, ugds.register(memory) as buffer:
        both_ways(ssd, buffer, host, f"{name}1")


@pytest.mark.parametrize(
    ("way", "name"), [*IMPORTS, pytest.param("iommufd", "coarse", marks=pytest.mark.boot("iommufd"))]
)
def test_a_bar_that_is_a_dma_buf_is_reached(open_ssd: Open, host: Host, peer: PciDevice, way: str, name: str) -> None:
    with exported(peer) as (_, fd), open_ssd(name, way) as ssd, ugds.register_dmabuf(fd, SIZE) as buffer:
        assert (buffer.memory, buffer.route, buffer.nbytes) == ("peer", "direct", SIZE)
        both_ways(ssd, buffer, host, f"{name}1")


@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_large_transfers_and_many_threads_reach_a_dma_buf(
    open_ssd: Open, host: Host, peer: PciDevice, way: str, name: str
) -> None:
    data = noise(32 * MIB, 1)
    host.write_image(f"{name}1", 0, data)
    with (
        exported(peer) as (_, fd),
        open_ssd(name, way, queues=4, interrupts=True) as ssd,
        ugds.register_dmabuf(fd, SIZE) as buffer,
    ):
        assert ssd.read(buffer, 0, 32 * MIB, 16 * MIB) == 32 * MIB
        assert host.read_peer(16 * MIB, 32 * MIB) == data

        def work(number: int) -> None:
            for step in range(8):
                ssd.read(buffer, (number * 8 + step) * 64 * KIB, 64 * KIB, (step * 4 + number) * 64 * KIB)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        for step in range(8):
            at = (number * 8 + step) * 64 * KIB
            assert host.read_peer((step * 4 + number) * 64 * KIB, 64 * KIB) == data[at : at + 64 * KIB]


@pytest.mark.parametrize(("start", "length"), [(4 * KIB, 4 * MIB), (60 * MIB, 4 * MIB)])
@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_a_part_of_a_dma_buf_is_a_buffer_of_its_own(
    open_ssd: Open, host: Host, peer: PciDevice, start: int, length: int, way: str, name: str
) -> None:
    with (
        exported(peer) as (_, fd),
        open_ssd(name, way) as ssd,
        ugds.register_dmabuf(fd, length, start) as buffer,
    ):
        both_ways(ssd, buffer, host, f"{name}1", start)
        with pytest.raises(ugds.Error) as beyond:
            ssd.read(buffer, 0, 8 * KIB, length - 4 * KIB)
        assert beyond.value.errno in (errno.EINVAL, errno.ERANGE)


@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_a_slice_that_the_exporter_made_is_all_that_is_reached(
    open_ssd: Open, host: Host, peer: PciDevice, way: str, name: str
) -> None:
    with exported(peer, (8 * MIB, 4 * MIB)) as (_, fd), open_ssd(name, way) as ssd:
        with ugds.register_dmabuf(fd, 4 * MIB) as buffer:
            both_ways(ssd, buffer, host, f"{name}1", 8 * MIB)
        with pytest.raises(ugds.Error) as beyond:
            ugds.register_dmabuf(fd, 8 * MIB)
        assert beyond.value.errno == errno.EINVAL
        assert beyond.value.hint


def attached() -> int:
    """Devices that have a DMA-BUF attached, as the kernel counts them."""
    text = Path("/sys/kernel/debug/dma_buf/bufinfo").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Total ") and "devices" in line)


def buffers() -> int:
    """DMA-BUFs that there are."""
    text = Path("/sys/kernel/debug/dma_buf/bufinfo").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Total ") and "objects" in line)


@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_closing_the_registration_lets_go_of_the_dma_buf(open_ssd: Open, peer: PciDevice, way: str, name: str) -> None:
    before = buffers()
    with open_ssd(name, way) as ssd:
        with exported(peer) as (_, fd):
            buffer = ugds.register_dmabuf(fd, SIZE)
            assert buffers() == before + 1
        # The descriptor is closed, and the registration holds it still.
        assert buffers() == before + 1
        buffer.close()
        assert buffers() == before
        with pytest.raises(ugds.Error) as stale:
            ssd.read(buffer, 0, 4096)
        assert stale.value.errno in (errno.EINVAL, errno.ENXIO, errno.ESTALE, errno.EBADF)


@pytest.mark.provokes("DMAR")
@pytest.mark.boot("iommufd")
def test_nothing_reaches_memory_that_its_exporter_took_back(open_ssd: Open, host: Host, peer: PciDevice) -> None:
    with (
        exported(peer) as (function, fd),
        open_ssd("peered", "iommufd") as ssd,
        ugds.register_dmabuf(fd, SIZE) as buffer,
    ):
        ssd.read(buffer, 0, MIB)
        function.reset()
        host.write_peer(0, b"\xdd" * MIB)
        # QEMU's controller says that it did it. The IOMMU says that it did not.
        try:
            ssd.read(buffer, 0, 4096, 0)
        except ugds.Error as error:
            assert error.errno == errno.EIO
        assert host.read_peer(0, MIB) == b"\xdd" * MIB
        time.sleep(0.2)


@pytest.mark.parametrize("way", [pytest.param("type1", marks=pytest.mark.boot("iommufd", "debian"))])
def test_a_dma_buf_needs_iommufd_and_that_is_said(open_ssd: Open, way: str) -> None:
    with open_ssd("coarse", way) as ssd:
        fd = os.memfd_create("not a DMA-BUF")
        os.ftruncate(fd, MIB)
        try:
            with pytest.raises(ugds.Error) as refused:
                ugds.register_dmabuf(fd, MIB, devices=[ssd])
        finally:
            os.close(fd)
        assert refused.value.errno == errno.EOPNOTSUPP
        assert "iommufd" in str(refused.value)


@pytest.mark.boot("iommufd")
def test_a_mapped_bar_is_refused_by_iommufd_with_the_way_that_works(open_ssd: Open, peer: PciDevice) -> None:
    with resource_of(peer) as memory, open_ssd("peered", "iommufd") as ssd:
        with pytest.raises(ugds.Error) as refused:
            ugds.register(memory, devices=[ssd])
        assert refused.value.errno == errno.EFAULT
        assert "DMA-BUF" in refused.value.hint


@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_peer_memory_has_no_address_here(open_ssd: Open, peer: PciDevice, way: str, name: str) -> None:
    with exported(peer) as (_, fd), open_ssd(name, way), ugds.register_dmabuf(fd, MIB) as buffer:
        with pytest.raises((BufferError, TypeError, ugds.Error)):
            memoryview(buffer)
        assert len(buffer) == MIB


@pytest.mark.parametrize(("way", "name"), IMPORTS)
def test_memory_that_may_only_be_read_is_never_written(
    open_ssd: Open, host: Host, peer: PciDevice, way: str, name: str
) -> None:
    host.write_peer(0, b"\xdd" * MIB)
    with (
        exported(peer) as (_, fd),
        open_ssd(name, way) as ssd,
        ugds.register_dmabuf(fd, MIB, readonly=True) as buffer,
    ):
        assert buffer.readonly
        assert ssd.write(buffer, 32 * MIB) == MIB
        assert host.read_image(f"{name}1", 32 * MIB, MIB) == b"\xdd" * MIB
        with pytest.raises(ugds.Error):
            ssd.read(buffer, 0)
        assert host.read_peer(0, MIB) == b"\xdd" * MIB
