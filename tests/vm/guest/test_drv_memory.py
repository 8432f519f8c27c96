# SPDX-License-Identifier: Apache-2.0
"""Host memory through ugds_drv: what is pinned, what is refused and why, and that the controller reaches exactly it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devices import Controller
from host import Host
from small_nvme import SmallNvme

import drv as api
from drv import PAGE, DrvFile, address_of, refused_with

Open = Callable[[str], DrvFile]
Drive = Callable[..., SmallNvme]
KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.boot("iommufd", "debian")


def locked() -> int:
    """KiB that this process has locked, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Without CAP_IPC_LOCK in effect, so that the limit of locked memory counts."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    header, sets = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0]
    sets[0] &= ~(1 << 14)
    assert libc.capset(ctypes.byref(header), sets) == 0
    yield
    sets[0] = before
    assert libc.capset(ctypes.byref(header), sets) == 0


@pytest.mark.boot("iommufd", "debian", "noiommu", "debug")
def test_blocks_move_between_disk_and_memory(drive: Drive, host: Host) -> None:
    nvme = drive("two")
    data = random.Random(1).randbytes(256 * KIB)
    host.write_image("two1", MIB, data)
    memory = mmap.mmap(-1, 256 * KIB + 2 * PAGE)
    memory[:] = b"\xa5" * len(memory)
    pages = nvme.file.map_host(memory, PAGE, 256 * KIB)
    nvme.read(MIB // 512, 512, pages)
    assert memory[:] == b"\xa5" * PAGE + data + b"\xa5" * PAGE
    nvme.write(2 * MIB // 512, 512, pages)
    assert host.read_image("two1", 2 * MIB, 256 * KIB) == data
    nvme.file.unmap(pages.token)


@pytest.mark.boot("noiommu")
def test_addresses_are_physical_without_iommu(open_drv: Open) -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    memory[:] = b"\1" * len(memory)
    pages = open_drv("two").map_host(memory)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(address_of(memory) // PAGE * 8)
        frames = [int.from_bytes(file.read(8), "little") & (1 << 55) - 1 for _ in range(64)]
    assert list(pages.addresses) == [frame * PAGE for frame in frames]


@pytest.mark.provokes("DMAR")
def test_only_what_is_mapped_is_reached_and_only_as_it_was_asked_for(drive: Drive, host: Host) -> None:
    """QEMU's controller says that it did what it did not. One test: the log tells only the first few faults."""
    nvme = drive("two")
    memory = mmap.mmap(-1, 64 * KIB)
    memory[:] = b"\x17" * len(memory)
    pages = nvme.file.map_host(memory, access=api.READ)
    nvme.write(0, 128, pages)
    assert host.read_image("two1", 0, 64 * KIB) == memory[:]
    host.write_image("two1", 0, b"\x42" * 64 * KIB)
    nvme.read(0, 128, pages)
    assert set(memory[:]) == {0x17}
    nvme.file.unmap(pages.token)
    pages = nvme.file.map_host(memory)
    nvme.read(0, 128, pages)
    assert set(memory[:]) == {0x42}
    memory[:] = bytes(64 * KIB)
    nvme.file.unmap(pages.token)
    nvme.read(0, 128, pages)
    assert set(memory[:]) == {0}


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        ((0, 4), (4, 4), False),
        ((4, 4), (0, 4), False),
        ((0, 4), (0, 4), True),
        ((0, 8), (2, 2), True),
        ((2, 2), (0, 8), True),
        ((0, 4), (3, 4), True),
        ((3, 4), (0, 4), True),
    ],
)
def test_overlapping_ranges_are_refused(
    open_drv: Open, first: tuple[int, int], second: tuple[int, int], clash: bool
) -> None:
    file, memory = open_drv("two"), mmap.mmap(-1, 16 * PAGE)
    one = file.map_host(memory, first[0] * PAGE, first[1] * PAGE)
    if clash:
        with pytest.raises(OSError) as refused:
            file.map_host(memory, second[0] * PAGE, second[1] * PAGE)
        refused_with(refused.value, errno.EEXIST, "overlap")
        file.unmap(one.token)
    two = file.map_host(memory, second[0] * PAGE, second[1] * PAGE)
    assert two.token > one.token
    file.unmap(two.token)


def test_the_same_pages_by_another_address_are_no_overlap(open_drv: Open) -> None:
    """What a process has mapped twice is two ranges of it."""
    file, fd = open_drv("two"), os.memfd_create("twice")
    os.ftruncate(fd, 4 * PAGE)
    one, two = mmap.mmap(fd, 4 * PAGE), mmap.mmap(fd, 4 * PAGE)
    os.close(fd)
    first, second = file.map_host(one), file.map_host(two)
    file.unmap(first.token)
    file.unmap(second.token)


@pytest.mark.parametrize(
    ("shift", "length", "code", "reason"),
    [
        (1, PAGE, errno.EINVAL, "range"),
        (0, PAGE - 1, errno.EINVAL, "range"),
        (0, 0, errno.EINVAL, "range"),
        (0, 2**64 - PAGE, errno.EINVAL, "range"),
        (0, 1 << 40, errno.ENOMEM, "limit"),
    ],
)
def test_a_range_that_is_none_is_refused(open_drv: Open, shift: int, length: int, code: int, reason: str) -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    request = api.MapHost(address=address_of(memory) + shift, length=length, access=api.READ)
    with pytest.raises(OSError) as refused:
        open_drv("two").call(request)
    refused_with(refused.value, code, reason)


@pytest.mark.parametrize("access", [0, 2, 4, 7, 2**32 - 1])
def test_an_access_that_is_none_is_refused(open_drv: Open, access: int) -> None:
    with pytest.raises(OSError) as refused:
        open_drv("two").map_host(mmap.mmap(-1, PAGE), access=access)
    refused_with(refused.value, errno.EINVAL, "argument")


def test_memory_that_cannot_be_pinned_is_refused_and_nothing_stays(open_drv: Open) -> None:
    file, before = open_drv("two"), locked()
    forbidden, libc = mmap.mmap(-1, 8 * PAGE), ctypes.CDLL(None)
    address = address_of(forbidden)
    assert libc.mprotect(ctypes.c_void_p(address + 4 * PAGE), 4 * PAGE, 0) == 0
    private = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert libc.mprotect(ctypes.c_void_p(address_of(private)), PAGE, 0) == 0
    registers, area = file.registers(), api.Coherent(file, PAGE)
    bad = [
        (address, 8 * PAGE),
        (PAGE, PAGE),
        (address + 4 * PAGE, PAGE),
        (address_of(private), PAGE),
        (1 << 47, PAGE),
        (address_of(registers), PAGE),
        (address_of(area.memory), PAGE),
    ]
    for at, length in bad:
        for access in (api.READ, api.READ_WRITE):
            with pytest.raises(OSError) as refused:
                file.map_address(at, length, access)
            refused_with(refused.value, errno.EFAULT, "unpinnable")
    assert locked() == before
    registers.close()
    area.free()


def test_an_array_that_cannot_be_written_is_told_and_nothing_stays(open_drv: Open) -> None:
    file, before, memory = open_drv("two"), locked(), mmap.mmap(-1, 8 * PAGE)
    for array in (0, PAGE, 1 << 63):
        request = api.MapHost(address=address_of(memory), length=8 * PAGE, pages=array, access=api.READ)
        with pytest.raises(OSError) as refused:
            file.call(request)
        refused_with(refused.value, errno.EFAULT, "array")
    assert locked() == before
    file.unmap(file.map_host(memory).token)


def test_locked_memory_is_counted_and_given_back(open_drv: Open, unprivileged: None) -> None:
    file, before = open_drv("two"), locked()
    memory = mmap.mmap(-1, MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(2 * MIB, hard) if hard >= 0 else 2 * MIB, hard))
    try:
        pages = file.map_host(memory)
        assert locked() == before + 1024
        other = mmap.mmap(-1, 2 * MIB)
        with pytest.raises(OSError) as refused:
            file.map_host(other)
        refused_with(refused.value, errno.ENOMEM, "limit")
        assert locked() == before + 1024
        file.unmap(pages.token)
        assert locked() == before
        file.unmap(file.map_host(other).token)
        file.map_host(memory)
        file.close()
        assert locked() == before
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_pinned_memory_stays_where_it_is_for_the_device(drive: Drive, host: Host) -> None:
    """What the process unmaps, the device may still write; it is nobody else's until it is unmapped here."""
    nvme = drive("two")
    host.write_image("two1", 0, b"\x99" * 64 * KIB)
    memory = mmap.mmap(-1, 64 * KIB)
    pages = nvme.file.map_host(memory)
    memory.close()
    others = [mmap.mmap(-1, MIB) for _ in range(32)]
    for other in others:
        other[:] = b"\x11" * MIB
    nvme.read(0, 128, pages)
    assert all(other[:] == b"\x11" * MIB for other in others)
    nvme.file.unmap(pages.token)


def test_what_is_written_after_a_mapping_to_read_is_what_the_device_reads(drive: Drive, host: Host) -> None:
    """A first write gives the process another page, in place of the zero page or of a private file's, unless mapping
    them did."""
    nvme = drive("two")
    fd = os.memfd_create("behind a private mapping")
    os.write(fd, b"\x33" * 16 * PAGE)
    untouched = mmap.mmap(-1, 16 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    private = mmap.mmap(fd, 16 * PAGE, flags=mmap.MAP_PRIVATE)
    os.close(fd)
    for number, memory in enumerate((untouched, private)):
        assert memory[PAGE] == 0x33 * number
        pages = nvme.file.map_host(memory, access=api.READ)
        memory[:] = data = random.Random(number).randbytes(16 * PAGE)
        nvme.write(0, 128, pages)
        assert host.read_image("two1", 0, 16 * PAGE) == data
        nvme.file.unmap(pages.token)


def test_memory_that_only_the_device_s_reads_may_touch_is_mapped(drive: Drive, host: Host) -> None:
    """Neighbouring mappings of other kinds, none of which this process may write."""
    nvme, libc = drive("two"), ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    fd, data = os.memfd_create("behind them"), random.Random(9).randbytes(48 * PAGE)
    os.write(fd, data)
    whole = mmap.mmap(-1, 48 * PAGE)
    address = address_of(whole)
    for place, kind in enumerate((mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_SHARED)):
        at = ctypes.c_void_p(address + place * 16 * PAGE)
        where, fixed = ctypes.c_long(place * 16 * PAGE), kind | 0x10  # MAP_FIXED
        assert libc.mmap(at, ctypes.c_size_t(16 * PAGE), mmap.PROT_READ, fixed, fd, where) == at.value
    os.close(fd)
    pages = nvme.file.map_host(whole, access=api.READ)
    nvme.write(0, 384, pages)
    assert host.read_image("two1", 0, 48 * PAGE) == data
    nvme.file.unmap(pages.token)
    with pytest.raises(OSError) as refused:
        nvme.file.map_host(whole)
    refused_with(refused.value, errno.EFAULT, "unpinnable")


def test_large_memory_is_mapped_page_by_page(drive: Drive, host: Host) -> None:
    nvme = drive("two")
    memory = mmap.mmap(-1, 64 * MIB)
    pages = nvme.file.map_host(memory)
    assert len(set(pages.addresses)) == 64 * MIB // PAGE
    assert not any(address % PAGE for address in pages.addresses)
    chosen = random.Random(3).sample(range(len(pages)), 64)
    data = random.Random(4).randbytes(64 * PAGE)
    host.write_image("two1", 0, data)
    nvme.read(0, 512, [pages[number] for number in chosen])
    for place, number in enumerate(chosen):
        assert memory[number * PAGE : (number + 1) * PAGE] == (data[place * PAGE : (place + 1) * PAGE])


@pytest.mark.boot("iommufd", "debian", "debug")
def test_interrupts_arrive_at_their_eventfds(drive: Drive, open_drv: Open) -> None:
    file = open_drv("two")
    admin, io = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    file.interrupts(admin, io)
    nvme = SmallNvme(file, vectors=True)
    memory = mmap.mmap(-1, PAGE)
    pages = file.map_host(memory)
    assert os.eventfd_read(admin) >= 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(io)
    nvme.read(0, 8, pages)
    assert os.eventfd_read(io) == 1
    file.interrupts(-1, io)
    nvme.identify(pages[0])
    with pytest.raises(BlockingIOError):
        os.eventfd_read(admin)
    file.interrupts()
    nvme.read(0, 8, pages)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(io)
    nvme.close()
    for event in (admin, io):
        os.close(event)


def test_interrupts_that_there_are_not_are_refused(open_drv: Open, controllers: dict[str, Controller]) -> None:
    file, event = open_drv("two"), os.eventfd(0)
    vectors = file.info().vectors
    file.interrupts(*[event] * vectors)
    for eventfds, code, reason in (
        ([event] * (vectors + 1), errno.EINVAL, "vectors"),
        ([event, 1 << 20], errno.EBADF, "descriptor"),
        ([event, -2], errno.EBADF, "descriptor"),
        ([file.fd], errno.EINVAL, "descriptor"),
    ):
        with pytest.raises(OSError) as refused:
            file.interrupts(*eventfds)
        refused_with(refused.value, code, reason)
        lines = Path("/proc/interrupts").read_text()
        assert "ugds_drv" not in lines
    with pytest.raises(OSError) as refused:
        file.call(api.Interrupts(eventfds=0, count=1))
    refused_with(refused.value, errno.EFAULT, "array")
    with pytest.raises(OSError) as refused:
        file.tell(1 << 20)
    refused_with(refused.value, errno.EBADF, "descriptor")
    os.close(event)
