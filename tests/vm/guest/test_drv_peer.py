# SPDX-License-Identifier: Apache-2.0
"""Peer memory through ugds_drv: vfio-pci exports the BAR that stands for a GPU's memory, the module imports it for a
controller, and takes it away from it when the exporter does. The host has the last word on the bytes.

Which ways there are between two devices, the kernel decides: below one switch; or through the host bridge, of
processors that are known to forward (the boot `debug` has one, `iommufd` has not)."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from devices import Controller, PciDevice
from host import Host
from small_nvme import READ, Late, SmallNvme
from test_drv_setup import dma_buf, traces
from vfio_function import VfioFunction

import drv as api
from drv import PAGE, DrvFile, Pages, failing, node_of, refused_with

Give = Callable[[str], Controller]
Open = Callable[[str], DrvFile]
Drive = Callable[..., SmallNvme]
Slow = Callable[[str, int], None]
KIB, MIB = 1 << 10, 1 << 20
BAR, SIZE = 2, 64 * MIB
POISON = b"\xee" * PAGE
pytestmark = pytest.mark.boot("debug")


@contextmanager
def exported(peer: PciDevice, *ranges: tuple[int, int]) -> Iterator[tuple[VfioFunction, int]]:
    """The peer's BAR, or ranges of it, as a DMA-BUF."""
    peer.bind("vfio-pci")
    with VfioFunction(peer, by_iommufd=True) as function:
        fd = function.dma_buf(BAR, *(ranges or ((0, SIZE),)))
        try:
            yield function, fd
        finally:
            os.close(fd)


def both_ways(nvme: SmallNvme, pages: Pages, block: int, drive: str, host: Host, start: int = 0) -> None:
    """Disk to peer and peer to disk, with poison around what is written. `start` is where in the peer's memory the
    mapping begins."""
    for seed, (offset, size) in enumerate([(8 * KIB, 4 * KIB), (64 * KIB, 64 * KIB), (MIB, 512 * KIB)]):
        at, data = start + offset, random.Random(seed).randbytes(size)
        chosen = pages[offset // PAGE : (offset + size) // PAGE]
        host.write_peer(at - PAGE, POISON + b"\xdd" * size + POISON)
        host.write_image(drive, 4 * MIB, data)
        nvme.read(4 * MIB // block, size // block, chosen)
        assert host.read_peer(at - PAGE, size + 2 * PAGE) == POISON + data + POISON
        back = random.Random(100 + seed).randbytes(size)
        host.write_peer(at, back)
        nvme.write(16 * MIB // block, size // block, chosen)
        assert host.read_image(drive, 16 * MIB, size) == back


def function_number(device: PciDevice) -> int:
    bus, rest = device.address[5:].split(":")
    slot, function = rest.split(".")
    return int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)


def test_below_two_root_ports_that_forward_the_peer_is_reached(drive: Drive, host: Host, peer: PciDevice) -> None:
    nvme = drive("two")
    with exported(peer) as (_, fd):
        pages = nvme.file.map_dmabuf(fd, SIZE, flags=api.REQUIRE_PEER)
        answer = pages.answer
        assert (answer.placement, answer.peer_bytes, answer.physical) == (api.PEER, SIZE, 0)
        assert (answer.peer_domain, answer.peer_address) == (0, function_number(peer))
        assert answer.holding == api.REVOCABLE
        both_ways(nvme, pages, 512, "two1", host)
        nvme.file.unmap(pages.token)


def test_a_part_of_the_peer_is_a_mapping_of_its_own(drive: Drive, host: Host, peer: PciDevice) -> None:
    nvme = drive("two")
    with exported(peer, (8 * MIB, 8 * MIB)) as (_, fd):
        whole = nvme.file.map_dmabuf(fd, 8 * MIB)
        nvme.file.unmap(whole.token)
        first = nvme.file.map_dmabuf(fd, 2 * MIB, MIB)
        both_ways(nvme, first, 512, "two1", host, 9 * MIB)
        with pytest.raises(OSError) as refused:
            nvme.file.map_dmabuf(fd, 2 * MIB, 2 * MIB)
        refused_with(refused.value, errno.EEXIST, "overlap")
        second = nvme.file.map_dmabuf(fd, 2 * MIB, 6 * MIB)
        both_ways(nvme, second, 512, "two1", host, 14 * MIB)
        for offset, length, reason in ((4 * MIB, 4 * MIB + PAGE, "beyond end"), (8 * MIB, PAGE, "beyond end")):
            with pytest.raises(OSError) as refused:
                nvme.file.map_dmabuf(fd, length, offset)
            refused_with(refused.value, errno.EINVAL, reason)


def test_host_memory_is_told_from_a_peer_s(open_drv: Open) -> None:
    """What an exporter keeps in host memory is no direct route to its device, whatever it is called."""
    file, fd = open_drv("two"), dma_buf(MIB)
    pages = file.map_dmabuf(fd, MIB)
    assert (pages.answer.placement, pages.answer.peer_bytes) == (api.HOST, 0)
    file.unmap(pages.token)
    before = traces()
    with pytest.raises(OSError) as refused:
        file.map_dmabuf(fd, MIB, flags=api.REQUIRE_PEER)
    refused_with(refused.value, errno.EXDEV, "not peer")
    assert traces() == before
    os.close(fd)


@pytest.fixture
def lazy(controllers: dict[str, Controller]) -> Iterator[Controller]:
    """A controller whose translations the kernel takes back lazily, as it does by default on a machine of iron."""
    two = controllers["two"]
    two.unbind()
    kind = two.folder / "iommu_group" / "type"
    before = kind.read_text().strip()
    kind.write_text("DMA-FQ")
    yield two
    two.unbind()
    kind.write_text(before)


@pytest.mark.provokes("DMAR")
@pytest.mark.boot("debug", "debian")
def test_what_is_unmapped_is_out_of_reach_even_where_the_kernel_is_lazy(
    lazy: Controller, drive: Drive, host: Host
) -> None:
    nvme, size = drive(lazy.name), 16 * PAGE
    host.write_image("two1", 0, b"\x42" * size)
    fd = dma_buf(size)
    memory, own = mmap.mmap(fd, size), mmap.mmap(-1, size)
    for pages, where in ((nvme.file.map_dmabuf(fd, size), memory), (nvme.file.map_host(own), own)):
        where[:] = b"\x17" * size
        nvme.read(0, size // 512, pages)  # from now on the IOMMU's cache has the addresses
        assert set(where[:]) == {0x42}
        nvme.file.unmap(pages.token)
        where[:] = b"\x17" * size
        nvme.read(0, size // 512, pages)
        assert set(where[:]) == {0x17}
    memory.close()
    os.close(fd)


def test_a_descriptor_that_is_no_dma_buf_is_refused(open_drv: Open) -> None:
    file = open_drv("two")
    for fd, code in ((os.memfd_create("no DMA-BUF"), errno.EINVAL), (1 << 20, errno.EBADF), (-1, errno.EBADF)):
        with pytest.raises(OSError) as refused:
            file.map_dmabuf(fd, PAGE)
        refused_with(refused.value, code, "descriptor")


def test_closing_with_peer_memory_mapped_lets_go_of_it(drv: Give, peer: PciDevice) -> None:
    node = node_of(drv("two"))
    bufinfo = Path("/sys/kernel/debug/dma_buf/bufinfo")
    before = bufinfo.read_text().splitlines()[-1]
    with exported(peer) as (_, fd):
        with DrvFile(node) as file:
            file.map_dmabuf(fd, SIZE)
        with DrvFile(node) as file:
            file.map_dmabuf(fd, SIZE)
    assert bufinfo.read_text().splitlines()[-1] == before


def must_be_wedged(file: DrvFile, two: Controller, event: int, token: int) -> None:
    assert os.eventfd_read(event) == 1
    status = file.status(token)
    assert (status.state, api.REASONS[status.cause]) == (api.WEDGED, "revoked")
    assert status.mapping == api.MAPPING_REVOKED
    assert not two.bus_master()


@pytest.mark.parametrize("held_back", [False, True])
def test_no_byte_is_written_once_the_exporter_has_taken_it_back(
    drive: Drive, drv: Give, host: Host, peer: PciDevice, slow: Slow, held_back: bool
) -> None:
    nvme, two = drive("two"), drv("two")
    file, event = nvme.file, os.eventfd(0, os.EFD_NONBLOCK)
    file.tell(event)
    host.write_image("two1", 0, b"\x42" * MIB)
    with exported(peer) as (function, fd):
        pages = file.map_dmabuf(fd, MIB)
        nvme.read(0, 128, pages[:16])
        if held_back:  # commands that the disk holds back
            slow("two1", KIB)
        end, rung = time.monotonic() + 0.3, 0

        def busy() -> None:
            """Rings on, whether it is heard or not, for as long as it takes."""
            nonlocal rung
            while time.monotonic() < end:
                flying, rung = 0, rung + 1
                while flying < 8:
                    nvme.start(READ, 0, 128, pages[flying * 16 :][:16], flying)
                    flying += 1
                while flying and time.monotonic() < end:
                    try:
                        nvme.reap(nvme.io, 0.001)
                        flying -= 1
                    except Late:
                        nvme.ring(nvme.io)

        thread = threading.Thread(target=busy)
        thread.start()
        time.sleep(0.1)
        function.reset()  # the exporter's callback has returned when this does
        host.write_peer(0, b"\xdd" * MIB)
        must_be_wedged(file, two, event, pages.token)
        thread.join()
        slow("two1", 0)
        time.sleep(0.2)
        assert rung
        assert host.read_peer(0, MIB) == b"\xdd" * MIB
        # It is recovered by a reset. What was revoked stays so; the memory can be mapped anew.
        answer = file.reset()
        assert answer.stopped == 1
        assert file.status(pages.token).state == api.LIVE
        assert file.status(pages.token).mapping == api.MAPPING_REVOKED
        nvme.enable()
        own = mmap.mmap(-1, 64 * KIB)
        nvme.read(0, 128, file.map_host(own))
        assert set(own[:]) == {0x42}
        with pytest.raises(OSError) as refused:
            file.map_dmabuf(fd, MIB)
        refused_with(refused.value, errno.EEXIST, "overlap")
        file.unmap(pages.token)
        pages = file.map_dmabuf(fd, MIB)
        nvme.read(0, 128, pages[:16])
        assert host.read_peer(0, 64 * KIB) == b"\x42" * 64 * KIB
        file.unmap(pages.token)
    os.close(event)


@pytest.mark.provokes("DMAR")
def test_a_stale_address_faults_after_the_reset(drive: Drive, host: Host, peer: PciDevice) -> None:
    nvme = drive("two")
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    with exported(peer) as (function, fd):
        pages = nvme.file.map_dmabuf(fd, MIB)
        function.reset()
        nvme.file.reset()
        nvme.enable()
        host.write_peer(0, b"\xdd" * MIB)
        nvme.read(0, 128, pages[:16])
        assert host.read_peer(0, MIB) == b"\xdd" * MIB


def test_revocation_removal_and_closing_come_in_any_order(drv: Give, host: Host, peer: PciDevice) -> None:
    two = drv("two")
    for order in range(4):
        file = DrvFile(node_of(drv("two")))
        with exported(peer) as (function, fd):
            pages = file.map_dmabuf(fd, MIB)
            if order == 0:
                function.reset()
                file.close()
            elif order == 1:
                two.unbind()
                function.reset()
                file.close()
            elif order == 2:
                function.reset()
                two.unbind()
                assert api.REASONS[file.status(pages.token).cause] == "removed"
                file.close()
        if order == 3:  # the exporter itself has gone, and its memory with it
            assert file.status(pages.token).mapping == api.MAPPING_REVOKED
            file.unmap(pages.token)
            file.close()


# Below one switch, and between root ports that do not forward.


@pytest.fixture
def untranslated(controllers: dict[str, Controller]) -> Iterator[Callable[[str], None]]:
    """Takes a controller's translation away, as `iommu=pt` does; gives it back at the end."""
    changed: list[tuple[Path, Controller, str]] = []

    def change(name: str) -> None:
        controller = controllers[name]
        controller.unbind()
        kind = controller.folder / "iommu_group" / "type"
        changed.append((kind, controller, kind.read_text().strip()))
        kind.write_text("identity")

    yield change
    for kind, controller, before in changed:
        controller.unbind()
        kind.write_text(before)


@pytest.mark.boot("iommufd")
def test_root_ports_that_do_not_forward_are_refused_with_the_reason(open_drv: Open, peer: PciDevice) -> None:
    file = open_drv("coarse")
    with exported(peer) as (_, fd):
        before = traces()
        with pytest.raises(OSError) as refused:
            file.map_dmabuf(fd, SIZE)
        assert isinstance(refused.value, api.Refused)
        assert refused.value.reason in ("attach", "exporter")
        assert refused.value.errno in (errno.EREMOTEIO, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
        assert traces() == before


@pytest.mark.boot("iommufd")
def test_without_translation_the_exporter_has_to_pin(
    open_drv: Open, peer: PciDevice, untranslated: Callable[[str], None]
) -> None:
    """vfio-pci does not: it wants to be able to take its memory back."""
    untranslated("peered")
    file = open_drv("peered")
    with exported(peer) as (_, fd):
        with pytest.raises(OSError) as refused:
            file.map_dmabuf(fd, SIZE)
        refused_with(refused.value, errno.EOPNOTSUPP, "cannot pin")


@pytest.mark.boot("iommufd")
def test_below_one_switch_without_translation_the_peer_is_reached_when_revocation_is_allowed(
    drive: Drive, drv: Give, host: Host, peer: PciDevice, untranslated: Callable[[str], None]
) -> None:
    untranslated("peered")
    nvme, peered = drive("peered"), drv("peered")
    event = os.eventfd(0, os.EFD_NONBLOCK)
    nvme.file.tell(event)
    with exported(peer) as (function, fd):
        pages = nvme.file.map_dmabuf(fd, SIZE, flags=api.ALLOW_REVOCABLE | api.REQUIRE_PEER)
        answer = pages.answer
        assert (answer.placement, answer.physical, answer.holding) == (api.PEER, 1, api.REVOCABLE)
        assert answer.peer_address == function_number(peer)
        both_ways(nvme, pages, 4096, "peered1", host)
        function.reset()
        host.write_peer(0, b"\xdd" * MIB)
        must_be_wedged(nvme.file, peered, event, pages.token)
        nvme.start(READ, 0, 16, pages[:16])
        time.sleep(0.2)
        assert host.read_peer(0, MIB) == b"\xdd" * MIB
    os.close(event)


@pytest.mark.boot("iommufd")
def test_host_memory_stays_where_it_is_without_translation(
    drive: Drive, host: Host, untranslated: Callable[[str], None]
) -> None:
    untranslated("two")
    nvme, fd = drive("two"), dma_buf(64 * KIB)
    before = traces()
    with failing("dmabuf_pin"), pytest.raises(OSError) as failed:
        nvme.file.map_dmabuf(fd, 64 * KIB)
    refused_with(failed.value, errno.EUCLEAN, "cannot pin")
    assert traces() == before
    pages = nvme.file.map_dmabuf(fd, 64 * KIB)
    answer = pages.answer
    assert (answer.placement, answer.physical) == (api.HOST, 1)
    assert answer.holding in (api.PINNED, api.STATIC)
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    nvme.read(0, 128, pages)
    with mmap.mmap(fd, 64 * KIB) as memory:
        assert set(memory[:]) == {0x42}
    nvme.file.unmap(pages.token)
    os.close(fd)


@pytest.mark.boot("iommufd")
def test_below_one_switch_behind_an_iommu_the_address_is_one_of_the_bus(open_drv: Open, peer: PciDevice) -> None:
    """The switch forwards it before the IOMMU sees it. QEMU's forwards nothing, so no byte is moved here."""
    file = open_drv("peered")
    with exported(peer) as (_, fd):
        answer = file.map_dmabuf(fd, SIZE).answer
        assert (answer.placement, answer.physical, answer.holding) == (api.PEER, 1, api.REVOCABLE)
        assert answer.peer_address == function_number(peer)
