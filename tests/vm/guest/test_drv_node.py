# SPDX-License-Identifier: Apache-2.0
"""The node of ugds_drv: what it tells, who may open it, what can be mapped of it, and when the module may go."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from devices import Controller, load, wait_for
from host import Host
from small_nvme import CC, CSTS, SmallNvme

import drv as api
from drv import PAGE, DrvFile, refused_with

Give = Callable[[str], Controller]
Open = Callable[[str], DrvFile]
Drive = Callable[..., SmallNvme]
KIB, MIB = 1 << 10, 1 << 20
NOBODY = 65534
pytestmark = pytest.mark.boot("iommufd", "debian")


def opens_as_nobody(node: Path) -> int:
    """What an unprivileged process gets that may open the node's file: 0, or an error's number."""
    node.chmod(0o666)
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with DrvFile(node):
                code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_the_node_is_found_by_sysfs_both_ways(drv: Give) -> None:
    two = drv("two")
    node = api.node_of(two)
    number = os.stat(node).st_rdev
    by_number = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")
    assert (by_number / "subsystem").resolve().name == "ugds_drv"
    assert (by_number / "device").resolve().name == two.address
    assert (api.CLASS / node.name / "device").resolve() == two.folder.resolve()
    assert node.stat().st_mode & 0o777 == 0o600


@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_the_handshake_tells_what_there_is(open_drv: Open, controllers: dict[str, Controller], machine: dict) -> None:
    info = open_drv("two").info()
    bus, rest = controllers["two"].address[5:].split(":")
    device, function = rest.split(".")
    assert info.api_version == api.API_VERSION
    assert info.pci_address == int(bus, 16) << 8 | int(device, 16) << 3 | int(function)
    assert info.pci_domain == 0
    assert (info.state, info.vectors, info.dma_bits, info.bar_offset) == (api.LIVE, 9, 64, 0)
    assert info.bar_size == os.stat(controllers["two"].folder / "resource0").st_size
    assert bool(info.capabilities & api.TRANSLATED) == machine["iommu"]
    assert info.capabilities & (api.DMABUF | api.FAULTS | api.FLR) == api.DMABUF | api.FAULTS | api.FLR
    assert bool(info.capabilities & api.P2PDMA) == (machine["boot"] != "debian")
    assert not info.capabilities & api.NVIDIA


def test_one_file_at_a_time(drv: Give) -> None:
    node = api.node_of(drv("two"))
    with DrvFile(node):
        with pytest.raises(OSError, match="busy") as second:
            DrvFile(node)
        assert second.value.errno == errno.EBUSY
    with DrvFile(node):
        pass


def test_bus_mastering_and_the_controller_are_on_only_while_it_is_open(drv: Give) -> None:
    two = drv("two")
    assert not two.bus_master()
    with DrvFile(api.node_of(two)) as file:
        assert two.bus_master()
        nvme = SmallNvme(file)
        assert nvme.read32(CSTS) & 1
        nvme.close()
    assert not two.bus_master()
    with DrvFile(api.node_of(two)) as file, file.registers() as registers:
        assert not registers[CC] & 1
        assert not registers[CSTS] & 1


def test_an_unprivileged_user_opens_it_only_where_an_iommu_translates(drv: Give, host: Host) -> None:
    two = drv("two")
    assert opens_as_nobody(api.node_of(two)) == 0
    two.unbind()
    kind = two.folder / "iommu_group" / "type"
    before = kind.read_text().strip()
    kind.write_text("identity")
    try:
        node = api.node_of(drv("two"))
        assert opens_as_nobody(node) == errno.EPERM
        with DrvFile(node) as file:
            assert not file.info().capabilities & api.TRANSLATED
    finally:
        two.unbind()
        kind.write_text(before)
    with DrvFile(api.node_of(drv("two"))) as file:
        assert file.info().capabilities & api.TRANSLATED


@pytest.mark.boot("noiommu")
def test_an_unprivileged_user_never_opens_it_without_iommu(drv: Give) -> None:
    assert opens_as_nobody(api.node_of(drv("two"))) == errno.EPERM


@pytest.mark.boot("iommufd", "debian", "debug")
def test_the_module_cannot_be_unloaded_while_a_file_is_open(drv: Give) -> None:
    node = api.node_of(drv("two"))
    with DrvFile(node):
        done = subprocess.run(["rmmod", "ugds_drv"], capture_output=True, text=True)
        assert done.returncode != 0
        assert "in use" in done.stderr
    subprocess.run(["rmmod", "ugds_drv"], check=True)
    assert not node.exists()
    load("ugds_drv")
    with DrvFile(api.node_of(drv("two"))):
        pass


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, "bar + page"),
        (PAGE, "bar"),
        ("bar", PAGE),
        (1 << 36, PAGE),
        (1 << 40, PAGE),
        ((1 << 63) - PAGE * 2, PAGE),
        ("area", "area + page"),
        ("area + page", PAGE),
        ("area - page", PAGE),
        ("bar - page", 2 * PAGE),
    ],
)
def test_a_mapping_beyond_the_bounds_is_refused(open_drv: Open, offset: int | str, length: int | str) -> None:
    file = open_drv("two")
    area = file.call(api.Alloc(length=3 * PAGE))
    file.unmap(area.token)
    area = file.call(api.Alloc(length=3 * PAGE))
    sizes = {"bar": file.info().bar_size, "page": PAGE}
    at = offset if isinstance(offset, int) else eval(offset, {**sizes, "area": area.mmap_offset})
    size = length if isinstance(length, int) else eval(length, {**sizes, "area": 3 * PAGE})
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(file.fd, size, offset=at)


def test_a_mapping_is_shared_not_executable_and_not_inherited(open_drv: Open) -> None:
    file = open_drv("two")
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(file.fd, PAGE, flags=mmap.MAP_PRIVATE)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(file.fd, PAGE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    registers, area = file.registers(), api.Coherent(file, PAGE)
    assert registers[8:12] != b"\xff" * 4
    for memory in (registers, area.memory):
        child = os.fork()
        if child == 0:
            memory[0]
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    registers.close()
    area.free()


def test_parts_of_the_registers_can_be_mapped(open_drv: Open) -> None:
    file = open_drv("two")
    with file.registers() as whole, mmap.mmap(file.fd, PAGE, prot=mmap.PROT_READ) as first:
        assert whole[0:8] == first[0:8] != b"\xff" * 8
        with mmap.mmap(file.fd, PAGE, offset=PAGE) as doorbells:
            assert len(doorbells) == PAGE


@pytest.mark.parametrize("pages", [1, 2, 3, 5, 16, 17, 33, 512, 1024])
@pytest.mark.boot("iommufd", "debian", "noiommu")
def test_coherent_memory_is_zeroed_contiguous_and_aligned(open_drv: Open, pages: int) -> None:
    area = api.Coherent(open_drv("two"), pages * PAGE)
    assert area.memory[:] == bytes(pages * PAGE)
    size = 1 << (pages * PAGE - 1).bit_length()
    assert area.iova % min(size, 64 * KIB) == 0
    area.memory[-1] = 1
    area.free()


def test_coherent_memory_that_is_mapped_is_not_freed(open_drv: Open) -> None:
    file = open_drv("two")
    area = api.Coherent(file, PAGE)
    with pytest.raises(OSError) as mapped:
        file.unmap(area.token)
    refused_with(mapped.value, errno.EBUSY, "mapped")
    assert file.status(area.token).mapping == api.MAPPING_LIVE
    area.free()
    assert file.status(area.token).mapping == api.MAPPING_UNKNOWN
    with pytest.raises(OSError) as again:
        file.unmap(area.token)
    refused_with(again.value, errno.ENOENT, "token")


@pytest.mark.parametrize(
    ("length", "code", "reason"),
    [
        (0, errno.EINVAL, "range"),
        (1, errno.EINVAL, "range"),
        (PAGE + 1, errno.EINVAL, "range"),
        (2**64 - PAGE, errno.ENOMEM, "limit"),
        (4 * MIB + PAGE, errno.ENOMEM, "limit"),
    ],
)
def test_coherent_memory_has_limits(open_drv: Open, length: int, code: int, reason: str) -> None:
    with pytest.raises(OSError) as refused:
        open_drv("two").call(api.Alloc(length=length))
    refused_with(refused.value, code, reason)


def test_all_coherent_memory_of_a_file_has_a_limit(open_drv: Open) -> None:
    file = open_drv("two")
    info = file.info()
    areas = [file.call(api.Alloc(length=1 * MIB)) for _ in range(info.coherent_total // MIB)]
    assert len({area.token for area in areas} | {area.mmap_offset for area in areas}) == 2 * len(areas)
    with pytest.raises(OSError) as refused:
        file.call(api.Alloc(length=PAGE))
    refused_with(refused.value, errno.ENOMEM, "limit")
    file.unmap(areas[7].token)
    file.call(api.Alloc(length=1 * MIB))


@pytest.mark.parametrize("kind", api.REQUESTS)
def test_a_structure_of_another_size_is_told_apart(open_drv: Open, kind: type[api.Request]) -> None:
    file = open_drv("two")
    short = kind()
    short.argsz -= 4
    with pytest.raises(OSError, match="Invalid argument"):
        file.call(short)
    long = kind()
    long.argsz = PAGE + 4
    with pytest.raises(OSError, match="too long"):
        file.call(long)
    wrong = kind()
    wrong.flags = 1 << 31
    with pytest.raises(OSError) as refused:
        file.call(wrong)
    refused_with(refused.value, errno.EINVAL, "argument")


def test_a_longer_structure_is_taken_as_long_as_its_end_is_zero(open_drv: Open) -> None:
    import ctypes
    import fcntl

    file = open_drv("two")
    size = ctypes.sizeof(api.Info)
    head = bytes(api.Info())[4:]
    request = bytearray((size + 16).to_bytes(4, "little") + head + bytes(16))
    fcntl.ioctl(file.fd, 0xD600, request)
    assert int.from_bytes(request[8:12], "little") == api.API_VERSION
    request = bytearray((size + 16).to_bytes(4, "little") + head + bytes(15) + b"\1")
    with pytest.raises(OSError, match="too long"):
        fcntl.ioctl(file.fd, 0xD600, request)
    for number in (0xD60A, 0xD6FF, 0xD500, 0x4004D600):
        with pytest.raises(OSError, match="ioctl"):
            fcntl.ioctl(file.fd, number, bytearray(256))


def test_a_reset_stops_the_controller_and_gives_it_back(drive: Drive, drv: Give) -> None:
    nvme = drive("two")
    file = nvme.file
    generation = file.status().generation
    for flags, method in ((0, api.DISABLED), (api.WITH_FLR, api.FUNCTION_RESET)):
        assert nvme.read32(CSTS) & 1
        answer = file.reset(flags)
        assert (answer.stopped, answer.method) == (1, method)
        assert not nvme.read32(CSTS) & 1
        assert drv("two").bus_master()
        nvme.enable()
        memory = mmap.mmap(-1, PAGE)
        pages = file.map_host(memory)
        nvme.identify(pages[0])
        assert b"uGDS-two" in memory[:]
        file.unmap(pages.token)
    assert file.status().generation == generation


def test_a_reset_by_the_system_wedges_it_until_its_owner_resets(drive: Drive, drv: Give) -> None:
    nvme = drive("two")
    file, two = nvme.file, drv("two")
    event = os.eventfd(0, os.EFD_NONBLOCK)
    file.tell(event)
    before = file.status()
    (two.folder / "reset").write_text("1")
    assert os.eventfd_read(event) == 1
    after = file.status()
    assert after.generation > before.generation
    assert (after.state, api.REASONS[after.cause]) == (api.WEDGED, "system reset")
    assert not two.bus_master()
    file.reset()
    assert file.status().state == api.LIVE
    nvme.enable()
    file.tell(-1)
    os.close(event)


def reset_bus(device: Controller) -> None:
    """By the port's bridge control register (PCI-to-PCI Bridge 1.2, 3.2.5.18: bit 6). It leaves the device nothing of
    what was written to its configuration space."""
    port = device.folder.resolve().parent / "config"
    before = port.read_bytes()[0x3E:0x40]
    with port.open("r+b", buffering=0) as config:
        for control in (bytes([before[0] | 0x40, before[1]]), before):
            config.seek(0x3E)
            config.write(control)
            time.sleep(0.2)


@pytest.mark.provokes("AER")
@pytest.mark.boot("debian")
def test_an_error_of_its_link_wedges_it_until_its_owner_resets(drive: Drive, drv: Give, host: Host) -> None:
    """Twice, since what is restored has to be there again the next time. QEMU's ports cannot show Linux that their link
    is back, so the bus is reset here, and the error is one for which this kernel resets none."""
    nvme = drive("two")
    file, two = nvme.file, drv("two")
    memory, admin = mmap.mmap(-1, PAGE), os.eventfd(0, os.EFD_NONBLOCK)
    pages = file.map_host(memory)
    file.interrupts(admin)
    for _ in range(2):
        before = file.status().generation
        reset_bus(two)
        assert not host.hmp(f"pcie_aer_inject_error {two.port} COMP_TIME").startswith("Error")
        wait_for("the error is dealt with", lambda before=before: file.status().generation >= before + 2)
        assert (file.status().state, api.REASONS[file.status().cause]) == (api.WEDGED, "pci error")
        assert not two.bus_master()
        file.reset()
        assert file.status().state == api.LIVE
        memory[:] = bytes(PAGE)
        nvme.enable(vectors=True)
        assert select.select([admin], [], [], 5)[0]
        os.eventfd_read(admin)
        nvme.identify(pages[0])
        assert b"uGDS-two" in memory[:]
    os.close(admin)
